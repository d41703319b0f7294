"""Find the tokens that end a text, in all files of a checkpoint that name them."""

import pathlib
from collections.abc import Iterable, Iterator

from jax_nvfp4_moe.checkpoint.errors import CheckpointError, quoted
from jax_nvfp4_moe.checkpoint.folder import CONFIG, TEXT_CONFIGS, exists, read_json

GENERATION_CONFIG = "generation_config.json"
_KEY = "eos_token_id"


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
        config = read_json(folder, name) if exists(folder, name) else {}
        yield _ids(config.get(_KEY), f"{name}: {_KEY}")
        for part in TEXT_CONFIGS:
            inner = config.get(part)
            if isinstance(inner, dict):
                yield _ids(inner.get(_KEY), f"{name}: {part}.{_KEY}")


def _ids(value, place) -> list[int] | str:
    """Return the ids that a file gives, or a sentence that says what is wrong with them."""
    ids = value if isinstance(value, list) else [value]
    ids = [index for index in ids if index is not None]
    if all(type(index) is int and -1 <= index < 2**31 for index in ids):
        return [index for index in ids if index >= 0]
    return f"{place}: expected a token id or a list of ids, got {quoted(value)}"
