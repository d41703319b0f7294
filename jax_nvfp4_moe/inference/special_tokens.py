"""Read the added and special tokens of a checkpoint from all files that may name them.

``tokenizer.json`` holds added tokens, and so do three files beside it. Which of them counts follows
transformers' AutoTokenizer:

* ``added_tokens_decoder`` of ``tokenizer_config.json``, if it is there. Then ``added_tokens.json``
  and ``special_tokens_map.json`` are not read.
* Otherwise ``special_tokens_map.json``, whose entries replace those of ``tokenizer_config.json``,
  and ``added_tokens.json``, whose tokens come before those of ``tokenizer.json``.

Source: transformers 5.24.0, ``tokenization_utils_base.py`` (``_from_pretrained``) and
``tokenization_utils_tokenizers.py`` (``TokenizersBackend.__init__``).
"""

import dataclasses
import json
import logging
import pathlib
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from jax_nvfp4_moe.checkpoint.errors import CheckpointError, quoted
from jax_nvfp4_moe.checkpoint.folder import exists, read_json
from jax_nvfp4_moe.inference.tokenizer_class import TOKENIZER, TOKENIZER_CONFIG

if TYPE_CHECKING:
    import tokenizers

log = logging.getLogger("jax_nvfp4_moe")

ADDED_TOKENS = "added_tokens.json"
SPECIAL_TOKENS_MAP = "special_tokens_map.json"
NAMES = tuple(f"{name}_token" for name in ("bos", "eos", "unk", "sep", "pad", "cls", "mask"))
_DECODER, _EXTRA, _ADDITIONAL = (
    "added_tokens_decoder",
    "extra_special_tokens",
    "additional_special_tokens",
)
_FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")
_SHOWN = 4  # the most tokens that a warning lists


@dataclasses.dataclass(frozen=True)
class SpecialTokens:
    """The tokens that the files name. A token is text or a `tokenizers.AddedToken`.

    Attributes:
      named: name, such as "bos_token" -> token. The seven names that every model may have come
        first, then those of this model, such as "image_token".
      extra: special tokens without a name.
      added: id -> token, as the files give them.
    """

    named: Mapping[str, Any]
    extra: Sequence[Any]
    added: Mapping[int, Any]

    def text(self, name: str) -> str | None:
        """Return the text of a named token, or None."""
        token = self.named.get(name)
        return None if token is None else text_of(token)


def text_of(token: Any) -> str:
    """Return the text of a token."""
    return token if isinstance(token, str) else token.content


def read_special_tokens(
    folder: pathlib.Path,
    config: Mapping[str, Any],
    text: str,
    defaults: Mapping[str, str | None],
) -> SpecialTokens:
    """Return the added and special tokens that the files of a checkpoint name.

    Args:
      folder: the checkpoint's folder.
      config: ``tokenizer_config.json``, or an empty mapping.
      text: the text of ``tokenizer.json``, which `tokenizers` could read.
      defaults: name -> text of the special tokens, where no file names one.

    Raises:
      CheckpointError: an entry has a wrong type. The message names file and key.
    """
    values = {key: value for key, value in config.items() if key != _DECODER}
    values = {key: _Given(value, TOKENIZER_CONFIG, key) for key, value in values.items()}
    if _ADDITIONAL in values and not _value(values, _EXTRA):
        values[_EXTRA] = values.pop(_ADDITIONAL)
    own = _pop_own_names(values)
    if config.get(_DECODER) is not None:
        added = _decoder(config[_DECODER])
        known = added.values()
        _say_unread(folder, values, {text_of(token): index for index, token in added.items()})
    else:
        own |= _merge_map(folder, values)
        beside, within = _added_tokens(folder, values), _stored(text)
        added, known = beside | within, [*beside.values(), *within.values()]
    by_text = {text_of(token): token for token in known}
    named = {name: by_text.get(text_of(token), token) for name, token in _named(values).items()}
    default = {name: text for name, text in defaults.items() if name not in values}
    ordered = {name: default.get(name, named.get(name)) for name in NAMES}
    ordered |= {**_own_names(values), **{name: entry.token() for name, entry in own.items()}}
    return SpecialTokens(
        {name: token for name, token in ordered.items() if token is not None},
        _extra(values),
        added,
    )


def add_tokens(
    encoder: "tokenizers.Tokenizer", tokens: SpecialTokens, stored: Mapping[int, Any], marked: bool
) -> None:
    """Add the tokens to a tokenizer, as transformers does.

    A token that the tokenizer has keeps its id and takes the new flags. Any other token gets the
    first free id, whatever id the files give it.

    Args:
      encoder: a `tokenizers.Tokenizer`, which is changed.
      tokens: the tokens.
      stored: id -> token, the added tokens of ``tokenizer.json``, for warnings.
      marked: whether all special tokens are added once more, as special ones with no other flags.
    """
    import tokenizers

    adding = [tokens.added[index] for index in sorted(tokens.added)]
    there = encoder.get_added_tokens_decoder().values()
    known = {text_of(token) for token in [*there, *adding]}
    for token in [*tokens.named.values(), *tokens.extra]:
        if text_of(token) not in known and token not in adding:
            adding.append(token)
    names = {text_of(token) for token in tokens.named.values()}
    adding = [_as_added(token, names) for token in adding]
    encoder.add_tokens(adding)
    if marked:
        texts = dict.fromkeys(map(text_of, [*tokens.named.values(), *tokens.extra]))
        encoder.add_tokens([tokenizers.AddedToken(text, special=True) for text in texts])
    _say_changes(stored, encoder, tokens.added)


def say_ends(
    encoder: "tokenizers.Tokenizer", config: Mapping[str, Any], tokens: SpecialTokens
) -> None:
    """Warn where ``add_bos_token`` or ``add_eos_token`` differ from what ``tokenizer.json`` does.

    What is stored decides: transformers reads neither where there is a ``tokenizer.json``.
    """
    import tokenizers

    put = encoder.post_process(tokenizers.Encoding()).ids
    ends = {"bos_token": put[:1], "eos_token": put[-1:]}
    if tokens.text("bos_token") == tokens.text("eos_token") and len(put) == 1:
        return  # it may stand at either end
    for name, outermost in ends.items():
        asked, text = config.get(f"add_{name}"), tokens.text(name)
        there = text is not None and encoder.token_to_id(text) in outermost
        if isinstance(asked, bool) and text is not None and asked != there:
            log.warning(
                "%s: add_%s is %s, and the post_processor of %s %s %s; %s is followed",
                TOKENIZER_CONFIG,
                name,
                str(asked).lower(),
                TOKENIZER,
                "adds" if there else "does not add",
                quoted(text),
                TOKENIZER,
            )


@dataclasses.dataclass(frozen=True)
class _Given:
    """An entry of a file, with its place for messages."""

    value: Any
    file: str
    key: str

    def refuse(self, expected):
        return CheckpointError(
            [f"{self.file}: {self.key}: expected {expected}, got {quoted(self.value)}"]
        )

    def token(self, special=None):
        """Return the entry as text or as a `tokenizers.AddedToken`."""
        import tokenizers

        if isinstance(self.value, str):
            return self.value
        if not isinstance(self.value, dict) or not isinstance(self.value.get("content"), str):
            raise self.refuse("text, or an object with the text as content")
        flags = {name: self.value[name] for name in _FLAGS if self.value.get(name) is not None}
        if not all(isinstance(flag, bool) for flag in flags.values()):
            raise self.refuse(f"true or false as {', '.join(_FLAGS)}")
        if special is not None:
            flags["special"] = special
        return tokenizers.AddedToken(self.value["content"], **flags)

    def each(self):
        """Yield the entries of a list, or of an object, by their keys."""
        if not isinstance(self.value, (list, dict)):
            raise self.refuse("a list of tokens, or an object of named tokens")
        pairs = enumerate(self.value) if isinstance(self.value, list) else self.value.items()
        for key, value in pairs:
            yield key, _Given(value, self.file, f"{self.key}[{key!r}]")


def _value(values, key):
    return values[key].value if key in values else None


def _decoder(given) -> dict[int, Any]:
    """Return ``added_tokens_decoder`` with ids as numbers."""
    entry = _Given(given, TOKENIZER_CONFIG, _DECODER)
    if not isinstance(given, dict):
        raise entry.refuse("an object of token ids")
    return {_index(key, one): _added(one) for key, one in entry.each()}


def _stored(text) -> dict[int, Any]:
    """Return the added tokens of ``tokenizer.json`` with the ids that the file gives them."""
    listed = json.loads(text).get("added_tokens") or []
    entries = _Given(listed, TOKENIZER, "added_tokens").each()
    return {entry.value["id"]: entry.token() for _, entry in entries}


def _added(entry):
    if not isinstance(entry.value, dict):
        raise entry.refuse("an object with the text as content")
    return entry.token()


def _index(key, entry):
    """Return a token id, which a JSON object holds as text."""
    text = str(key)
    if not text.isdecimal() or len(text) > 10 or int(text) >= 2**31:
        raise entry.refuse("a token id as the key")
    return int(text)


def _merge_map(folder, values) -> dict[str, Any]:
    """Replace entries of `values` by those of ``special_tokens_map.json``.

    Returns:
      its ``extra_special_tokens`` by their names, if they have names.
    """
    if not exists(folder, SPECIAL_TOKENS_MAP):
        return {}
    for key, value in read_json(folder, SPECIAL_TOKENS_MAP).items():
        entry = _Given(value, SPECIAL_TOKENS_MAP, key)
        if key == _EXTRA and isinstance(value, list):
            old = _value(values, _EXTRA) or []
            kept = old if isinstance(old, list) else []
            value = [*kept, *(token for token in value if token not in kept)]
            entry = _Given(value, SPECIAL_TOKENS_MAP, key)
        elif isinstance(value, dict) and key != _EXTRA:
            entry = _Given({**value, "special": True}, SPECIAL_TOKENS_MAP, key)
        if key in values and _plain(values[key]) != _plain(entry) and key != _EXTRA:
            _say_other(values[key], entry)
        values[key] = entry
    return _pop_extra_names(values)


def _plain(entry):
    """Return the text of a token, or any other value as it is."""
    value = entry.value
    return value.get("content") if isinstance(value, dict) and "content" in value else value


def _say_other(before, after):
    log.warning(
        "%s: %s is %s, and %s has %s; the latter is taken",
        before.file,
        before.key,
        quoted(_plain(before)),
        after.file,
        quoted(_plain(after)),
    )


def _say_unread(folder, values, ids) -> None:
    """Warn where files that are not read differ from ``added_tokens_decoder``."""
    if exists(folder, SPECIAL_TOKENS_MAP):
        for key, value in read_json(folder, SPECIAL_TOKENS_MAP).items():
            entry, own = _Given(value, SPECIAL_TOKENS_MAP, key), values.get(key)
            if key in NAMES and (own is None or _plain(own) != _plain(entry)):
                log.warning(
                    "%s: %s is %s, and %s has %s; %s is not read beside %s",
                    TOKENIZER_CONFIG,
                    key,
                    quoted(None if own is None else _plain(own)),
                    SPECIAL_TOKENS_MAP,
                    quoted(_plain(entry)),
                    SPECIAL_TOKENS_MAP,
                    _DECODER,
                )
    if exists(folder, ADDED_TOKENS):
        other = [text for text, i in read_json(folder, ADDED_TOKENS).items() if ids.get(text) != i]
        if other:
            log.warning(
                "%s: %s: %s of %s has no such token with that id, and is taken",
                ADDED_TOKENS,
                _listed(map(quoted, other)),
                _DECODER,
                TOKENIZER_CONFIG,
            )


def _added_tokens(folder, values) -> dict[int, Any]:
    """Return the tokens of ``added_tokens.json``."""
    import tokenizers

    if not exists(folder, ADDED_TOKENS):
        return {}
    texts = [values[name] for name in NAMES if _value(values, name)]
    texts = [one for one in texts if one.file == SPECIAL_TOKENS_MAP or _is_text(one)]
    special = {text_of(one.token()) for one in texts}
    # transformers compares texts before it reads tokens in the older form, with a "__type"
    entries = [one for _, one in values[_EXTRA].each()] if _value(values, _EXTRA) else []
    older = [isinstance(one.value, dict) and "__type" in one.value for one in entries]
    special |= {text_of(one.token()) for one, skip in zip(entries, older, strict=True) if not skip}
    found = {}
    for text, index in read_json(folder, ADDED_TOKENS).items():
        if type(index) is not int or not 0 <= index < 2**31:
            raise _Given(index, ADDED_TOKENS, quoted(text)).refuse("a token id")
        flags = {"special": text in special, "normalized": text not in special}
        found[index] = tokenizers.AddedToken(text, **flags)
    return found


def _named(values) -> dict[str, Any]:
    """Return the named tokens that every model may have."""
    return {name: values[name].token() for name in NAMES if _value(values, name) is not None}


def _pop_own_names(values) -> dict[str, Any]:
    """Take the named tokens of this model, such as "image_token", out of `values`."""
    names = [key for key, entry in values.items() if _is_own(key) and _is_text(entry)]
    return {key: values.pop(key) for key in names} | _pop_extra_names(values)


def _pop_extra_names(values) -> dict[str, Any]:
    """Take ``extra_special_tokens`` out of `values` if they have names."""
    if not isinstance(_value(values, _EXTRA), dict):
        return {}
    return {str(key): entry for key, entry in values.pop(_EXTRA).each()}


def _own_names(values) -> dict[str, Any]:
    """Return the named tokens of this model that are objects, or in the map of special tokens."""
    return {
        key: entry.token()
        for key, entry in values.items()
        if _is_own(key) and (_is_text(entry) or _plain(entry) is not entry.value)
    }


def _is_own(key):
    return key.endswith("_token") and key not in NAMES


def _is_text(entry):
    return isinstance(entry.value, str)


def _extra(values) -> list[Any]:
    """Return the special tokens without a name."""
    given = values.get(_EXTRA, values.get(_ADDITIONAL))
    if given is None or given.value is None:
        return []
    return [entry.token(_plain_special(entry)) for _, entry in given.each()]


def _plain_special(entry):
    """Return True for an object without a "__type", which transformers refuses, else None."""
    return True if isinstance(entry.value, dict) and "__type" not in entry.value else None


def _as_added(token, names):
    """Return the token to add. A token that has a name is special, whatever the file says."""
    import tokenizers

    if isinstance(token, str):
        return tokenizers.AddedToken(token, special=True)
    if token.special or token.content not in names:
        return token
    flags = {name: getattr(token, name) for name in _FLAGS[:-1]}
    return tokenizers.AddedToken(token.content, **flags, special=True)


def _say_changes(stored, encoder, added) -> None:
    """Warn of tokens that got another id or other flags than a file gives them."""
    moved = [
        f"{quoted(token.content)} ({index}, not {given})"
        for given, token in sorted(added.items())
        if (index := encoder.token_to_id(token.content)) != given
    ]
    if moved:
        log.warning(
            "the tokenizer's files give other ids than its vocabulary to %s; the vocabulary "
            "decides, and a token that it does not have gets the first free id after it",
            _listed(moved),
        )
    after = encoder.get_added_tokens_decoder()
    other = [token.content for i, token in stored.items() if repr(after.get(i)) != repr(token)]
    if other:
        log.warning(
            "%s: the flags of %s differ from those in %s; the latter are taken",
            TOKENIZER,
            _listed(map(quoted, other)),
            TOKENIZER_CONFIG,
        )


def _listed(words: Iterable[str]) -> str:
    """Return the first words of a list, and how many there are more."""
    words = list(words)
    more = len(words) - _SHOWN
    return ", ".join(words[:_SHOWN]) + (f" and {more} more" if more > 0 else "")
