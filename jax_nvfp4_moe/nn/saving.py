"""Save modules with their weights as they are, in a kernel's layout, and restore them: with Orbax.

A folder holds ``arrays``, written by Orbax's `StandardCheckpointer`, and ``layouts.json``, the
record. It says in which layout, and which version of it, each NVFP4 weight stands, and how a mesh
divides each variable. The record has another name until all arrays are written. If a module expects
another layout or lies on another mesh, its weights become canonical weights in the order of one
device while they are restored, and then those of the module.
"""

import json
import os
import pathlib
import shutil
from collections.abc import Callable
from typing import Any, TypeVar

import jax
import numpy as np
from flax import nnx
from jax.experimental import multihost_utils

from jax_nvfp4_moe.checkpoint.errors import CheckpointError
from jax_nvfp4_moe.checkpoint.folder import expand_home, read_json
from jax_nvfp4_moe.checkpoint.writing import PARTIAL, write_file
from jax_nvfp4_moe.nn.resharding import (
    convert,
    find_entries,
    find_stored,
    leaves,
    tensors,
    tree_shards,
)
from jax_nvfp4_moe.numerics.layouts import find_layout
from jax_nvfp4_moe.parallel.expert_mesh import TENSOR
from jax_nvfp4_moe.parallel.processes import is_first

ARRAYS = "arrays"
LAYOUTS = "layouts.json"
_UNFINISHED = LAYOUTS + PARTIAL
_VERSION = 3
_TEXT_BYTES = 1000  # of an error, between processes

Saved = TypeVar("Saved")


def save(folder: str | pathlib.Path, module: Any) -> None:
    """Save all variables of `module`, or all arrays of a tree.

    Over several processes all of them call it. Process 0 decides whether the folder is free, and
    writes the record; all return when the folder is complete.

    Args:
      folder: new or empty, or what a save left that did not come to its end, which is replaced.
      module: of this package, or any `nnx.Module` with modules of it inside; or `MoEParams`, an
        `NVFP4Tensor`, any tree of them. Arrays may be sharded. Only a module knows how a mesh
        divides its weights: a tree comes back on the same number of shards alone.

    Raises:
      ValueError: `folder` is not empty; in all processes.
      OSError: the record cannot be written; process 0 names the file and its device.
      ImportError: orbax-checkpoint is not installed.
    """
    import orbax.checkpoint  # on demand: heavy, and needed nowhere else

    folder = expand_home(folder).resolve()
    entries = find_entries(module)
    record = json.dumps(_description(entries) | {"tree_shards": tree_shards(entries)}, indent=1)
    _in_first_process(lambda: _begin(folder, record))
    arrays = {name: leaf for entry in entries for name, leaf in leaves(entry)}
    with orbax.checkpoint.StandardCheckpointer() as checkpointer:
        checkpointer.save(folder / ARRAYS, arrays)
    _in_first_process(lambda: os.replace(folder / _UNFINISHED, folder / LAYOUTS))


def restore(folder: str | pathlib.Path, like: Saved) -> Saved:
    """Restore what `save` wrote.

    Weights that were saved in another layout than `like` expects, such as that of another GPU's
    kernel, or on another mesh than that of `like`, are converted one variable at a time. No
    checkpoint is read again. ::

      moe = nvfp4.restore(folder, nnx.eval_shape(lambda: NVFP4MoE(8, 64, 32, top_k=2, rngs=rngs)))

    Args:
      folder: where it is.
      like: a module or a tree of the same structure, or ``nnx.eval_shape(lambda: ...)`` of a
        module, which takes no memory. Its arrays, or `jax.ShapeDtypeStruct`, say by their sharding
        where the values go, however they were saved; to the default device where they have none.

    Returns:
      What `like` is, with the saved values in the layouts of `like`.

    Raises:
      CheckpointError: the folder is incomplete, or names, shapes, dtypes or versions of layouts
        differ; lists all.
      ImportError: orbax-checkpoint is not installed.
    """
    import orbax.checkpoint

    folder = expand_home(folder).resolve()
    record = read_json(folder, LAYOUTS)
    entries = find_entries(like)
    stored = _find_stored(entries, record, folder)
    _check(record, _description(stored), folder)
    saved, wanted = record.get("tree_shards"), tree_shards(entries)
    if saved != wanted:
        raise CheckpointError(
            [
                f"{LAYOUTS}: experts were saved on {saved} shards along '{TENSOR}', and like has "
                f"{wanted}. A tree comes back on as many shards alone; save a module, which knows "
                "how they are divided"
            ],
            str(folder),
        )
    abstract = {name: leaf for entry in stored for name, leaf in leaves(entry)}
    with orbax.checkpoint.StandardCheckpointer() as checkpointer:
        arrays = checkpointer.restore(folder / ARRAYS, abstract)
    values = []
    for entry, before in zip(entries, stored, strict=True):
        # Popped: what was read must not stay in memory beside what it is converted to.
        read = [arrays.pop(name) for name, _ in leaves(before)]
        value = jax.tree.unflatten(jax.tree.structure(before.value), read)
        values.append(convert(before._replace(value=value), entry))
    if not isinstance(like, nnx.Module):
        return values[0]
    graph, state = nnx.split(like)
    restored = [
        (path, variable.replace(value))
        for (path, variable), value in zip(nnx.to_flat_state(state), values, strict=True)
    ]
    return nnx.merge(graph, nnx.from_flat_state(restored))


def _begin(folder, record):
    """Write the record under the name that marks a folder as unfinished, for lack of the arrays."""
    names = [path.name for path in folder.iterdir()] if folder.exists() else []
    unfinished = any(name.startswith(_UNFINISHED) for name in names)
    own = all(name.startswith((_UNFINISHED, ARRAYS)) for name in names)
    if names and not (unfinished and own):
        raise ValueError(f"folder: expected an empty or a new one, got {folder}")
    if names:
        shutil.rmtree(folder)
    folder.mkdir(parents=True, exist_ok=True)
    write_file(folder / _UNFINISHED, [record.encode()])


def _in_first_process(action: Callable[[], None]) -> None:
    """Run `action` in process 0 while the others wait; if it fails there, fail everywhere.

    Raises:
      ValueError, OSError: that of `action`; in the other processes with the same text.
    """
    error: Exception | None = None
    if is_first():
        try:
            action()
        except (ValueError, OSError) as caught:
            error = caught
    if jax.process_count() > 1:
        text = np.zeros(_TEXT_BYTES, np.uint8)
        said = f"{error or ''}".encode()[:_TEXT_BYTES]
        text[: len(said)] = np.frombuffer(said, np.uint8)
        text = np.asarray(multihost_utils.broadcast_one_to_all(text))
        if text.any() and not is_first():
            error = ValueError(text.tobytes().rstrip(b"\0").decode(errors="replace"))
    if error is not None:
        raise error


def _find_stored(entries, record, folder):
    """Return `entries` as they were saved.

    Raises:
      CheckpointError: the shards of the record do not divide the variables; lists all.
    """
    stored, problems = [], []
    for entry in entries:
        try:
            stored.append(find_stored(entry, record))
        except (TypeError, ValueError) as error:
            problems.append(f"{LAYOUTS}: shards of {entry.name}: {error}")
    if problems:
        raise CheckpointError(problems, str(folder))
    return stored


def _description(entries) -> dict[str, Any]:
    """Return what must agree between what is saved and what is restored; plain JSON."""
    arrays = {
        name: [leaf.dtype.name, *leaf.shape] for entry in entries for name, leaf in leaves(entry)
    }
    layouts = {
        name: [
            tensor.layout,
            find_layout(tensor.layout).version,
            tensor.rows,
            tensor.columns,
        ]
        for name, tensor in tensors(entries)
    }
    shards = {entry.name: list(entry.shards) for entry in entries if entry.shards is not None}
    return {"version": _VERSION, "layouts": layouts, "shards": shards, "arrays": arrays}


def _check(saved, expected, folder):
    problems = []
    if saved.get("version") != _VERSION:
        problems.append(f"{LAYOUTS}: expected version {_VERSION}, got {saved.get('version')!r}")
    for kind, what in (
        ("layouts", "layout, version, rows and columns"),
        ("arrays", "dtype and shape"),
    ):
        here, there = expected[kind], saved.get(kind)
        there = there if isinstance(there, dict) else {}
        for name in sorted({*here, *there}):
            if here.get(name) != there.get(name):
                problems.append(
                    f"{name}: {what}: expected {here.get(name)}, saved {there.get(name)}"
                )
    if problems:
        raise CheckpointError(problems, str(folder))
