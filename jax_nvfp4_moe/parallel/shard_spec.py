"""How arrays are sharded along the mesh axis `tensor`.

* A `ShardSpec` says how one tensor of a checkpoint is sharded.
* A `ShardLayout` is metadata of an `nnx.Variable` with global arrays. The rows or columns of shard
  0 come first, then those of shard 1, and so on. The part of each shard is therefore contiguous,
  and a `NamedSharding` assigns it to its device.
* An `ArrayLayout` says how one array of the variable is sharded.
"""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from jax_nvfp4_moe.checkpoint.values import CacheScales, LinearWeights
from jax_nvfp4_moe.numerics.fp8 import GROUP, FP8Tensor
from jax_nvfp4_moe.numerics.tensor import DenseExperts, MoEParams, NVFP4Tensor
from jax_nvfp4_moe.parallel.expert_mesh import TENSOR, ExpertMesh

Axis = Literal["rows", "columns"]


class ShardSpec(NamedTuple):
    """How one linear layer or array of a checkpoint is sharded.

    Attributes:
      axis: "rows" (outputs) or "columns" (inputs).
      parts: number of parts. If it is below the number of shards, several shards hold the same
        part.
      segments: proportions of the segments along the axis, such as queries, keys and values; each
        segment has as many parts. One segment by default.
    """

    axis: Axis
    parts: int
    segments: tuple[int, ...] = (1,)

    def ranges(self, width: int, index: int) -> list[slice]:
        """Return the entries of part `index` of an axis of `width`, one range per segment."""
        ranges, start, total = [], 0, sum(self.segments)
        for segment in self.segments:
            own = segment * width // (total * self.parts)
            ranges.append(slice(start + index * own, start + (index + 1) * own))
            start += own * self.parts
        return ranges

    def layout(self, width: int, shards: int) -> "ShardLayout":
        """Return the layout of a variable with `width` entries in each of `shards` shards."""
        total = sum(self.segments)
        widths = (segment * width // total for segment in self.segments)
        return ShardLayout(self.axis, tuple((own, self.parts) for own in widths), shards)


@dataclasses.dataclass(frozen=True)
class ShardLayout:
    """How the global arrays of a variable are sharded; stored as metadata of the variable.

    Attributes:
      axis: the sharded axis of the matrices. For experts it is the axis of `gate_up`; the columns
        of `down` are sharded into one range per shard.
      segments: what one shard holds along the axis, in order, as pairs (number of entries, number
        of different parts). If there are fewer parts than shards, neighboring shards hold the same
        part.
      shards: number of shards.
      leading: number of axes before those of the matrices, for an array of a matrix for each
        expert. 0 by default.
    """

    axis: Axis
    segments: tuple[tuple[int, int], ...]
    shards: int
    leading: int = 0


@dataclasses.dataclass(frozen=True)
class ArrayLayout:
    """How one array is sharded.

    Attributes:
      axis: the sharded axis; None (default) if every shard holds the whole array.
      segments: as in `ShardLayout`, in any unit, because bytes of codes and block scales are fewer
        than columns.
      shards: number of shards, 1 by default.
    """

    axis: int | None = None
    segments: tuple[tuple[int, int], ...] = ()
    shards: int = 1

    def ranges(self, width: int, index: int) -> list[slice]:
        """Return the entries of shard `index`, for an axis that has `width` entries on one device.

        Raises:
          ValueError: if the segments do not divide the axis.
        """
        ranges, start = [], 0
        total = sum(own * parts for own, parts in self.segments)
        for own, parts in self.segments:
            if own * width % total:
                raise ValueError(
                    f"segments: expected segments that divide an axis of {width}, got "
                    f"{self.segments}"
                )
            own = own * width // total
            first = start + index * parts // self.shards * own
            ranges.append(slice(first, first + own))
            start += own * parts
        return ranges


def join_layouts(
    layouts: Sequence[ShardLayout | None], widths: Iterable[int]
) -> ShardLayout | None:
    """Return the layout of several matrices stacked by rows; None if all are replicated.

    Args:
      layouts: layout of each matrix; None for a replicated matrix.
      widths: number of rows of each matrix in one shard.
    """
    shards = next((layout.shards for layout in layouts if layout), None)
    if shards is None:
        return None
    segments = []
    for layout, width in zip(layouts, widths, strict=True):
        segments += layout.segments if layout else ((width, 1),)
    return ShardLayout("rows", tuple(segments), shards)


def array_layouts(value: Any, layout: ShardLayout | None) -> Any:
    """Return `value` with each array replaced by its `ArrayLayout`.

    Args:
      value: value of a variable: an array, an `NVFP4Tensor`, an `FP8Tensor`, or experts.
      layout: layout of the variable; None if it is replicated.
    """
    whole = ArrayLayout()
    if layout is None:
        return jax.tree.map(lambda _: whole, value)
    if not isinstance(value, (MoEParams, DenseExperts)):
        return _matrix_layouts(value, layout, layout.leading)
    columns = ShardLayout("columns", ((1, layout.shards),), layout.shards)
    made = jax.tree.map(lambda _: whole, value)
    bias = value.gate_up_bias
    return dataclasses.replace(
        made,
        gate_up=_matrix_layouts(value.gate_up, layout, 1),
        down=_matrix_layouts(value.down, columns, 1),
        gate_up_bias=None if bias is None else _matrix_layouts(bias, layout, 1),
    )


def _matrix_layouts(value, layout, first: int):
    """Return the array layouts of matrices whose rows are at the axis `first`."""
    rows = layout.axis == "rows"
    sharded = ArrayLayout(first if rows else first + 1, layout.segments, layout.shards)
    if isinstance(value, NVFP4Tensor):
        made = jax.tree.map(lambda _: ArrayLayout(), value)
        made = dataclasses.replace(made, packed=sharded, block_scale=sharded)
        if not rows or first or not value.global_scale.ndim:
            return made
        # Joined linear layers have a global scale for each row. Experts have at most two, and each
        # shard holds rows of both.
        divisor = None if value.global_divisor is None else sharded
        return dataclasses.replace(made, global_scale=sharded, global_divisor=divisor)
    if isinstance(value, FP8Tensor):
        scale = sharded if rows or value.has_groups else ArrayLayout()
        return dataclasses.replace(value, values=sharded, scale=scale)
    return sharded


def axis_spec(expert_mesh: ExpertMesh, axis: int | None, rows: str | None = None) -> PartitionSpec:
    """Return the specification of an array of which each shard has a part.

    Args:
      expert_mesh: the mesh of the shards.
      axis: the axis of the array that `tensor` shards; None: no axis.
      rows: role that shards the first axis of the array; None (default) for a weight.
    """
    if axis is None:
        return expert_mesh.spec(rows) if rows else expert_mesh.spec()
    return expert_mesh.spec(*(rows,)[:axis], *(None,) * (axis - 1), TENSOR)


def widen_spec(spec: PartitionSpec) -> PartitionSpec:
    """Return the specification of arrays that have one more axis behind the first."""
    first, *others = (*spec, None)[: max(len(spec), 1)]
    return PartitionSpec(first, None, *others)


def take_shard(value: Any, spec: ShardSpec | None, index: int, shards: int) -> Any:
    """Return what one shard holds of a value from a checkpoint.

    Args:
      value: `LinearWeights`, or an array: numpy, traced, or a `LazyArray`, which is then read.
      spec: how the value is sharded; None if the shard holds all of it.
      index: index of the shard.
      shards: number of shards.
    """
    if isinstance(value, LinearWeights):
        return _take_linear(value, spec, index, shards)
    return _take(value, spec, index, shards, 0)


def take_scales(
    value: CacheScales, specs: Mapping[str, ShardSpec | None], index: int, shards: int
) -> CacheScales:
    """Return what one shard holds of the scales of a cache.

    Args:
      value: the scales from the checkpoint.
      specs: name of a scale -> how its heads are sharded; a scale without an entry is not sharded.
      index: index of the shard.
      shards: number of shards.
    """
    scales = {
        name: _take(scale, specs.get(name), index, shards, 0)
        for name, scale in value.scales.items()
    }
    return dataclasses.replace(value, scales=scales)


def _take(leaf, spec: ShardSpec | None, index: int, shards: int, axis: int):
    """Return the entries of one shard along `axis`; None for a missing array."""
    if leaf is None:
        return None
    if spec is None:
        return leaf[()]
    ranges = spec.ranges(leaf.shape[axis], index * spec.parts // shards)
    segments = [leaf[(*(slice(None),) * axis, own)] for own in ranges]
    if len(segments) == 1:
        return segments[0]
    return (jnp if isinstance(segments[0], jax.Array) else np).concatenate(segments, axis)


def _take_linear(value: LinearWeights, spec, index, shards) -> LinearWeights:
    """Return what one shard holds of the weight, bias and scales of a linear layer."""
    axis = 1 if spec is not None and spec.axis == "columns" else 0

    def take(leaf, spec=spec, axis=axis):
        return _take(leaf, spec, index, shards, axis)

    weight = value.weight
    if isinstance(weight, NVFP4Tensor):
        weight = dataclasses.replace(
            weight,
            packed=take(weight.packed),
            block_scale=take(weight.block_scale),
            global_scale=take(weight.global_scale, None),
            global_divisor=take(weight.global_divisor, None),
        )
    elif isinstance(weight, FP8Tensor):
        if weight.has_groups:
            _check_groups(weight, spec)
            scale = take(weight.scale)
        else:
            scale = take(weight.scale, None if axis else spec, 0)
        weight = dataclasses.replace(weight, values=take(weight.values), scale=scale)
    else:
        weight = take(weight)
    bias = take(value.bias, None if axis else spec, 0)
    input_scale = take(value.input_scale, None)
    channel_scale = take(value.channel_scale, spec if axis else None, 0)
    return dataclasses.replace(
        value, weight=weight, bias=bias, input_scale=input_scale, channel_scale=channel_scale
    )


def _check_groups(weight: FP8Tensor, spec: ShardSpec | None) -> None:
    """Check that no shard has a part of the weights that share a scale.

    Raises:
      ValueError: a range of columns does not begin and end at multiples of `GROUP`.
    """
    if spec is None or spec.axis == "rows":
        return
    k = weight.shape[-1]
    ranges = [one for part in range(spec.parts) for one in spec.ranges(k, part)]
    if any(one.start % GROUP or one.stop % GROUP for one in ranges):
        raise ValueError(
            f"weight: {k} columns of FP8 with one scale for each {GROUP} of them cannot be divided "
            f"into {spec.parts} parts: expected parts of whole blocks of {GROUP}. Replicate the "
            "layer, or use fewer shards"
        )
