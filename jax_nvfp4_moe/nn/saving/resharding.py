"""Convert saved weights to the layouts and the mesh of the module that is restored.

An `Entry` is one variable of a module. `find_stored` reads from the record of a folder in which
layouts, and on which shards, the variable was saved. `convert` then converts the saved value.
"""

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from jax_nvfp4_moe.nn.variables import DerivedParam
from jax_nvfp4_moe.numerics.layouts import CANONICAL, LAYOUTS
from jax_nvfp4_moe.numerics.tensor import DenseExperts, MoEParams, NVFP4Tensor
from jax_nvfp4_moe.parallel.shard_order import is_tensor, to_one_device, to_shards
from jax_nvfp4_moe.parallel.shard_spec import ShardLayout
from jax_nvfp4_moe.parallel.sharded_variable import find_layout

TREE = "tree"  # name of the single entry of a tree that is not a module


class Entry(NamedTuple):
    """One variable of a module, or a whole tree.

    Attributes:
      name: path of the variable, or `TREE`.
      value: value of the variable, with arrays or `jax.ShapeDtypeStruct` as leaves.
      shards: how a mesh shards the variable. None means that every device holds all of it.
    """

    name: str
    value: Any
    shards: ShardLayout | None


def find_entries(module: Any) -> list[Entry]:
    """Return one entry for each variable of a module, or one for a whole tree.

    Weights that follow from others have none.
    """
    if not isinstance(module, nnx.Module):
        return [Entry(TREE, module, None)]
    return [
        Entry("/".join(map(str, path)), variable.get_value(), find_layout(variable))
        for path, variable in nnx.to_flat_state(nnx.state(module))
        if not isinstance(variable, DerivedParam)
    ]


def tree_shards(entries: Sequence[Entry]) -> int:
    """Return the number of shards along `tensor` of the experts in a tree; 1 for a module.

    The order of the rows depends on the number of shards. A module records that number for each
    variable, but a tree does not. A tree can therefore only be restored on the same number of
    shards.
    """
    kinds = (MoEParams, DenseExperts)
    values = [entry.value for entry in entries if entry.name == TREE]
    found = jax.tree.leaves(values, is_leaf=lambda value: isinstance(value, kinds))
    matrices = (
        leaf
        for experts in found
        if isinstance(experts, kinds)
        for leaf in jax.tree.leaves(experts.down)
        if len(leaf.shape) == 3
    )
    return max(map(_count_columns, matrices), default=1)


def _count_columns(matrices):
    """Return the number of shards among which the columns of ``[e, n, k]`` are sharded."""
    sharding = getattr(matrices, "sharding", None)
    if not isinstance(sharding, NamedSharding) or len(sharding.spec) < 3:
        return 1
    axes = jax.tree.leaves(tuple(sharding.spec)[2:])
    return math.prod(sharding.mesh.shape[axis] for axis in axes)


def find_stored(entry: Entry, record: Mapping[str, Any]) -> Entry:
    """Return `entry`, abstract, in the layouts and on the shards in which it was saved.

    Args:
      entry: entry of the module that is restored.
      record: the parsed record of the folder. Facts that it lacks are taken from `entry`.

    Raises:
      TypeError, ValueError: the recorded shards do not divide the variable.
    """
    layouts, shards = (_table(record, kind) for kind in ("layouts", "shards"))
    names = tuple(_saved_layout(layouts, name, tensor) for name, tensor in tensors([entry]))
    saved = _read_shards(shards.get(entry.name))
    return Entry(entry.name, _abstract(entry, saved, names), saved)


def _table(record, kind):
    """Return the JSON object under `kind` in the record, or an empty one."""
    found = record.get(kind)
    return found if isinstance(found, dict) else {}


def _saved_layout(layouts, name, tensor) -> str:
    """Return the layout in which a tensor was saved.

    If the record names no layout that this version knows, return the tensor's own layout. The check
    of the whole record reports the difference afterwards.
    """
    saved = layouts.get(name)
    saved = saved[0] if isinstance(saved, list) and saved else None
    return saved if saved in LAYOUTS else tensor.layout


def _read_shards(saved) -> ShardLayout | None:
    """Return the `ShardLayout` of a variable from the record.

    Raises:
      TypeError, ValueError: the record has another form.
    """
    if saved is None:
        return None
    axis, segments, shards, *leading = saved  # folders of earlier versions name no leading axes
    numbers = [shards, *(number for segment in segments for number in segment)]
    pairs = tuple((width, parts) for width, parts in segments)
    positive = all(isinstance(number, int) and number > 0 for number in numbers)
    if axis not in ("rows", "columns") or not pairs or not positive:
        raise ValueError(
            "expected [axis, [[width, parts], ...], shards] with axis 'rows' or 'columns' and "
            f"positive numbers, got {saved}"
        )
    return ShardLayout(axis, pairs, shards, *leading)


def _reorder(value, here: ShardLayout | None, there: ShardLayout | None, names: tuple[str, ...]):
    """Return `value`, which is sharded as `here` says, sharded as `there` says.

    Args:
      value: value of a variable, in any layouts.
      here: how `value` is sharded; None means that it is replicated.
      there: how the result is sharded; None means that it is replicated.
      names: name of the layout of each NVFP4 tensor in the result.
    """
    return to_shards(to_one_device(value, here), there, names)


def _layout_names(value) -> tuple[str, ...]:
    """Return the name of the layout of each NVFP4 tensor in `value`."""
    return tuple(tensor.layout for _, tensor in tensors([Entry("", value, None)]))


def _abstract(entry, shards, names):
    """Return `jax.ShapeDtypeStruct`s for the arrays of `entry` as they were saved.

    Their shardings say where Orbax puts the arrays that it reads.
    """
    plain = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), entry.value)
    if (shards, names) == (entry.shards, _layout_names(entry.value)):
        return jax.tree.map(_struct, plain, jax.tree.map(_sharding, entry.value))
    made = jax.eval_shape(lambda value: _reorder(value, entry.shards, shards, names), plain)
    arrays, tree = jax.tree.flatten(made)
    owners = jax.tree.leaves(entry.value)
    return tree.unflatten(
        [
            _struct(leaf, _fitting_sharding(own, leaf.shape))
            for leaf, own in zip(arrays, owners, strict=True)
        ]
    )


def _struct(leaf, sharding):
    """Return the shape and dtype of `leaf` as a `jax.ShapeDtypeStruct` with `sharding`."""
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)


def _sharding(leaf):
    """Return the sharding of `leaf`, or the default device if it has none.

    Without a sharding, Orbax would put an array on the devices on which it was saved, and those may
    not exist here.
    """
    default = jax.sharding.SingleDeviceSharding(jnp.zeros(()).device)
    return getattr(leaf, "sharding", None) or default


def _auto_sharding(leaf):
    """Return the sharding of `leaf` with Auto axes.

    XLA then inserts the communication of a conversion by itself. With Explicit axes the traced
    program would have to spell it out.
    """
    own = _sharding(leaf)
    if not isinstance(own, NamedSharding):
        return own
    mesh = own.mesh
    assert isinstance(mesh, Mesh)
    axes = (AxisType.Auto,) * len(mesh.axis_names)
    return NamedSharding(Mesh(mesh.devices, mesh.axis_names, axis_types=axes), own.spec)


def _fitting_sharding(leaf, shape):
    """Return a sharding for an array of `shape` that will be converted to `leaf`.

    It replicates each axis of the array that the mesh of `leaf` does not divide evenly.
    """
    own = _auto_sharding(leaf)
    if not isinstance(own, NamedSharding):
        return own
    fits = []
    for size, axes in zip(shape, own.spec, strict=False):
        names = (axes,) if isinstance(axes, str) else tuple(axes or ())
        count = np.prod([own.mesh.shape[name] for name in names], dtype=np.int64)
        fits.append(axes if size % count == 0 else None)
    return NamedSharding(own.mesh, PartitionSpec(*fits))


def convert(stored: Entry, like: Entry) -> Any:
    """Return the value of `stored` in the layouts and on the shards of `like`."""
    names = _layout_names(like.value)
    if (stored.shards, _layout_names(stored.value)) == (like.shards, names):
        return stored.value
    reorder = jax.jit(
        _reorder, static_argnums=(1, 2, 3), out_shardings=jax.tree.map(_auto_sharding, like.value)
    )
    converted = reorder(stored.value, stored.shards, like.shards, names)
    return jax.device_put(converted, jax.tree.map(_sharding, like.value))


def leaves(entry: Entry) -> list[tuple[str, Any]]:
    """Return the name and the array of each leaf of a variable.

    The names do not depend on layouts. The record of a folder stores the layouts beside the names.
    """
    plain = jax.tree.map(_named_as_canonical, entry.value, is_leaf=is_tensor)
    found = jax.tree.leaves_with_path(plain)
    return [(entry.name + jax.tree_util.keystr(keys), leaf) for keys, leaf in found]


def _named_as_canonical(value):
    """Return a tensor with the names of a canonical tensor, and other values as they are."""
    if not is_tensor(value):
        return value
    return dataclasses.replace(value, layout=CANONICAL, rows=None, columns=None)


def tensors(entries: Sequence[Entry]) -> Iterator[tuple[str, NVFP4Tensor]]:
    """Yield the name and the value of each NVFP4 tensor in `entries`."""
    for entry in entries:
        for keys, value in jax.tree.leaves_with_path(entry.value, is_leaf=is_tensor):
            if is_tensor(value):
                yield entry.name + jax.tree_util.keystr(keys), value
