"""Save modules with their weights as they are, in a kernel's layout, and restore them: with Orbax.

A folder holds ``arrays``, written by Orbax's `StandardCheckpointer`, and ``layouts.json``, which
says in which layout, and which version of it, each NVFP4 weight stands. The record has another name
until all arrays are written. If a module expects another layout, the weights are converted through
the canonical one while they are restored.
"""

import json
import os
import pathlib
import shutil
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.experimental import multihost_utils

from jax_nvfp4_moe.checkpoint.errors import CheckpointError
from jax_nvfp4_moe.checkpoint.folder import read_json
from jax_nvfp4_moe.checkpoint.writing import PARTIAL, write_file
from jax_nvfp4_moe.numerics.layouts import LAYOUTS as LAYOUT_NAMES
from jax_nvfp4_moe.numerics.layouts import find_layout
from jax_nvfp4_moe.numerics.tensor import NVFP4Tensor
from jax_nvfp4_moe.parallel.processes import is_first

ARRAYS = "arrays"
LAYOUTS = "layouts.json"
_UNFINISHED = LAYOUTS + PARTIAL
_VERSION = 2
_TEXT_BYTES = 1000  # of an error, between processes

Saved = TypeVar("Saved")


def save(folder: str | pathlib.Path, module: Any) -> None:
    """Save all variables of `module`, or all arrays of a tree.

    Over several processes all of them call it. Process 0 decides whether the folder is free, and
    writes the record; all return when the folder is complete.

    Args:
      folder: new or empty, or what a save left that did not come to its end, which is replaced.
      module: of this package, or any `nnx.Module` with modules of it inside; or `MoEParams`, an
        `NVFP4Tensor`, any tree of them. Arrays may be sharded.

    Raises:
      ValueError: `folder` is not empty; in all processes.
      OSError: the record cannot be written; process 0 names the file and its device.
      ImportError: orbax-checkpoint is not installed.
    """
    import orbax.checkpoint  # on demand: heavy, and needed nowhere else

    folder = pathlib.Path(folder).expanduser().resolve()
    trees = _trees(module)
    record = json.dumps(_description(trees), indent=1)
    _in_first_process(lambda: _begin(folder, record))
    arrays = {name: leaf for _, leaves in _leaves(trees) for name, leaf in leaves}
    with orbax.checkpoint.StandardCheckpointer() as checkpointer:
        checkpointer.save(folder / ARRAYS, arrays)
    _in_first_process(lambda: os.replace(folder / _UNFINISHED, folder / LAYOUTS))


def restore(folder: str | pathlib.Path, like: Saved) -> Saved:
    """Restore what `save` wrote.

    Weights that were saved in another layout than `like` expects, such as that of another GPU's
    kernel, are converted one at a time. ::

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

    folder = pathlib.Path(folder).expanduser().resolve()
    record = read_json(folder, LAYOUTS)
    trees = _trees(like)
    stored = [(name, _as_stored(name, tree, record)) for name, tree in trees]
    _check(record, _description(stored), folder)
    abstract = {
        name: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=_sharding(leaf))
        for _, leaves in _leaves(stored)
        for name, leaf in leaves
    }
    with orbax.checkpoint.StandardCheckpointer() as checkpointer:
        arrays = checkpointer.restore(folder / ARRAYS, abstract)
    values = []
    for (_, tree), (_, before), (_, leaves) in zip(trees, stored, _leaves(stored), strict=True):
        # Popped: what was read must not stay in memory beside what it is converted to.
        read = [arrays.pop(name) for name, _ in leaves]
        values.append(_convert(jax.tree.unflatten(jax.tree.structure(before), read), tree))
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


def _sharding(leaf):
    """Return where a leaf goes; arrays that were saved on other devices must go somewhere."""
    default = jax.sharding.SingleDeviceSharding(jnp.zeros(()).device)
    return getattr(leaf, "sharding", None) or default


def _trees(module) -> list[tuple[str, Any]]:
    """Return each variable's path and what it holds; a tree stands for itself."""
    if not isinstance(module, nnx.Module):
        return [("tree", module)]
    found = nnx.to_flat_state(nnx.state(module))
    return [("/".join(map(str, path)), variable.get_value()) for path, variable in found]


def _is_tensor(value) -> bool:
    return isinstance(value, NVFP4Tensor)


def _as_stored(name, tree, record):
    """Return `tree` with its NVFP4 tensors, abstract, in the layouts in which they were saved."""
    layouts = record.get("layouts")
    layouts = layouts if isinstance(layouts, dict) else {}

    def replace(keys, value):
        saved = layouts.get(name + jax.tree_util.keystr(keys))
        saved = saved[0] if isinstance(saved, list) and saved else None
        if not _is_tensor(value) or saved not in LAYOUT_NAMES or saved == value.layout:
            return value
        there = jax.eval_shape(lambda tensor: tensor.to_layout(saved), value)
        # Layouts change the last two axes: what a sharding says of the others stays right.
        return jax.tree.map(
            lambda leaf, own: jax.ShapeDtypeStruct(
                leaf.shape, leaf.dtype, sharding=getattr(own, "sharding", None)
            ),
            there,
            jax.tree.unflatten(jax.tree.structure(there), jax.tree.leaves(value)),
        )

    return jax.tree.map_with_path(replace, tree, is_leaf=_is_tensor)


def _convert(tree, like):
    """Return `tree` with its NVFP4 tensors in the layouts of `like`."""

    def convert(value, own):
        if not _is_tensor(value) or value.layout == own.layout:
            return value
        shardings = jax.tree.map(_sharding, own)
        return jax.jit(lambda v: v.to_layout(own.layout), out_shardings=shardings)(value)

    return jax.tree.map(convert, tree, like, is_leaf=_is_tensor)


def _leaves(trees) -> list[tuple[str, list[tuple[str, Any]]]]:
    """Return for each variable its path, and name -> array of all that it holds."""
    found = []
    for name, tree in trees:
        leaves = jax.tree.leaves_with_path(tree)
        found.append((name, [(name + jax.tree_util.keystr(keys), leaf) for keys, leaf in leaves]))
    return found


def _description(trees) -> dict[str, Any]:
    """Return what must agree between what is saved and what is restored; plain JSON."""
    arrays = {
        name: [leaf.dtype.name, *leaf.shape]
        for _, leaves in _leaves(trees)
        for name, leaf in leaves
    }
    layouts = {
        name: [
            tensor.layout,
            find_layout(tensor.layout).version,
            tensor.rows,
            tensor.columns,
        ]
        for name, tensor in _tensors(trees)
    }
    return {"version": _VERSION, "layouts": layouts, "arrays": arrays}


def _tensors(trees) -> Iterator[tuple[str, NVFP4Tensor]]:
    for name, tree in trees:
        for keys, value in jax.tree.leaves_with_path(tree, is_leaf=_is_tensor):
            if _is_tensor(value):
                yield name + jax.tree_util.keystr(keys), value


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
