"""Convert text to tokens and back, with the tokenizer of a checkpoint.

No code of the checkpoint is executed. ``tokenizer.json`` is data, and the chat template runs in the
immutable sandbox of jinja2.
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
    """The tokenizer of a checkpoint, with its chat template and its stop ids.

    Attributes:
      encoder: a `tokenizers.Tokenizer`.
      template: source of the chat template, or None if the checkpoint has none.
      special: name of each special token, such as "bos_token" -> its text. Templates see them under
        these names.
      stop_ids: ids of the tokens that end a text; empty if the checkpoint names none.
    """

    encoder: Any
    template: str | None
    special: Mapping[str, str]
    stop_ids: tuple[int, ...]

    def encode(self, text: str, *, special: bool = True) -> np.ndarray:
        """Return the token ids of a text.

        Args:
          text: the text.
          special: whether to add the special tokens that the tokenizer puts around a text, such as
            a token that begins it. Defaults to True.

        Returns:
          int32 ``[n]``.
        """
        return np.asarray(self.encoder.encode(text, add_special_tokens=special).ids, np.int32)

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of token ids, without special tokens."""
        return self.encoder.decode([int(i) for i in ids], skip_special_tokens=True)

    def decode_stream(self, ids: Iterator[int]) -> Iterator[str]:
        """Yield the text that each token id adds.

        A character may consist of the bytes of several tokens. Its text comes with the last of
        them.
        """
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
        """Render messages by the chat template as the text of a prompt.

        Args:
          messages: the conversation, each message a mapping with "role" and "content".
          add_generation_prompt: whether to append the text that begins an answer. Defaults to True.

        Raises:
          CheckpointError: the checkpoint has no chat template, or the template fails.
        """
        if self.template is None:
            raise CheckpointError(
                [
                    f"no chat template: the checkpoint has no file {TEMPLATE}, and no field "
                    f"chat_template in {TOKENIZER_CONFIG}. Pass a prompt as plain text instead"
                ]
            )
        try:
            template = _environment().from_string(self.template)
            return template.render(
                messages=messages, add_generation_prompt=add_generation_prompt, **self.special
            )
        except Exception as error:  # expressions in a template can raise any exception
            raise CheckpointError(
                [f"the chat template failed: {type(error).__name__}: {error}"]
            ) from None


def load_tokenizer(folder: str | pathlib.Path) -> Tokenizer:
    """Load the tokenizer of a checkpoint, with its chat template and its stop ids.

    ``tokenizer.json`` is required. The following files are read if they exist:

    * ``tokenizer_config.json``: special tokens, and the chat template of some checkpoints
    * ``chat_template.jinja``: the chat template; it takes precedence
    * ``generation_config.json``, otherwise ``config.json``: ``eos_token_id``, the stop ids

    Args:
      folder: checkpoint folder, or a name on the Hugging Face Hub, as for `load_model`.

    Returns:
      A `Tokenizer`.

    Raises:
      CheckpointError: ``tokenizer.json`` is missing or cannot be parsed, or another of the files
        has wrong contents.

    Example:
      >>> import importlib.resources
      >>> import jax_nvfp4_moe as nvfp4
      >>> folder = importlib.resources.files(nvfp4) / "examples" / "tiny-python-moe"
      >>> tokenizer = nvfp4.load_tokenizer(folder)
      >>> ids = tokenizer.encode("import jax")
      >>> tokenizer.decode(ids)
      'import jax'

    Source: https://huggingface.co/docs/tokenizers.
    """
    import tokenizers  # only callers that work with text pay for this import

    folder = find_folder(folder)
    try:
        text = locate(folder, TOKENIZER).read_text(encoding="utf-8")
        config = read_json(folder, TOKENIZER_CONFIG) if exists(folder, TOKENIZER_CONFIG) else {}
        try:
            encoder = tokenizers.Tokenizer.from_str(text)
        except Exception as error:  # the binding raises plain `Exception`
            raise CheckpointError([f"{TOKENIZER}: it cannot be parsed: {error}"]) from None
        special = {
            name: _token_text(value) for name, value in config.items() if name.endswith("_token")
        }
        known = {name: value for name, value in special.items() if value is not None}
        return Tokenizer(encoder, _template(folder, config), known, _stop_ids(folder))
    except CheckpointError as error:
        raise CheckpointError(error.problems, str(folder)) from None


def _template(folder, config):
    """Return the source of the chat template, or None if there is none."""
    if exists(folder, TEMPLATE):
        return locate(folder, TEMPLATE).read_text(encoding="utf-8")
    given = config.get("chat_template")
    if isinstance(given, list):  # several named templates
        named = {t.get("name"): t.get("template") for t in given if isinstance(t, dict)}
        given = named.get("default")
    if given is not None and not isinstance(given, str):
        raise CheckpointError(
            [f"{TOKENIZER_CONFIG}: chat_template: expected text, got {quoted(given)}"]
        )
    return given


def _token_text(value):
    """Return the text of a special token, or None if `value` is not one."""
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else None


def _stop_ids(folder) -> tuple[int, ...]:
    """Return ``eos_token_id`` of the generation config, or that of the model's config."""
    for name in (GENERATION_CONFIG, CONFIG):
        ids = read_json(folder, name).get("eos_token_id") if exists(folder, name) else None
        if ids is None:
            continue
        ids = ids if isinstance(ids, list) else [ids]
        if not all(type(i) is int and 0 <= i < 2**31 for i in ids):
            raise CheckpointError(
                [f"{name}: eos_token_id: expected a token id or a list of ids, got {quoted(ids)}"]
            )
        return tuple(ids)
    return ()


def _environment():
    """Return a sandbox with the functions that chat templates expect.

    They are those that transformers provides.
    """
    import jinja2
    import jinja2.ext
    import jinja2.sandbox

    class Generation(jinja2.ext.Extension):
        """``{% generation %}`` marks the assistant's text for training. Rendering ignores it."""

        tags = {"generation"}  # noqa: RUF012 - jinja2 declares the attribute like this

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
