"""Text to tokens and back, with a checkpoint's own tokenizer, chat template and stop ids.

Nothing of the checkpoint is executed: ``tokenizer.json`` is data, and the chat template runs in
jinja2's immutable sandbox.
"""

import dataclasses
import datetime
import json
import pathlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from jax_nvfp4_moe.checkpoint.errors import CheckpointError, quoted
from jax_nvfp4_moe.checkpoint.folder import CONFIG, exists, find_folder, locate, read_json

TOKENIZER = "tokenizer.json"
TOKENIZER_CONFIG = "tokenizer_config.json"
GENERATION_CONFIG = "generation_config.json"
TEMPLATE = "chat_template.jinja"

Messages = Sequence[Mapping[str, str]]


@dataclasses.dataclass(frozen=True)
class Tokenizer:
    """A checkpoint's tokenizer.

    Attributes:
      encoder: a `tokenizers.Tokenizer`.
      template: source of the chat template, or None.
      special: name -> text of bos_token, eos_token and the like, as templates see them.
      stop_ids: tokens that end a text.
    """

    encoder: Any
    template: str | None
    special: Mapping[str, str]
    stop_ids: tuple[int, ...]

    def encode(self, text: str, *, special: bool = True) -> np.ndarray:
        """Return the ids of `text`, int32 ``[n]``; `special` adds what its rules put around."""
        return np.asarray(self.encoder.encode(text, add_special_tokens=special).ids, np.int32)

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of `ids`, without special tokens."""
        return self.encoder.decode([int(i) for i in ids], skip_special_tokens=True)

    def decode_stream(self, ids: Iterator[int]) -> Iterator[str]:
        """Yield the text that each id adds; bytes of an unfinished character wait for the rest."""
        seen: list[int] = []
        shown = ""
        for token in ids:
            seen.append(int(token))
            text = self.decode(seen)
            if not text.endswith("\ufffd"):
                yield text[len(shown) :]
                shown = text
        if seen and (rest := self.decode(seen)[len(shown) :]):
            yield rest

    def chat(self, messages: Messages, *, add_generation_prompt: bool = True) -> str:
        """Render `messages` by the chat template, up to where the answer begins.

        Args:
          messages: each with "role" and "content".
          add_generation_prompt: whether what begins an answer follows the last message.

        Raises:
          CheckpointError: there is no template, or it fails.
        """
        if self.template is None:
            raise CheckpointError(
                [f"no chat template: neither {TEMPLATE} nor chat_template in {TOKENIZER_CONFIG}"]
            )
        try:
            template = _environment().from_string(self.template)
            return template.render(
                messages=messages, add_generation_prompt=add_generation_prompt, **self.special
            )
        except Exception as error:  # a template can raise anything that an expression can
            raise CheckpointError([f"chat template: {type(error).__name__}: {error}"]) from None


def load_tokenizer(folder: str | pathlib.Path) -> Tokenizer:
    """Load the tokenizer of a checkpoint folder.

    Raises:
      CheckpointError: ``tokenizer.json`` is missing or cannot be parsed, or another file of the
        tokenizer is not what it should be.
    """
    import tokenizers  # on demand: only text needs it

    folder = find_folder(folder)
    try:
        text = locate(folder, TOKENIZER).read_text(encoding="utf-8")
        config = read_json(folder, TOKENIZER_CONFIG) if exists(folder, TOKENIZER_CONFIG) else {}
        try:
            encoder = tokenizers.Tokenizer.from_str(text)
        except Exception as error:  # the binding raises no narrower type
            raise CheckpointError([f"{TOKENIZER}: {error}"]) from None
        special = {
            name: _token_text(value) for name, value in config.items() if name.endswith("_token")
        }
        known = {name: value for name, value in special.items() if value is not None}
        return Tokenizer(encoder, _template(folder, config), known, _stop_ids(folder))
    except CheckpointError as error:
        raise CheckpointError(error.problems, str(folder)) from None


def _template(folder, config):
    if exists(folder, TEMPLATE):
        return locate(folder, TEMPLATE).read_text(encoding="utf-8")
    given = config.get("chat_template")
    if isinstance(given, list):  # several by name
        named = {t.get("name"): t.get("template") for t in given if isinstance(t, dict)}
        given = named.get("default")
    if given is not None and not isinstance(given, str):
        raise CheckpointError([f"{TOKENIZER_CONFIG}: chat_template: got {quoted(given)}"])
    return given


def _token_text(value):
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else None


def _stop_ids(folder) -> tuple[int, ...]:
    """Return ``eos_token_id``: of the generation config, else of the model's."""
    for name in (GENERATION_CONFIG, CONFIG):
        ids = read_json(folder, name).get("eos_token_id") if exists(folder, name) else None
        if ids is None:
            continue
        ids = ids if isinstance(ids, list) else [ids]
        if not all(type(i) is int and 0 <= i < 2**31 for i in ids):
            raise CheckpointError([f"{name}: eos_token_id: expected ids, got {quoted(ids)}"])
        return tuple(ids)
    return ()


def _environment():
    """Return a sandbox with what chat templates expect to find, as transformers provides it."""
    import jinja2
    import jinja2.ext
    import jinja2.sandbox

    class Generation(jinja2.ext.Extension):
        """``{% generation %}`` marks the assistant's text for training; here it is transparent."""

        tags = {"generation"}  # noqa: RUF012 - the type that jinja2 declares

        def parse(self, parser):
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    def raise_exception(message):
        raise jinja2.TemplateError(message)

    def tojson(value, ensure_ascii=False, indent=None, separators=None, sort_keys=False):
        return json.dumps(
            value,
            ensure_ascii=ensure_ascii,
            indent=indent,
            separators=separators,
            sort_keys=sort_keys,
        )

    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", Generation]
    )
    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
    return environment
