"""Read ``tekken.json``, the tokenizer of Mistral's own format.

It lists the bytes of tokens in the order in which merges make them. The first ids are those of
special tokens, and the token of rank r has the id r + the number of special tokens.

Source: ``tokens/tokenizers/tekken.py`` of mistral-common 1.13.
"""

import base64
import dataclasses
import pathlib
from collections.abc import Mapping
from typing import Any

from jax_nvfp4_moe.checkpoint.errors import CheckpointError, quoted
from jax_nvfp4_moe.checkpoint.folder import exists, read_json

TEKKEN = "tekken.json"
_FIRST = "tokenizer.json"  # counts if both are there
UNKNOWN, BEGIN, END, PAD = "<unk>", "<s>", "</s>", "<pad>"
# The special tokens of files that name none, which are the oldest ones.
_OLDEST = (
    *(UNKNOWN, BEGIN, END, "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]"),
    *("[TOOL_RESULTS]", "[/TOOL_RESULTS]", "[TOOL_CALLS]", "[IMG]", PAD, "[IMG_BREAK]"),
    *("[IMG_END]", "[PREFIX]", "[MIDDLE]", "[SUFFIX]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]"),
    "[TOOL_CONTENT]",
)
_BYTES = 256  # the first tokens are the single bytes
# Limits of what is read. Published files have 1000 special tokens, and tokens of up to 78 bytes.
_MOST_SPECIAL, _LONGEST = 100_000, 1024


@dataclasses.dataclass(frozen=True)
class Tekken:
    """The contents of ``tekken.json``.

    Attributes:
      pattern: the regular expression that cuts a text into words.
      special: the texts of the special tokens; the place of a text is its id.
      tokens: the bytes of all other tokens, by rank.
    """

    pattern: str
    special: tuple[str, ...]
    tokens: tuple[bytes, ...]


def uses_tekken(folder: pathlib.Path) -> bool:
    """Return whether ``tekken.json`` is the tokenizer of a checkpoint's folder."""
    return exists(folder, TEKKEN) and not exists(folder, _FIRST)


def read_tekken(folder: pathlib.Path) -> Tekken:
    """Read ``tekken.json`` in a checkpoint's folder.

    The vocabulary is cut to the size that the file gives, and special tokens without a name are
    called ``<SPECIAL_{id}>``.

    Raises:
      CheckpointError: the file is missing, is no JSON object, or lacks what a tokenizer needs. The
        message names the key.
    """
    whole = read_json(folder, TEKKEN)
    config = _typed(whole, "config", dict, "an object")
    size, count = (
        _typed(config, key, int, "an integer", "config.")
        for key in ("default_vocab_size", "default_num_special_tokens")
    )
    if not 0 <= count <= _MOST_SPECIAL:
        raise _error(
            f"config.default_num_special_tokens: expected 0 to {_MOST_SPECIAL}, got {count}"
        )
    special = _special(whole.get("special_tokens"), count)
    vocab = _typed(whole, "vocab", list, "a list")
    kept = size - count
    if not _BYTES <= kept <= len(vocab):
        raise _error(
            f"config.default_vocab_size: expected {count + _BYTES} to {count + len(vocab)}, which "
            f"are the special tokens and those of vocab, got {size}"
        )
    pattern = _typed(config, "pattern", str, "a regular expression", "config.")
    return Tekken(pattern, special, _tokens(vocab[:kept]))


def _typed(values: Mapping[str, Any], key: str, kind: type, said: str, above: str = "") -> Any:
    """Return the value of a key that has a type."""
    value = values.get(key)
    if type(value) is not kind:
        raise _error(f"{above}{key}: expected {said}, got {quoted(value)}")
    return value


def _special(stored, count) -> tuple[str, ...]:
    """Return the texts of `count` special tokens."""
    entries = [{"rank": i, "token_str": text} for i, text in enumerate(_OLDEST)]
    entries = entries if stored is None else stored
    if not isinstance(entries, list) or len(entries) > count:
        raise _error(
            f"special_tokens: expected a list of at most default_num_special_tokens = {count}, got "
            f"{quoted(stored) if not isinstance(entries, list) else len(entries)}"
        )
    texts = [f"<SPECIAL_{i}>" for i in range(count)]
    for place, entry in enumerate(entries):
        text = _ranked(entry, place, "special_tokens").get("token_str")
        if not isinstance(text, str) or not text or not _is_unicode(text):
            raise _error(f"special_tokens[{place}].token_str: expected a text, got {quoted(text)}")
        texts[place] = text
    if len(set(texts)) < count:
        again = next(text for text in texts if texts.count(text) > 1)
        raise _error(f"special_tokens: expected distinct texts, got {quoted(again)} more than once")
    return tuple(texts)


def _is_unicode(text: str) -> bool:
    """Return whether UTF-8 can encode a text, as it cannot encode half of a surrogate pair."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _tokens(vocab) -> tuple[bytes, ...]:
    """Return the bytes of the tokens of a vocabulary."""
    seen: dict[bytes, int] = {}
    for place, entry in enumerate(vocab):
        stored = _ranked(entry, place, "vocab").get("token_bytes")
        token = _decoded(stored)
        if token is None:
            raise _error(f"vocab[{place}].token_bytes: expected base64, got {quoted(stored)}")
        if place < _BYTES and token != bytes([place]):
            raise _error(f"vocab[{place}].token_bytes: expected the byte {place}, got {token!r}")
        if len(token) > _LONGEST:
            raise _error(
                f"vocab[{place}].token_bytes: expected at most {_LONGEST} bytes, got {len(token)}"
            )
        if seen.setdefault(token, place) != place or not token:
            raise _error(
                f"vocab[{place}].token_bytes: expected bytes that no other token has, got {token!r}"
            )
    return tuple(seen)


def _decoded(stored) -> bytes | None:
    """Return the bytes that a text in base64 stands for, or None if it is none."""
    try:
        return base64.b64decode(stored, validate=True) if isinstance(stored, str) else None
    except ValueError:  # binascii.Error is one, and so is a character that is not ASCII
        return None


def _ranked(entry, place, key) -> Mapping[str, Any]:
    """Return an entry of a list, whose rank is its place."""
    if not isinstance(entry, dict) or entry.get("rank") != place:
        raise _error(f"{key}[{place}]: expected an object with rank {place}, got {quoted(entry)}")
    return entry


def _error(problem: str) -> CheckpointError:
    return CheckpointError([f"{TEKKEN}: {problem}"])
