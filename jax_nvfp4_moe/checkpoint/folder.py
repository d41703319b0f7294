"""Find the files of a checkpoint folder without leaving it, and read its JSON files.

A checkpoint is untrusted, and names inside it decide which files are opened. Each name is therefore
resolved first and must lie in the folder. Nothing from the folder is executed.
"""

import functools
import json
import os
import pathlib
import stat
from collections.abc import Iterator, Mapping
from typing import Any

from jax_nvfp4_moe.checkpoint.errors import CheckpointError, quoted
from jax_nvfp4_moe.checkpoint.hub import fetch, parse_hub_name
from jax_nvfp4_moe.checkpoint.mistral_format import PARAMS, is_mistral_format, to_config

JSON_BYTES = 100_000_000  # the limit that the safetensors format sets for its header
# Python takes 64 bytes and more for an empty object of three bytes. A header of 300,000 tensors has
# about 3 million marks.
JSON_MARKS = 5_000_000
CONFIG = "config.json"
TEXT_CONFIGS = ("thinker_config", "text_config", "llm_config")


def expand_home(path: str | pathlib.Path) -> pathlib.Path:
    """Return the path that a user named, with a leading ``~`` or ``~name`` expanded.

    Raises:
      TypeError: it is no path.
      ValueError: the system has no user of that name.
    """
    if not isinstance(path, str | os.PathLike):
        raise TypeError(f"path: expected a str or a pathlib.Path, got {type(path).__name__}")
    try:
        return pathlib.Path(path).expanduser()
    except RuntimeError as error:
        raise ValueError(f"{str(path)!r}: {error}") from None


def find_folder(path: str | pathlib.Path) -> pathlib.Path:
    """Return the folder of the checkpoint that a user named.

    Args:
      path: a folder, in which a leading ``~`` is expanded, or the name of a model on the Hugging
        Face Hub. A Hub name may end in "@" and a revision: "nvidia/Qwen3-30B-A3B-FP4@main". If a
        folder of that name exists, the folder is taken.

    Raises:
      CheckpointError: there is neither a folder nor a model of that name. The message says how to
        get the files.
    """
    try:
        folder = expand_home(path)
    except ValueError as error:
        raise CheckpointError([str(error)]) from None
    if folder.is_dir():
        return folder
    missing = f"{str(folder)!r} is not a folder that exists"
    if folder.is_file():
        problem = f"{str(folder)!r} is a file; pass the folder of the checkpoint that contains it"
    elif (name := parse_hub_name(str(path))) is not None:
        return fetch(name)
    else:
        problem = f"{missing}; pass the folder of a checkpoint, with {CONFIG} and safetensors files"
    raise CheckpointError([problem])


def locate(folder: pathlib.Path, name: str) -> pathlib.Path:
    """Return the path of the regular file `name` in `folder`, with links resolved.

    A symbolic link may point to a file inside the folder. In the cache of `huggingface_hub`, every
    file of ``snapshots/REVISION`` is a link to ``blobs`` of the same repository, which is allowed
    too.

    Raises:
      CheckpointError: `name` lies outside the folder, does not exist, or is not a regular file.
    """
    try:
        path = (folder / name).resolve()
        if not any(path.is_relative_to(root) for root in _roots(folder)):
            raise CheckpointError(f"{quoted(name)} lies outside the checkpoint's folder")
        mode = path.stat().st_mode
    except FileNotFoundError:
        raise CheckpointError(f"{quoted(name)} is missing") from None
    except (OSError, RuntimeError) as error:  # before Python 3.13, a loop of links: RuntimeError
        raise CheckpointError(f"{quoted(name)} cannot be reached: {error}") from None
    except CheckpointError:
        raise
    except ValueError as error:  # the name contains a null byte
        raise CheckpointError(f"{quoted(name)} is not a file name: {error}") from None
    if not stat.S_ISREG(mode):
        raise CheckpointError(f"{quoted(name)} is not a regular file")
    return path


def exists(folder: pathlib.Path, name: str) -> bool:
    """Return whether `folder` has an entry called `name`, which may be a broken link."""
    path = folder / name
    return path.exists() or path.is_symlink()


def read_json(folder: pathlib.Path, name: str) -> dict[str, Any]:
    """Read the JSON object in the file `name` of `folder`.

    Raises:
      CheckpointError: the file is missing, lies outside the folder, is larger than 100 MB, or is
        not one JSON object with distinct keys.
    """
    path = locate(folder, name)
    size = path.stat().st_size
    if size > JSON_BYTES:
        raise CheckpointError(
            f"{quoted(name)} has {size} bytes; expected at most {JSON_BYTES} in a JSON file"
        )
    try:
        return parse_object(path.read_bytes())
    except ValueError as error:
        raise CheckpointError(f"{quoted(name)}: {error}") from None


def parse_object(raw: bytes) -> dict[str, Any]:
    """Parse bytes that must be one JSON object with distinct keys at every level.

    Raises:
      ValueError: they are not. The message says why, and names repeated keys.
    """
    marks = sum(map(raw.count, (b"{", b"[", b",")))
    if marks > JSON_MARKS:
        raise ValueError(f"{marks} braces, brackets and commas; expected at most {JSON_MARKS}")
    repeated: dict[str, None] = {}
    try:
        parsed = json.loads(
            raw.decode("utf-8"), object_pairs_hook=functools.partial(_distinct, repeated)
        )
    except RecursionError:
        raise ValueError("not JSON: nested too deeply") from None
    except ValueError as error:  # UnicodeDecodeError, JSONDecodeError, an integer that is too long
        raise ValueError(f"not JSON: {error}") from None
    if repeated:
        raise ValueError(f"repeated keys: {', '.join(map(quoted, repeated))}")
    if not isinstance(parsed, dict):
        raise ValueError(f"expected a JSON object, got {type(parsed).__name__}")
    return parsed


def _distinct(repeated, pairs):
    """Return the object of `pairs`, and add keys that occur more than once to `repeated`."""
    parsed: dict[str, Any] = dict(pairs)
    if len(parsed) < len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                repeated[key] = None
            seen.add(key)
    return parsed


def read_config(folder: str | pathlib.Path) -> dict[str, Any]:
    """Read ``config.json`` of a checkpoint folder.

    In Mistral's own format, ``params.json`` says the same; see `mistral_format.to_config`.

    Args:
      folder: a folder or a Hub name, as for `find_folder`.

    Raises:
      CheckpointError: the folder does not exist, or ``config.json`` is missing or not a JSON
        object.
    """
    folder = find_folder(folder)
    try:
        if is_mistral_format(folder):
            return to_config(read_json(folder, PARAMS))
        return read_json(folder, CONFIG)
    except CheckpointError as error:
        raise CheckpointError(error.problems, str(folder)) from None


def merge_text_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the config of the language model.

    The config of a multimodal model holds the language model's config under ``text_config``, or
    under ``llm_config``. That of Qwen3-Omni holds the config of such a model under
    ``thinker_config``. Values of an inner config replace those of the outer one, with two
    exceptions:

    * ``architectures`` lists the names of both.
    * ``tie_word_embeddings`` is taken from the outer config if it is set there.

    The config of another model is returned unchanged.
    """
    merged = dict(config)
    for _, inner in nested_configs(config):
        outer, merged = merged, {**merged, **inner}
        listed = [part.get("architectures") for part in (outer, inner)]
        names = [name for part in listed if isinstance(part, list) for name in part]
        merged["architectures"] = names or outer.get("architectures")
        if outer.get("tie_word_embeddings") is not None:
            merged["tie_word_embeddings"] = outer["tie_word_embeddings"]
    return merged


def nested_configs(config: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield each config of the language model inside a config, the outermost first.

    Args:
      config: a parsed ``config.json`` or ``generation_config.json``.

    Yields:
      The keys that lead to it, with dots between them, and the config.
    """
    path: tuple[str, ...] = ()
    while keys := [key for key in TEXT_CONFIGS if isinstance(config.get(key), dict)]:
        path, config = (*path, keys[0]), config[keys[0]]
        yield ".".join(path), config


def read_num_layers(config: Mapping[str, Any]) -> int | None:
    """Return the number of layers that a parsed ``config.json`` declares, or None."""
    value = merge_text_config(config).get("num_hidden_layers")
    return value if type(value) is int and value > 0 else None


def read_size(config: Mapping[str, Any], *names: str, default: int | None = None) -> int:
    """Return the positive integer that `config` holds under the first of `names` that is present.

    Args:
      config: a parsed ``config.json``, or a part of one.
      names: the spellings of one size, such as "num_experts" and "num_local_experts".
      default: the result if every name is missing or null. None makes that an error.

    Raises:
      CheckpointError: the value is not a positive integer, or it is missing and has no default.
    """
    for name in names:
        value = config.get(name)
        if value is None:
            continue
        if type(value) is not int or not 0 < value < 2**31:
            raise CheckpointError(
                f"{CONFIG}: {name}: expected a positive integer, got {quoted(value)}"
            )
        return value
    if default is None:
        raise CheckpointError(
            f"{CONFIG}: {' or '.join(names)}: missing; expected a positive integer"
        )
    return default


def _roots(folder):
    """Return the folders that may hold the checkpoint's files."""
    folder = folder.resolve()
    roots = [folder]
    if folder.parent.name == "snapshots":
        roots.append(folder.parent.parent / "blobs")
    return roots
