"""Save modules with their weights as they are, in a kernel's layout, and restore them: with Orbax.

A folder holds ``arrays``, written by Orbax's `StandardCheckpointer`, and ``layouts.json``, which
says in which layout, and which version of it, each NVFP4 weight stands. The record has another name
until all arrays are written. A module that expects
another is refused, since the same bytes would mean other numbers.
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
from jax_nvfp4_moe.numerics.layouts import find_layout
from jax_nvfp4_moe.numerics.tensor import NVFP4Tensor
from jax_nvfp4_moe.parallel.processes import is_first

ARRAYS = "arrays"
LAYOUTS = "layouts.json"
_UNFINISHED = LAYOUTS + PARTIAL
_VERSION = 2
_TEXT_BYTES = 1000  # of an error, between processes

Saved = TypeVar("Saved")


def save_prepared(folder: str | pathlib.Path, module: Any) -> None:
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
    record = json.dumps(_description(module), indent=1)
    _in_first_process(lambda: _begin(folder, record))
    arrays = {name: leaf for _, leaves in _leaves(module) for name, leaf in leaves}
    with orbax.checkpoint.StandardCheckpointer() as checkpointer:
        checkpointer.save(folder / ARRAYS, arrays)
    _in_first_process(lambda: os.replace(folder / _UNFINISHED, folder / LAYOUTS))


def restore_prepared(folder: str | pathlib.Path, like: Saved) -> Saved:
    """Restore what `save_prepared` wrote.

    Args:
      folder: where it is.
      like: a module or a tree of the same structure, or ``nnx.eval_shape(lambda: ...)`` of a
        module, which takes no memory. Made for the same backend, so that it expects the same
        layouts. Its arrays, or `jax.ShapeDtypeStruct`, say by their sharding where the values go,
        however they were saved; to the default device where they have none.

    Returns:
      What `like` is, with the saved values.

    Raises:
      CheckpointError: the folder is incomplete, or names, shapes, dtypes, layouts or their
        versions differ; lists all.
      ImportError: orbax-checkpoint is not installed.
    """
    import orbax.checkpoint

    folder = pathlib.Path(folder).expanduser().resolve()
    _check(read_json(folder, LAYOUTS), _description(like), folder)
    variables = _leaves(like)
    abstract = {
        name: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=_sharding(leaf))
        for _, leaves in variables
        for name, leaf in leaves
    }
    with orbax.checkpoint.StandardCheckpointer() as checkpointer:
        arrays = checkpointer.restore(folder / ARRAYS, abstract)
    values = [
        jax.tree.unflatten(jax.tree.structure(tree), [arrays[name] for name, _ in leaves])
        for (_, tree), (_, leaves) in zip(_trees(like), variables, strict=True)
    ]
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


def _leaves(module) -> list[tuple[str, list[tuple[str, Any]]]]:
    """Return for each variable its path, and name -> array of all that it holds."""
    found = []
    for name, tree in _trees(module):
        leaves = jax.tree.leaves_with_path(tree)
        found.append((name, [(name + jax.tree_util.keystr(keys), leaf) for keys, leaf in leaves]))
    return found


def _description(module) -> dict[str, Any]:
    """Return what must agree between the saved and the restored module; plain JSON."""
    arrays = {
        name: [leaf.dtype.name, *leaf.shape]
        for _, leaves in _leaves(module)
        for name, leaf in leaves
    }
    layouts = {
        name: [
            tensor.layout,
            find_layout(tensor.layout).version,
            tensor.rows,
            tensor.columns,
        ]
        for name, tensor in _tensors(module)
    }
    return {"version": _VERSION, "layouts": layouts, "arrays": arrays}


def _tensors(module) -> Iterator[tuple[str, NVFP4Tensor]]:
    for name, tree in _trees(module):
        values = jax.tree.leaves_with_path(
            tree, is_leaf=lambda value: isinstance(value, NVFP4Tensor)
        )
        for keys, value in values:
            if isinstance(value, NVFP4Tensor):
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
