"""The order of array entries on one device and on a mesh, and conversions in both directions.

On one device, weights are in the order of the checkpoint. On a mesh, the entries of shard 0 come
first, then those of shard 1, and so on. The NVFP4 matrices of each shard are in the layout of its
kernel. Both conversions go through canonical weights, so that weights can move from any mesh to any
other::

  to_one_device(to_shards(weights, layout, names), layout) == weights
"""

import dataclasses
from collections.abc import Sequence
from typing import Any, TypeGuard

import jax
import jax.numpy as jnp
import numpy as np

from jax_nvfp4_moe.numerics.layouts import CANONICAL
from jax_nvfp4_moe.numerics.tensor import NVFP4Tensor
from jax_nvfp4_moe.ops.derivative import with_derivative_of
from jax_nvfp4_moe.parallel.shard_spec import ArrayLayout, ShardLayout, array_layouts


def to_one_device(value: Any, layout: ShardLayout | None) -> Any:
    """Return the canonical weights in the order of one device.

    Args:
      value: value of a variable on a mesh: an array, or a tree with NVFP4 tensors in any layout.
      layout: how the variable is sharded; None if it is replicated.

    Raises:
      ValueError: if `layout` does not divide the arrays.
    """
    tensors, tree = jax.tree.flatten(value, is_leaf=is_tensor)
    layouts = tree.flatten_up_to(array_layouts(value, layout))
    canonical = [_convert(one, how, CANONICAL) for one, how in zip(tensors, layouts, strict=True)]
    value = tree.unflatten(canonical)
    return jax.tree.map(join_shards, value, array_layouts(value, layout))


def to_shards(value: Any, layout: ShardLayout | None, names: Sequence[str]) -> Any:
    """Return the weights in the order of the shards of a mesh.

    Args:
      value: value of a variable on one device, canonical.
      layout: how to shard the variable; None to replicate it.
      names: layout of each NVFP4 tensor inside a shard, in the order of `jax.tree.leaves`.

    Raises:
      ValueError: if `layout` does not divide the arrays, or a layout name is unknown.
    """
    value = jax.tree.map(reorder_for_shards, value, array_layouts(value, layout))
    tensors, tree = jax.tree.flatten(value, is_leaf=is_tensor)
    layouts = tree.flatten_up_to(array_layouts(value, layout))
    rest = iter(names)
    return tree.unflatten(
        [
            _convert(one, how, next(rest)) if is_tensor(one) else one
            for one, how in zip(tensors, layouts, strict=True)
        ]
    )


def is_tensor(value: object) -> TypeGuard[NVFP4Tensor]:
    """Return whether `value` is an `NVFP4Tensor`; used as ``is_leaf``."""
    return isinstance(value, NVFP4Tensor)


def join_shards(array: jax.Array, layout: ArrayLayout) -> jax.Array:
    """Return a sharded array in the order of one device.

    If several shards hold the same entries, those of the first of them are taken.

    Args:
      array: the entries of all shards, one shard after the other along the sharded axis.
      layout: how the array is sharded.

    Raises:
      ValueError: if the shards or their segments are not equal parts of the axis.
    """
    if layout.axis is None:
        return array
    shards, own = layout.shards, array.shape[layout.axis] // layout.shards
    total = sum(width for width, _ in layout.segments)
    if own * shards != array.shape[layout.axis] or any(w * own % total for w, _ in layout.segments):
        raise ValueError(
            f"array: expected a shape that {layout} divides into equal parts, got {array.shape}"
        )
    taken, start = [], 0
    for width, parts in layout.segments:
        # Widths count columns, but two codes share a byte and a block shares a scale: rescale.
        width = width * own // total
        for part in range(parts):
            first = -(-part * shards // parts) * own + start  # in the first shard that holds it
            taken.append(slice(first, first + width))
        start += width
    return _take(array, layout.axis, taken)


def reorder_for_shards(array: jax.Array, layout: ArrayLayout) -> jax.Array:
    """Undo `join_shards`: return the entries of shard 0, then those of shard 1, and so on.

    Raises:
      ValueError: if the segments do not divide the axis.
    """
    if layout.axis is None:
        return array
    width = array.shape[layout.axis]
    ranges = [one for shard in range(layout.shards) for one in layout.ranges(width, shard)]
    return _take(array, layout.axis, ranges)


def _take(array, axis, ranges):
    """Return the entries of `ranges`, slices along `axis`, one after the other.

    One gather compiles in a fraction of the time that XLA needs to place many slices on a mesh.
    """
    entries = np.concatenate([np.arange(one.start, one.stop) for one in ranges])
    return with_derivative_of(_gather, _gather_bits, entries=entries, axis=axis)(array)


def _gather(array, *, entries, axis):
    return jnp.take(array, entries, axis=axis, mode="clip")


def _gather_bits(array, *, entries, axis):
    """Gather integers, because a mesh adds the parts of its devices, which loses the sign of 0."""
    bits = array.view(f"uint{8 * array.dtype.itemsize}")
    return _gather(bits, entries=entries, axis=axis).view(array.dtype)


def _convert(value, layouts, name):
    """Return `value`; if it is an NVFP4 tensor, each shard is converted to the layout `name`."""
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

    # The leading axes of a tensor count matrices. Here they are shards, and then experts.
    each = dataclasses.replace(
        value, packed=split(value.packed), block_scale=split(value.block_scale)
    ).to_layout(name)
    return dataclasses.replace(each, packed=join(each.packed), block_scale=join(each.block_scale))
