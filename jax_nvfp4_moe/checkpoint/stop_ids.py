"""Find the tokens that end a text, in all files of a checkpoint that name them."""

import pathlib
from collections.abc import Iterable, Iterator
from typing import Any

from jax_nvfp4_moe.checkpoint.errors import CheckpointError, quoted
from jax_nvfp4_moe.checkpoint.folder import CONFIG, exists, nested_configs, read_json
from jax_nvfp4_moe.checkpoint.tekken import END, read_tekken, uses_tekken

GENERATION_CONFIG = "generation_config.json"
_KEY = "eos_token_id"
# Files that name the tokenizer's end of text. Without "added_tokens_decoder" in the first one, the
# second one comes before it.
_TOKENIZER, _TOKENIZER_CONFIG, _MAP = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
)


def read_stop_ids(folder: pathlib.Path, more: Iterable[int] = ()) -> tuple[int, ...]:
    """Return the tokens that end a text: every id that a file of the checkpoint names.

    They come in this order, without repetitions: ``eos_token_id`` of ``generation_config.json``, of
    ``config.json`` and of the text model's config inside it, then `more`. In these files, null
    and -1 mean no token.

    Args:
      folder: the checkpoint's folder. Neither file needs to exist.
      more: further ids, such as that of the tokenizer's ``eos_token``.

    Raises:
      CheckpointError: an ``eos_token_id`` is neither an id nor a list of ids.
    """
    found = [*_stored(folder)]
    problems = [problem for problem in found if isinstance(problem, str)]
    if problems:
        raise CheckpointError(problems)
    ids = [index for some in found if not isinstance(some, str) for index in some]
    return tuple(dict.fromkeys([*ids, *more]))


def _stored(folder) -> Iterator[list[int] | str]:
    """Yield the ids of each place, or a sentence that says what is wrong."""
    for name in (GENERATION_CONFIG, CONFIG):
        config = _read(folder, name)
        yield _ids(config.get(_KEY), f"{name}: {_KEY}")
        for part, inner in nested_configs(config):
            yield _ids(inner.get(_KEY), f"{name}: {part}.{_KEY}")


def _ids(value, place) -> list[int] | str:
    """Return the ids that a file gives, or a sentence that says what is wrong with them."""
    ids = value if isinstance(value, list) else [value]
    ids = [index for index in ids if index is not None]
    if all(type(index) is int and -1 <= index < 2**31 for index in ids):
        return [index for index in ids if index >= 0]
    return f"{place}: expected a token id or a list of ids, got {quoted(value)}"


def read_end_of_text(folder: pathlib.Path) -> tuple[int, ...]:
    """Return the id of the tokenizer's ``eos_token``, without loading the tokenizer.

    Its text stands in ``tokenizer_config.json`` or ``special_tokens_map.json``, and its id in
    ``tokenizer.json``. A folder with ``tekken.json`` alone has both there. The result is empty
    where they name none, or cannot be read: a model does not need its tokenizer, and
    `load_tokenizer` says what is wrong with these files.

    Args:
      folder: the checkpoint's folder.
    """
    try:
        if uses_tekken(folder):
            special = read_tekken(folder).special
            return (special.index(END),) if END in special else ()
        config, named = (_read(folder, name) for name in (_TOKENIZER_CONFIG, _MAP))
        if config.get("added_tokens_decoder") is None:
            config = config | named
        end = config.get("eos_token")
        text = end.get("content") if isinstance(end, dict) else end
        found = _find_token(_read(folder, _TOKENIZER), text) if isinstance(text, str) else None
    except CheckpointError:
        return ()
    return (found,) if type(found) is int and 0 <= found < 2**31 else ()


def _read(folder, name) -> dict[str, Any]:
    return read_json(folder, name) if exists(folder, name) else {}


def _find_token(tokenizer, text) -> Any:
    """Return the id that a parsed ``tokenizer.json`` gives to the text of a token, or None."""
    added, model = tokenizer.get("added_tokens"), tokenizer.get("model")
    for token in added if isinstance(added, list) else []:
        if isinstance(token, dict) and token.get("content") == text:
            return token.get("id")
    vocabulary = model.get("vocab") if isinstance(model, dict) else None
    if isinstance(vocabulary, list):  # Unigram stores pairs of a text and its score
        texts = [pair[0] for pair in vocabulary if isinstance(pair, list) and pair]
        return texts.index(text) if text in texts else None
    return vocabulary.get(text) if isinstance(vocabulary, dict) else None
