"""How arrays are divided along the mesh axis `tensor`: what a shard holds, and how it is marked.

A `ShardSpec` says how one tensor of a checkpoint is divided. A `ShardLayout` is metadata of an
`nnx.Variable` whose arrays are global: the rows, or the columns, of shard 0 come first, then those
of shard 1. So each shard's part is contiguous, and a `NamedSharding` gives it to its device. An
`ArrayLayout` says the same of one array of the variable.
"""

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import PartitionSpec

from jax_nvfp4_moe.checkpoint.values import CacheScales, LinearWeights
from jax_nvfp4_moe.numerics.fp8 import FP8Tensor
from jax_nvfp4_moe.numerics.tensor import DenseExperts, MoEParams, NVFP4Tensor
from jax_nvfp4_moe.parallel.expert_mesh import TENSOR, ExpertMesh

_METADATA = "shard"  # name of the metadata of a variable

Axis = Literal["rows", "columns"]


class ShardSpec(NamedTuple):
    """How one linear or array of a checkpoint is divided.

    Attributes:
      axis: its rows (outputs) or its columns (inputs).
      parts: into how many; fewer than shards where some of them hold the same part.
      segments: proportions of what stands side by side along the axis, such as queries, keys and
        values; each of them is divided.
    """

    axis: Axis
    parts: int
    segments: tuple[int, ...] = (1,)

    def ranges(self, width: int, index: int) -> list[slice]:
        """Return what the part `index` has of an axis of `width`, one range of each segment."""
        ranges, start, total = [], 0, sum(self.segments)
        for segment in self.segments:
            own = segment * width // (total * self.parts)
            ranges.append(slice(start + index * own, start + (index + 1) * own))
            start += own * self.parts
        return ranges

    def layout(self, width: int, shards: int) -> "ShardLayout":
        """Return the layout of a variable whose axis has `width` entries in each of `shards`."""
        total = sum(self.segments)
        widths = (segment * width // total for segment in self.segments)
        return ShardLayout(self.axis, tuple((own, self.parts) for own in widths), shards)


class ShardLayout(NamedTuple):
    """How a variable's global arrays are divided: metadata of the variable.

    Attributes:
      axis: the divided axis of its matrices. Of experts it is the axis of `gate_up`; the columns of
        `down` are divided into one range for each shard.
      segments: what one shard holds along the axis, in order: pairs of entries, and of how many
        shards hold different ones. Neighbors hold the same ones where these are fewer than shards.
      shards: into how many the arrays are divided.
    """

    axis: Axis
    segments: tuple[tuple[int, int], ...]
    shards: int


@dataclasses.dataclass(frozen=True)
class ArrayLayout:
    """How one array is divided.

    Attributes:
      axis: the divided axis; None where every shard holds the whole array.
      segments: as those of a `ShardLayout`, in any unit: bytes of codes and block scales are fewer
        than columns.
      shards: into how many the array is divided.
    """

    axis: int | None = None
    segments: tuple[tuple[int, int], ...] = ()
    shards: int = 1

    def ranges(self, width: int, index: int) -> list[slice]:
        """Return what shard `index` holds of an axis that has `width` entries on one device.

        Raises:
          ValueError: the segments do not divide the axis.
        """
        ranges, start = [], 0
        total = sum(own * parts for own, parts in self.segments)
        for own, parts in self.segments:
            if own * width % total:
                raise ValueError(
                    f"segments: expected such that divide an axis of {width}, got {self.segments}"
                )
            own = own * width // total
            first = start + index * parts // self.shards * own
            ranges.append(slice(first, first + own))
            start += own * parts
        return ranges


def join_layouts(
    layouts: Sequence[ShardLayout | None], widths: Iterable[int]
) -> ShardLayout | None:
    """Return the layout of matrices one behind the other; None where all are replicated.

    Args:
      layouts: of the matrices; None: that one is replicated.
      widths: rows of the matrices in one shard.
    """
    shards = next((layout.shards for layout in layouts if layout), None)
    if shards is None:
        return None
    segments = []
    for layout, width in zip(layouts, widths, strict=True):
        segments += layout.segments if layout else ((width, 1),)
    return ShardLayout("rows", tuple(segments), shards)


def mark(variable: nnx.Variable | None, layout: ShardLayout | None) -> None:
    """Say of a variable how its global array is divided; None: it is not."""
    if variable is not None and layout is not None:
        variable.set_metadata(_METADATA, layout)


def find_layout(variable: nnx.Variable) -> ShardLayout | None:
    """Return how a variable is divided, None where it is replicated."""
    return variable.get_metadata(_METADATA, None)


def array_layouts(value: Any, layout: ShardLayout | None) -> Any:
    """Return `value` with each array replaced by its `ArrayLayout`.

    Args:
      value: of a variable: an array, an `NVFP4Tensor`, an `FP8Tensor`, or experts of either.
      layout: of the variable; None where it is replicated.
    """
    whole = ArrayLayout()
    if layout is None:
        return jax.tree.map(lambda _: whole, value)
    if not isinstance(value, (MoEParams, DenseExperts)):
        return _matrix_layouts(value, layout, 0)
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
    """Return the array layouts of matrices whose rows are the axis `first`."""
    rows = layout.axis == "rows"
    divided = ArrayLayout(first if rows else first + 1, layout.segments, layout.shards)
    if isinstance(value, NVFP4Tensor):
        made = jax.tree.map(lambda _: ArrayLayout(), value)
        return dataclasses.replace(made, packed=divided, block_scale=divided)
    if isinstance(value, FP8Tensor):
        scale = divided if rows else ArrayLayout()
        return dataclasses.replace(value, values=divided, scale=scale)
    return divided


def divided_axes(variable: nnx.Variable) -> list[int | None]:
    """Return the divided axis of each array of a variable, None for those that are replicated."""
    made = array_layouts(variable.get_value(), find_layout(variable))
    return [one.axis for one in jax.tree.leaves(made)]


def variables(module: Any) -> list[nnx.Variable]:
    """Return the variables of a module, in the order of its leaves."""
    return jax.tree.leaves(module, is_leaf=lambda leaf: isinstance(leaf, nnx.Variable))


def module_axes(module: Any) -> list[int | None]:
    """Return the divided axis of each leaf of a module, as `jax.tree.leaves` orders them."""
    found = variables(module)
    if not all(isinstance(one, nnx.Variable) for one in found):
        raise TypeError("module: expected all arrays in an nnx.Variable")
    return [axis for variable in found for axis in divided_axes(variable)]


def axis_spec(expert_mesh: ExpertMesh, axis: int | None) -> PartitionSpec:
    """Return the specification of an array that is divided along `axis`; None: replicated."""
    return expert_mesh.spec() if axis is None else expert_mesh.spec(*(None,) * axis, TENSOR)


def take_shard(value: Any, spec: ShardSpec | None, index: int, shards: int) -> Any:
    """Return what one shard holds of a value of a checkpoint.

    Args:
      value: `LinearWeights`, or an array: numpy, traced, or a `LazyArray`, which is read.
      spec: how it is divided; None: the shard holds all of it.
      index: of the shard.
      shards: their number.
    """
    if isinstance(value, LinearWeights):
        return _take_linear(value, spec, index, shards)
    return _take(value, spec, index, shards, 0)


def take_scales(value: CacheScales, specs: Any, index: int, shards: int) -> CacheScales:
    """Return what one shard holds of the scales of a cache, divided by heads as `specs` say."""
    scales = {
        name: _take(scale, specs.get(name), index, shards, 0)
        for name, scale in value.scales.items()
    }
    return dataclasses.replace(value, scales=scales)


def _take(leaf, spec: ShardSpec | None, index: int, shards: int, axis: int):
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
        scale = take(weight.scale, None if axis else spec, 0)
        weight = dataclasses.replace(weight, values=take(weight.values), scale=scale)
    else:
        weight = take(weight)
    bias = take(value.bias, None if axis else spec, 0)
    input_scale = take(value.input_scale, None)
    return dataclasses.replace(value, weight=weight, bias=bias, input_scale=input_scale)
