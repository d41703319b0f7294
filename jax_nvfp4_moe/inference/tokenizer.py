"""Convert text to tokens and back, with the tokenizer of a checkpoint.

No code of the checkpoint is executed. ``tokenizer.json`` is data, and the chat template runs in the
immutable sandbox of jinja2.
"""

import dataclasses
import logging
import pathlib
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, overload

import numpy as np

from jax_nvfp4_moe.checkpoint.errors import CheckpointError, quoted
from jax_nvfp4_moe.checkpoint.folder import (
    CONFIG,
    exists,
    find_folder,
    merge_text_config,
    read_json,
)
from jax_nvfp4_moe.checkpoint.stop_ids import read_stop_ids
from jax_nvfp4_moe.checkpoint.tekken import uses_tekken
from jax_nvfp4_moe.inference.chat_template import (
    DEFAULT,
    Messages,
    check_mappings,
    choose_template,
    read_templates,
    render,
)
from jax_nvfp4_moe.inference.special_tokens import (
    add_tokens,
    read_special_tokens,
    say_ends,
    text_of,
)
from jax_nvfp4_moe.inference.tekken_encoder import read_encoder
from jax_nvfp4_moe.inference.text_file import read_text
from jax_nvfp4_moe.inference.tokenizer_class import (
    REBUILT,
    TOKENIZER,
    TOKENIZER_CONFIG,
    choose_class,
    rebuild,
)
from jax_nvfp4_moe.inference.tokenizer_faults import blaming_tokenizer, check_prefix, one_line

if TYPE_CHECKING:
    import tokenizers

log = logging.getLogger("jax_nvfp4_moe")

# Other forms of a tokenizer, which are named if no form that is read is there.
_OTHER_FORMS = ("tokenizer.model", "tiktoken.model", "vocab.json", "vocab.txt")
# Keys of tokenizer_config.json that change ids or text, and that are not implemented.
_NOT_IMPLEMENTED = ("fast_tokenizer_files", "fix_mistral_regex")
_BPE_TOO = "clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output"
# The spaces that `clean_up_tokenization_spaces` removes.
_CLEANED = (" .", " ?", " !", " ,", " ' ", " n't", " 'm", " 's", " 've", " 're")
_CONTEXT = 16  # tokens before a streamed token with which it is decoded


@dataclasses.dataclass(frozen=True)
class Tokenizer:
    """The tokenizer of a checkpoint, with its chat templates and its stop ids.

    Attributes:
      encoder: a `tokenizers.Tokenizer`.
      template: source of the chat template, or None if the checkpoint has none.
      special: name of each special token, such as "bos_token" -> its text. Templates see them under
        these names.
      stop_ids: ids of the tokens that end a text; empty if the checkpoint names none.
      templates: name -> source of every chat template. `template` is the one named "default"; the
        one named "tool_use" renders conversations with tools.
      clean_up: whether `decode` removes spaces before punctuation.
    """

    encoder: "tokenizers.Tokenizer"
    template: str | None
    special: Mapping[str, str]
    stop_ids: tuple[int, ...]
    templates: Mapping[str, str] = dataclasses.field(default_factory=dict)
    clean_up: bool = False

    @overload
    def encode(self, text: str, *, special: bool = True) -> np.ndarray: ...

    @overload
    def encode(
        self, text: list[str] | tuple[str, ...], *, special: bool = True
    ) -> tuple[np.ndarray, np.ndarray]: ...

    def encode(self, text: str | Sequence[str], *, special: bool = True) -> Any:
        """Return the token ids of a text, or of several texts as `generate` takes them.

        Args:
          text: the text, or a sequence of b texts.
          special: whether to add the special tokens that the tokenizer puts around a text, such as
            a token that begins it. Defaults to True.

        Returns:
          int32 ``[n]`` for a text. For several texts, a pair: int32 ``[b, t]``, left-aligned, with
          zeros after the end of each text that is shorter than the longest; and int32 ``[b]``, the
          number of tokens in each text.

        Raises:
          CheckpointError: the tokenizer fails.
          TypeError: `text` is neither a text nor a sequence of texts.
          ValueError: a text has a half of a surrogate pair, which UTF-8 cannot encode.

        Example:
          >>> import importlib.resources
          >>> import jax_nvfp4_moe as nvfp4
          >>> folder = importlib.resources.files(nvfp4) / "examples" / "tiny-python-moe"
          >>> tokenizer = nvfp4.load_tokenizer(folder)
          >>> ids, lengths = tokenizer.encode(["import jax", "return"])
          >>> lengths.tolist()
          [2, 1]
          >>> tokenizer.decode(ids, lengths)
          ['import jax', 'return']
        """
        if not isinstance(text, str):
            return _pad([self.encode(one, special=special) for one in _texts(text)])
        _check_text(text)
        with blaming_tokenizer("encode a text"):
            return np.asarray(self.encoder.encode(text, add_special_tokens=special).ids, np.int32)

    def decode(self, ids: Any, lengths: Any = None) -> Any:
        """Return the text of token ids, or the texts of several rows, without special tokens.

        Args:
          ids: integers ``[n]``; or rows of them ``[b, n]``, which may differ in length if they are
            in a list.
          lengths: number of tokens to decode in each row, integers ``[b]``, such as ``lengths`` of
            `GenerationStats`. None (default) decodes all tokens. A stop id that is repeated after
            the end of a row is left out in any case if it is a special token.

        Returns:
          A text, or a list of b texts.

        Raises:
          CheckpointError: the tokenizer fails.
          ValueError: `lengths` is not one number for each row.
        """
        if _are_rows(ids):
            return [self.decode(row) for row in _cut(ids, lengths)]
        if lengths is not None:
            raise ValueError("lengths: expected None, because `ids` are the tokens of one text")
        with blaming_tokenizer("decode tokens"):
            text = self.encoder.decode([int(i) for i in ids], skip_special_tokens=True)
        for spaced in _CLEANED if self.clean_up else ():
            text = text.replace(spaced, spaced.strip())
        return text

    def decode_stream(
        self, ids: Iterator[int], after: Sequence[int] | np.ndarray = ()
    ) -> Iterator[str]:
        """Yield the text that each token id adds.

        A character may consist of the bytes of several tokens. Its text comes with the last of
        them. A token is decoded together with a few tokens before it, so that the time for each
        one does not grow with the text.

        Args:
          ids: the token ids.
          after: the token ids before them, whose text is not yielded. Some tokenizers leave out the
            space before the first word of a text; with the tokens before it, the space is kept.
        """
        window = [int(token) for token in after[-_CONTEXT:]]
        whole = self.decode(window)
        shown = whole if window else ""
        for token in ids:
            window.append(int(token))
            whole = self.decode(window)
            text = self._settled(whole)
            if text.endswith("\ufffd") or len(text) < len(shown):
                continue
            yield text[len(shown) :]
            shown = text
            # Where spaces are cleaned, what a text begins with depends on what stands before it.
            if len(window) > 2 * _CONTEXT and text == whole and not self.clean_up:
                rest = self.decode(window[-_CONTEXT:])
                # A window that began within a character would decode to other text.
                if rest and whole.endswith(rest):
                    window, shown = window[-_CONTEXT:], rest
        if window and (rest := self.decode(window)[len(shown) :]):
            yield rest

    def _settled(self, text: str) -> str:
        """Return the text without ends that the next token may change."""
        while self.clean_up and (end := _open_end(text)):
            text = text.removesuffix(end)
        return text

    def chat(
        self,
        messages: Messages,
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        **variables: Any,
    ) -> str:
        """Render messages by the chat template as the text of a prompt.

        The text holds the special tokens that begin it, so encode it with ``special=False``.

        Args:
          messages: the conversation, each message a mapping with "role" and "content". The content
            is text, or a list of parts. A message may hold "tool_calls" and whatever else the
            template reads; keys that hold None are left out.
          add_generation_prompt: whether to append the text that begins an answer. Defaults to True.
          tools: the tools that the model may call, each a JSON schema as a dictionary. None means
            no tools. If the checkpoint has a template named "tool_use", tools choose it.
          documents: documents to answer from, as dictionaries. None means no documents.
          **variables: further variables of the template, such as ``enable_thinking=False``. They
            replace special tokens of the same name.

        Raises:
          CheckpointError: the checkpoint has no chat template, or the template fails.
          ValueError: there are no messages, or an argument has a wrong type.

        Example:
          >>> import dataclasses, importlib.resources
          >>> import jax_nvfp4_moe as nvfp4
          >>> folder = importlib.resources.files(nvfp4) / "examples" / "tiny-python-moe"
          >>> source = "{{ messages[0].content }}{% if brief %} Be brief.{% endif %}"
          >>> tokenizer = nvfp4.load_tokenizer(folder)
          >>> tokenizer = dataclasses.replace(tokenizer, template=source)
          >>> tokenizer.chat([{"role": "user", "content": "Why?"}], brief=True)
          'Why? Be brief.'
        """
        check_mappings("tools", tools)
        check_mappings("documents", documents)
        named = dict(self.templates) if self.template is None else {DEFAULT: self.template}
        source = choose_template({**self.templates, **named}, tools)
        given = {
            "tools": tools,
            "documents": documents,
            "add_generation_prompt": add_generation_prompt,
        }
        return render(source, messages, {**self.special, **variables, **given})


def _check_text(text: str) -> None:
    """Raise `ValueError` if UTF-8 cannot encode a text."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(
            f"text: expected characters that UTF-8 can encode, got {quoted(text[error.start])} at "
            f"position {error.start}, which is half of a surrogate pair"
        ) from None


def _texts(texts) -> Sequence[str]:
    """Return texts as they are, and refuse anything else."""
    expected = "text: expected a text or a sequence of texts"
    if isinstance(texts, (bytes, Mapping)) or not hasattr(texts, "__len__"):
        raise TypeError(f"{expected}, got {type(texts).__name__}")
    wrong = [type(text).__name__ for text in texts if not isinstance(text, str)]
    if wrong:
        raise TypeError(f"{expected}, got one that contains {wrong[0]}")
    return texts


def _pad(rows: Sequence[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """Return rows as one array, int32 ``[b, t]``, left-aligned, and their lengths."""
    lengths = np.asarray([len(row) for row in rows], np.int32)
    padded = np.zeros((len(rows), lengths.max(initial=0)), np.int32)
    for row, filled in zip(rows, padded, strict=True):
        filled[: len(row)] = row
    return padded, lengths


def _are_rows(ids) -> bool:
    """Return whether ids are several rows."""
    if isinstance(ids, (list, tuple)):
        return bool(ids) and np.ndim(ids[0]) == 1
    return np.ndim(ids) == 2


def _cut(rows, lengths):
    """Return rows of ids, each cut to its length."""
    rows = rows if isinstance(rows, (list, tuple)) else np.asarray(rows)
    if lengths is None:
        return rows
    counts = np.asarray(lengths)
    if counts.shape != (len(rows),) or (counts.size and counts.dtype.kind not in "iu"):
        raise ValueError(
            f"lengths: expected {len(rows)} integers, one for each row of ids; got {counts.dtype} "
            f"{counts.shape}"
        )
    return [row[:count] for row, count in zip(rows, np.maximum(counts, 0), strict=True)]


def _open_end(text: str) -> str:
    """Return the longest end of a text that may become a part of `_CLEANED`, or an empty text."""
    ends = (spaced[:length] for spaced in _CLEANED for length in range(1, len(spaced)))
    return max((end for end in ends if text.endswith(end)), key=len, default="")


def load_tokenizer(folder: str | pathlib.Path) -> Tokenizer:
    """Load the tokenizer of a checkpoint, with its chat templates and its stop ids.

    Token ids, special tokens and rendered templates are those of transformers' AutoTokenizer.
    ``tokenizer.json`` or, in Mistral's own format, ``tekken.json`` is required; the first one
    counts if both exist. The following files are read if they exist:

    * ``tokenizer_config.json``: added and special tokens, the tokenizer's class, chat templates
    * ``special_tokens_map.json`` and ``added_tokens.json``: the same tokens in older checkpoints,
      without ``added_tokens_decoder`` in ``tokenizer_config.json``
    * ``chat_template.jinja`` and the folder ``additional_chat_templates``: chat templates, which
      come before those of ``tokenizer_config.json``; ``chat_template.json`` and
      ``processor_config.json`` come last
    * ``generation_config.json`` and ``config.json``: ``eos_token_id``, which are stop ids together
      with the tokenizer's ``eos_token``

    Truncation, padding and dropout in ``tokenizer.json`` are not applied. Tools leave them there
    for their own runs.

    Args:
      folder: checkpoint folder, or a name on the Hugging Face Hub, as for `load_model`.

    Returns:
      A `Tokenizer`.

    Raises:
      CheckpointError: ``tokenizer.json`` and ``tekken.json`` are missing or cannot be parsed, or
        another of the files has wrong contents.

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
    folder = find_folder(folder)
    try:
        return _load(folder)
    except CheckpointError as error:
        raise CheckpointError(error.problems, str(folder)) from None


def _load(folder):
    """Return the tokenizer of an existing folder."""
    config, model = (_read(folder, name) for name in (TOKENIZER_CONFIG, CONFIG))
    with blaming_tokenizer("read the tokenizer"):
        encoder, special = _encoder(folder, config, model)
        _say_not_implemented(config)
        _say_outside(encoder, merge_text_config(model).get("vocab_size"))
        end = special.text("eos_token")
        end = None if end is None else encoder.token_to_id(end)
    templates = read_templates(folder, config)
    return Tokenizer(
        encoder,
        templates.get(DEFAULT),
        {name: text_of(token) for name, token in special.named.items()},
        read_stop_ids(folder, () if end is None else (end,)),
        templates,
        _cleans(encoder, config),
    )


def has_tokenizer(folder: pathlib.Path) -> bool:
    """Return whether a checkpoint's folder has a file that `load_tokenizer` reads tokens from."""
    return exists(folder, TOKENIZER) or uses_tekken(folder)


def _encoder(folder, config, model):
    """Return the `tokenizers.Tokenizer` of a folder, and the special tokens in it."""
    if uses_tekken(folder):
        return read_encoder(folder)
    text = _tokenizer_text(folder)
    encoder = _parsed(text)
    stored = encoder.get_added_tokens_decoder()
    name = choose_class(model, config, text)
    rules = REBUILT.get(name)
    padding = {"pad_token": encoder.padding["pad_token"]} if encoder.padding else {}
    defaults = {**padding, **(rules.special if rules else {})}
    special = read_special_tokens(folder, config, text, defaults)
    rebuilt = rebuild(name, text, config, special.text("unk_token")) if rules else None
    encoder = encoder if rebuilt is None else rebuilt
    _forget_runs(encoder)
    encoder.encode_special_tokens = config.get("split_special_tokens") is True
    add_tokens(encoder, special, stored, bool(rules and rules.marked))
    say_ends(encoder, config, special)
    return encoder, special


def _forget_runs(encoder):
    """Take away what a tool left in ``tokenizer.json`` for its own run.

    transformers, too, cuts and pads only if it is asked to. It applies a dropout, with which a
    text has other ids each time.
    """
    encoder.no_truncation()
    encoder.no_padding()
    model = encoder.model
    if getattr(model, "dropout", None):
        log.warning(
            "%s: dropout of its model is %s, which is for training; it is not applied",
            TOKENIZER,
            model.dropout,
        )
        model.dropout = None


def _read(folder, name):
    return read_json(folder, name) if exists(folder, name) else {}


def _tokenizer_text(folder):
    """Return the text of ``tokenizer.json``."""
    if not exists(folder, TOKENIZER):
        there = "".join(f" {name!r} is not read." for name in _OTHER_FORMS if exists(folder, name))
        raise CheckpointError(
            [
                f"{TOKENIZER!r} is missing.{there} If the model has its tokenizer in another form, "
                "transformers can write this one: "
                "AutoTokenizer.from_pretrained(model).save_pretrained(folder)"
            ]
        )
    return read_text(folder, TOKENIZER)


def _parsed(text):
    """Return the tokenizer that the text of ``tokenizer.json`` holds."""
    import tokenizers  # only callers that work with text pay for this import

    check_prefix(text)
    try:
        return tokenizers.Tokenizer.from_str(text)
    except Exception as error:  # the binding raises plain `Exception`
        raise CheckpointError([f"{TOKENIZER}: it cannot be parsed: {one_line(error)}"]) from None


def _cleans(encoder, config):
    """Return whether decoding removes spaces before punctuation.

    For a BPE, whose text needs no cleaning, transformers ignores the usual key.
    """
    is_bpe = type(encoder.model).__name__ == "BPE"
    asked = config.get("clean_up_tokenization_spaces") is True
    return asked and (not is_bpe or config.get(_BPE_TOO) is True)


def _say_not_implemented(config):
    """Warn of keys that would change ids or text."""
    for name in _NOT_IMPLEMENTED:
        if config.get(name):
            log.warning(
                "%s: %s is %s, which is not implemented; %s is read as it is",
                TOKENIZER_CONFIG,
                name,
                quoted(config[name]),
                TOKENIZER,
            )


def _say_outside(encoder, vocab_size):
    """Warn of added tokens that the model does not have."""
    if type(vocab_size) is not int:
        return
    added = encoder.get_added_tokens_decoder()
    outside = [added[index].content for index in sorted(added) if index >= vocab_size]
    if outside:
        log.warning(
            "%s: vocab_size is %s, and the tokenizer has %s added tokens with larger ids, such as "
            "%s; the model cannot read a text that holds one of them",
            CONFIG,
            vocab_size,
            len(outside),
            quoted(outside[0]),
        )
