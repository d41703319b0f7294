"""The order of entries on one device and on a mesh, and the way from each to the other.

On one device weights stand in the order of the checkpoint. On a mesh the entries of shard 0 come
first, then those of shard 1, and each shard's NVFP4 matrices have the layout of its kernel. Both
ways go through canonical weights, so any mesh leads to any other::

  to_one_device(to_shards(weights, layout, names), layout) == weights
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jax_nvfp4_moe.numerics.layouts import CANONICAL
from jax_nvfp4_moe.numerics.tensor import NVFP4Tensor
from jax_nvfp4_moe.parallel.shard_spec import ArrayLayout, ShardLayout, array_layouts


def to_one_device(value: Any, layout: ShardLayout | None) -> Any:
    """Return the weights of a mesh as one device has them, canonical.

    Args:
      value: of a variable: an array, or a tree with NVFP4 tensors in any layout.
      layout: how the variable is divided; None where it is replicated.

    Raises:
      ValueError: `layout` does not divide the arrays.
    """
    tensors, tree = jax.tree.flatten(value, is_leaf=is_tensor)
    layouts = tree.flatten_up_to(array_layouts(value, layout))
    canonical = [_convert(one, how, CANONICAL) for one, how in zip(tensors, layouts, strict=True)]
    value = tree.unflatten(canonical)
    return jax.tree.map(join_shards, value, array_layouts(value, layout))


def to_shards(value: Any, layout: ShardLayout | None, names: Sequence[str]) -> Any:
    """Return the weights of one device as the shards of a mesh have them.

    Args:
      value: canonical, of a variable.
      layout: how the variable is to be divided; None: it is replicated.
      names: the layout that each NVFP4 tensor takes in a shard, in the order of `jax.tree.leaves`.

    Raises:
      ValueError: `layout` does not divide the arrays, or there is no layout of such a name.
    """
    value = jax.tree.map(divide_shards, value, array_layouts(value, layout))
    tensors, tree = jax.tree.flatten(value, is_leaf=is_tensor)
    layouts = tree.flatten_up_to(array_layouts(value, layout))
    rest = iter(names)
    return tree.unflatten(
        [
            _convert(one, how, next(rest)) if is_tensor(one) else one
            for one, how in zip(tensors, layouts, strict=True)
        ]
    )


def is_tensor(value: Any) -> bool:
    """Return whether `value` is an `NVFP4Tensor`, for ``is_leaf``."""
    return isinstance(value, NVFP4Tensor)


def join_shards(array: jax.Array, layout: ArrayLayout) -> jax.Array:
    """Return a divided array in the order that it has on one device.

    Entries that several shards hold are those of the first of these shards.

    Args:
      array: the shards' entries, one shard after the other along the divided axis.
      layout: how it is divided.

    Raises:
      ValueError: the shards or their segments are not equal parts of the axis.
    """
    if layout.axis is None:
        return array
    shards, own = layout.shards, array.shape[layout.axis] // layout.shards
    total = sum(width for width, _ in layout.segments)
    if own * shards != array.shape[layout.axis] or any(w * own % total for w, _ in layout.segments):
        raise ValueError(f"array: expected shape that {layout} divides, got {array.shape}")
    joined, start = [], 0
    for width, parts in layout.segments:
        width = width * own // total  # codes of NVFP4 share a byte, and blocks share a scale
        for part in range(parts):
            first = -(-part * shards // parts) * own + start  # of the first shard that holds it
            joined.append(_slice(array, layout.axis, slice(first, first + width)))
        start += width
    return jnp.concatenate(joined, layout.axis)


def divide_shards(array: jax.Array, layout: ArrayLayout) -> jax.Array:
    """Undo `join_shards`: return the entries of shard 0, then those of shard 1, and so on.

    Raises:
      ValueError: the segments do not divide the axis.
    """
    if layout.axis is None:
        return array
    width = array.shape[layout.axis]
    ranges = [one for shard in range(layout.shards) for one in layout.ranges(width, shard)]
    parts = [_slice(array, layout.axis, one) for one in ranges]
    return jnp.concatenate(parts, layout.axis)


def _slice(array, axis, entries):
    return array[(*(slice(None),) * axis, entries)]


def _convert(value, layouts, name):
    """Return `value`, each shard of an NVFP4 tensor in the layout called `name`."""
    if not is_tensor(value) or value.layout == name:
        return value
    layout = layouts.packed
    if layout.axis is None:
        return value.to_layout(name)
    axis, shards = layout.axis, layout.shards

    def split(array):
        shape = array.shape
        own = shape[axis] // shards
        return jnp.moveaxis(array.reshape(*shape[:axis], shards, own, *shape[axis + 1 :]), axis, 0)

    def join(array):
        array = jnp.moveaxis(array, 0, axis)
        shape = array.shape
        return array.reshape(*shape[:axis], shards * shape[axis + 1], *shape[axis + 2 :])

    # The leading axes of a tensor are of matrices: here of shards, then of experts.
    each = dataclasses.replace(
        value, packed=split(value.packed), block_scale=split(value.block_scale)
    ).to_layout(name)
    return dataclasses.replace(each, packed=join(each.packed), block_scale=join(each.block_scale))
