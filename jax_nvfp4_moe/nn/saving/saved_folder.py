"""Save modules in the layout of their kernels, and restore them on any device, with Orbax.

A saved folder holds two things:

* ``arrays``, written by Orbax's `StandardCheckpointer`;
* ``layouts.json``, the record. It stores the layout of each NVFP4 weight with the version of that
  layout, and how a mesh shards each variable.

The record has a temporary name until all arrays are written, so an interrupted save is never
mistaken for a complete one. A save that replaces an earlier one writes its arrays to
``arrays.next``, or back to ``arrays`` if the earlier save has that folder. The record names the
folder, so one renaming of the record replaces the earlier save, which is deleted afterwards. A
module that expects another layout, or that lies on another mesh, can still be restored. `restore`
then converts its weights to canonical weights of one device, and from there to the layout and mesh
of the module.
"""

import contextlib
import dataclasses
import json
import os
import pathlib
import shutil
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import jax
import numpy as np
from flax import nnx
from jax.experimental import multihost_utils

from jax_nvfp4_moe.checkpoint.errors import CheckpointError, printable
from jax_nvfp4_moe.checkpoint.folder import expand_home, read_json
from jax_nvfp4_moe.checkpoint.writing.files import LOCK, PARTIAL, claimed_folder, write_file
from jax_nvfp4_moe.nn.saving import (
    flax_serialization as flax_serialization,  # registers with Flax
)
from jax_nvfp4_moe.nn.saving.resharding import (
    convert,
    find_entries,
    find_stored,
    leaves,
    tensors,
    tree_shards,
)
from jax_nvfp4_moe.nn.variables import DerivedParam
from jax_nvfp4_moe.numerics.arguments import describe, is_array
from jax_nvfp4_moe.numerics.layouts import find_layout
from jax_nvfp4_moe.parallel.expert_mesh import TENSOR
from jax_nvfp4_moe.parallel.processes import is_first

ARRAYS = "arrays"
_ARRAYS_NEXT = "arrays.next"  # where the arrays are, if the record says so
LAYOUTS = "layouts.json"
_UNFINISHED = LAYOUTS + PARTIAL
_VERSION = 4
_FOLDER = "folder"  # key of the record: the name of the folder with the arrays
_TEXT_BYTES = 1000  # longest error text that process 0 sends to the others

Saved = TypeVar("Saved")


def save(folder: str | pathlib.Path, module: Any, *, overwrite: bool = False) -> None:
    """Save all variables of a module, or all arrays of a tree.

    The arrays are written in their present layout and are not converted. A copy of the head for
    drafts is left out, and `restore` makes it again. If a program runs in
    several processes, all of them must call `save`. Process 0 checks the folder and writes the
    record. Every process returns when the folder is complete.

    Args:
      folder: a new or empty folder. What an interrupted save has left in it is deleted. A leading
        ``~`` is expanded.
      module: an `nnx.Module`, of this package or one that contains such modules. Or `MoEParams`, an
        `NVFP4Tensor`, or any tree of arrays. Arrays may be sharded. A tree does not record how a
        mesh shards it, so it can only be restored on the same number of shards.
      overwrite: whether to replace an earlier save in `folder`. The earlier save stays complete
        until the new one is. A folder with files that `save` has not written is refused either
        way. Defaults to False, which refuses a folder with an earlier save.

    Raises:
      TypeError: `folder` is no path, or a leaf of a tree is no array.
      ValueError: `folder` is a file, contains other files, or another program is writing to it. All
        processes raise it. Orbax raises it too if the disk is full.
      OSError: the record cannot be written. The message of process 0 names the file and its device.
      ImportError: orbax-checkpoint is not installed.

    After an error of process 0, `folder` is as it was before: empty, missing, or with the earlier
    save.

    Example:
      >>> import pathlib, tempfile
      >>> from flax import nnx
      >>> import jax_nvfp4_moe as nvfp4
      >>> moe = nvfp4.NVFP4MoE(8, 64, 32, top_k=2, rngs=nnx.Rngs(0))
      >>> with tempfile.TemporaryDirectory() as folder:
      ...     nvfp4.save(f"{folder}/moe", moe)
      ...     print(sorted(path.name for path in pathlib.Path(folder, "moe").iterdir()))
      ['arrays', 'layouts.json']

    Source: https://orbax.readthedocs.io, the page on `StandardCheckpointer`.
    """
    import orbax.checkpoint  # slow to import, and only saving and restoring need it

    folder = expand_home(folder).resolve()
    entries = find_entries(module)
    arrays = {name: leaf for entry in entries for name, leaf in leaves(entry)}
    for name, leaf in arrays.items():
        if not is_array(leaf):
            raise TypeError(
                f"module: expected an nnx.Module or a tree of arrays, but {name} is "
                f"{describe(leaf)}"
            )
    record = _description(entries) | {"tree_shards": tree_shards(entries)}
    with contextlib.ExitStack() as held:
        _in_first_process(lambda: held.enter_context(_unfinished(folder, record, overwrite)))
        with orbax.checkpoint.StandardCheckpointer() as checkpointer:
            checkpointer.save(folder / _find_free_name(folder), arrays)
        _in_first_process(lambda: _finish(folder))


def restore(folder: str | pathlib.Path, like: Saved) -> Saved:
    """Restore what `save` wrote.

    `restore` converts weights that were saved in another layout than `like` expects, such as the
    layout of another GPU's kernel. It also converts weights that were saved on another mesh. It
    converts one variable at a time, and does not need the original checkpoint.

    Args:
      folder: folder that `save` wrote. A leading ``~`` is expanded.
      like: a module or a tree of the same structure. To save memory, pass
        ``nnx.eval_shape(lambda: ...)`` of a module, which allocates no arrays. The shardings of its
        arrays, or `jax.ShapeDtypeStruct`, say where the values go. Leaves without a sharding go to
        the default device.

    Returns:
      A module or tree like `like`, with the saved values in the layouts of `like`.

    Raises:
      CheckpointError: the folder is incomplete, or names, shapes, dtypes or layout versions differ.
        The message lists all differences. Also if a tree was saved on another number of shards, or
        if only one of the two models rounds activations with calibrated scales: such a model joins
        fewer linear layers (see `MergedLinear`).
      ValueError: `like` is a part of a model that has a copy of weights outside of that part.
      ImportError: orbax-checkpoint is not installed.

    Example:
      >>> import tempfile
      >>> from flax import nnx
      >>> import jax_nvfp4_moe as nvfp4
      >>> def make():
      ...     return nvfp4.NVFP4MoE(8, 64, 32, top_k=2, rngs=nnx.Rngs(0))
      >>> with tempfile.TemporaryDirectory() as folder:
      ...     nvfp4.save(f"{folder}/moe", make())
      ...     moe = nvfp4.restore(f"{folder}/moe", nnx.eval_shape(make))
      >>> moe.token_router.weight[...].shape
      (8, 64)

    Source: https://orbax.readthedocs.io, the page on `StandardCheckpointer`.
    """
    import orbax.checkpoint

    folder = expand_home(folder).resolve()
    if not (folder / LAYOUTS).exists():
        what = "is not a folder that exists" if not folder.is_dir() else f"has no {LAYOUTS}"
        raise CheckpointError(
            [f"{printable(folder)} {what}; pass a folder that `nvfp4.save` has written completely"]
        )
    record = read_json(folder, LAYOUTS)
    _check_version(record, folder)
    entries = find_entries(like)
    stored = _find_stored(entries, record, folder)
    _check(record, _description(stored), folder)
    saved, wanted = record.get("tree_shards"), tree_shards(entries)
    if saved != wanted:
        raise CheckpointError(
            [
                f"{LAYOUTS}: experts were saved on {saved} shards along '{TENSOR}', but those of "
                f"`like` are on {wanted}. Restore a tree on {saved} shards, or save a module, "
                "which records how a mesh shards it"
            ],
            str(folder),
        )
    abstract = {name: leaf for entry in stored for name, leaf in leaves(entry)}
    with orbax.checkpoint.StandardCheckpointer() as checkpointer:
        arrays = checkpointer.restore(folder / _arrays_of(record), abstract)
    values = []
    for entry, before in zip(entries, stored, strict=True):
        # Pop the arrays, so that their memory is free once the variable is converted.
        read = [arrays.pop(name) for name, _ in leaves(before)]
        value = jax.tree.unflatten(jax.tree.structure(before.value), read)
        values.append(convert(before._replace(value=value), entry))
    if not isinstance(like, nnx.Module):
        return values[0]
    graph, derived, state = nnx.split(like, DerivedParam, ...)
    restored = [
        (path, variable.replace(value))
        for (path, variable), value in zip(nnx.to_flat_state(state), values, strict=True)
    ]
    made = nnx.merge(graph, derived, nnx.from_flat_state(restored))
    _derive(made)
    return made


def _derive(module):
    """Compute the weights of a module that follow from others.

    Raises:
      ValueError: those from which they follow are outside of the module.
    """
    for _, part in list(nnx.iter_modules(module)):  # they are changed
        derive = getattr(part, "derive_weights", None)
        if derive is not None:
            derive()
    left = [
        "/".join(map(str, path))
        for path, variable in nnx.to_flat_state(nnx.state(module, DerivedParam))
        if any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(variable))
    ]
    if left:
        raise ValueError(
            f"like: expected a module with the weights of which {', '.join(left)} is a copy, "
            f"because `save` stores no copies; got {type(module).__name__}. Save and restore the "
            "whole model"
        )


@contextlib.contextmanager
def _unfinished(folder, record, overwrite) -> Iterator[None]:
    """Hold the folder, marked as unfinished, while its arrays are written.

    The record has a temporary name meanwhile, which is the mark. What an interrupted save has left
    is deleted first. If the block raises an error, everything that it wrote is deleted.

    Raises:
      ValueError: the folder is a file, has other files, or another program is writing to it.
    """
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"folder: expected a folder, but {printable(folder)} is a file")
    with claimed_folder(folder):
        _check_free(folder, overwrite)
        _clear(folder)
        named = record | {_FOLDER: _find_free_name(folder)}
        try:
            write_file(folder / _UNFINISHED, [json.dumps(named, indent=1).encode()])
            yield
        except BaseException:
            _clear(folder)
            raise


def _check_free(folder, overwrite):
    """Raise ValueError if the folder has files that a save may not delete."""
    names = {path.name for path in folder.iterdir()} - {LOCK}
    unfinished = any(name.startswith(_UNFINISHED) for name in names)
    complete = LAYOUTS in names
    own = all(name == LAYOUTS or name.startswith((_UNFINISHED, ARRAYS)) for name in names)
    if complete and own and not overwrite:
        raise ValueError(
            f"folder: expected a new or an empty folder, but {printable(folder)} has an "
            "earlier save; choose another folder, or pass overwrite=True to replace the save"
        )
    if names and not (own and (unfinished or complete)):
        raise ValueError(
            f"folder: expected a new or an empty folder, but {printable(folder)} has files "
            "in it that are no save; choose another folder, or delete them"
        )


def _arrays_of(record):
    """Return the name of the folder with the arrays of a record. Earlier records do not name it."""
    return _ARRAYS_NEXT if record.get(_FOLDER) == _ARRAYS_NEXT else ARRAYS


def _find_complete(folder):
    """Return the name of the folder with the arrays of a complete save, or None without one."""
    return _arrays_of(read_json(folder, LAYOUTS)) if (folder / LAYOUTS).exists() else None


def _find_free_name(folder):
    """Return the name of the folder for new arrays, beside those of a complete save."""
    return _ARRAYS_NEXT if _find_complete(folder) == ARRAYS else ARRAYS


def _finish(folder):
    """Give the record its name, which completes the save, and delete an earlier save's arrays."""
    os.replace(folder / _UNFINISHED, folder / LAYOUTS)
    _clear(folder)


def _clear(folder):
    """Delete everything that is no part of a complete save."""
    complete = _find_complete(folder)
    for path in folder.iterdir():
        if path.name == complete:
            continue
        if path.name.startswith(ARRAYS):
            shutil.rmtree(path)
        elif path.name.startswith(_UNFINISHED):
            path.unlink()


def _in_first_process(action: Callable[[], None]) -> None:
    """Run `action` in process 0 while the others wait; if it fails, raise in every process.

    Raises:
      ValueError, OSError: the error of `action`. The other processes raise a `ValueError` with the
        same text.
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


def _check_version(record, folder):
    """Raise CheckpointError if the folder has another format than this version writes."""
    if record.get("version") != _VERSION:
        raise CheckpointError(
            [
                f"{LAYOUTS}: expected format version {_VERSION}, got {record.get('version')!r}. "
                "Formats differ in the names of variables. Restore with the version of "
                "jax-nvfp4-moe that saved this folder, or save the model again from its checkpoint"
            ],
            str(folder),
        )


def _find_stored(entries, record, folder):
    """Return `entries` in the layouts and on the shards of the saved folder.

    Raises:
      CheckpointError: the recorded shards do not divide the variables; lists all of them.
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
    """Return what must agree between the saved and the restored entries, as plain JSON values."""
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
    shards = {
        entry.name: list(dataclasses.astuple(entry.shards))
        for entry in entries
        if entry.shards is not None
    }
    return {"version": _VERSION, "layouts": layouts, "shards": shards, "arrays": arrays}


def _check(saved, expected, folder):
    """Check that the record of a folder agrees with `expected`, a `_description`.

    Raises:
      CheckpointError: they differ; lists all differences.
    """
    problems = []
    for kind, what in (
        ("layouts", "layout, version, rows and columns"),
        ("arrays", "dtype and shape"),
    ):
        here, there = expected[kind], saved.get(kind)
        there = there if isinstance(there, dict) else {}
        for name in sorted({*here, *there}):
            if here.get(name) != there.get(name):
                problems.append(
                    f"{name}: {what}: expected {here.get(name)}, the folder has {there.get(name)}"
                )
    if problems:
        raise CheckpointError(problems, str(folder))
