"""How arrays are divided along the mesh axis `tensor`: what a shard holds, and how it is marked.

A `ShardSpec` says how one tensor of a checkpoint is divided. A `ShardLayout` is metadata of an
`nnx.Variable` whose array is global: the rows, or the columns, of shard 0 come first, then those of
shard 1. So each shard's part is contiguous, and a `NamedSharding` gives it to its device.
"""

import dataclasses
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import PartitionSpec

from jax_nvfp4_moe.checkpoint.values import CacheScales, LinearWeights
from jax_nvfp4_moe.numerics.fp8 import FP8Tensor
from jax_nvfp4_moe.numerics.tensor import NVFP4Tensor
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

    def layout(self, width: int) -> "ShardLayout":
        """Return the layout of a variable whose axis has `width` entries in one shard."""
        total = sum(self.segments)
        widths = (segment * width // total for segment in self.segments)
        return ShardLayout(self.axis, tuple((own, self.parts) for own in widths))


class ShardLayout(NamedTuple):
    """How a variable's global array is divided: metadata of the variable.

    Attributes:
      axis: the divided axis of its matrices.
      pieces: what one shard holds along the axis, in order: pairs of entries, and of how many
        shards hold different ones. Neighbors hold the same ones where these are fewer than shards.
    """

    axis: Axis
    pieces: tuple[tuple[int, int], ...]


def join_layouts(layouts: list[ShardLayout | None]) -> ShardLayout | None:
    """Return the layout of matrices one behind the other, each of which has one of `layouts`."""
    if any(layout is None for layout in layouts):
        return None
    return ShardLayout("rows", tuple(p for layout in layouts if layout for p in layout.pieces))


def mark(variable: nnx.Variable | None, layout: ShardLayout | None) -> None:
    """Say of a variable how its global array is divided; None: it is not."""
    if variable is not None and layout is not None:
        variable.set_metadata(_METADATA, layout)


def find_layout(variable: nnx.Variable) -> ShardLayout | None:
    """Return how a variable is divided, None where it is replicated."""
    return variable.get_metadata(_METADATA, None)


def divided_axes(variable: nnx.Variable) -> list[int | None]:
    """Return the divided axis of each array of a variable, None for those that are replicated."""
    value, layout = variable.get_value(), find_layout(variable)
    if layout is None:
        return [None] * len(jax.tree.leaves(value))
    axis = 0 if layout.axis == "rows" else 1
    if isinstance(value, NVFP4Tensor):
        scales = {name: None for name in ("global_scale", "global_divisor")}
        axes = {"packed": axis, "block_scale": axis, **scales}
    elif isinstance(value, FP8Tensor):
        axes = {"values": axis, "scale": None if axis else 0}
    else:
        return [axis]
    names = (field.name for field in dataclasses.fields(value))
    return [axes[name] for name in names if name in axes and getattr(value, name) is not None]


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
    pieces = [leaf[(*(slice(None),) * axis, own)] for own in ranges]
    if len(pieces) == 1:
        return pieces[0]
    return (jnp if isinstance(pieces[0], jax.Array) else np).concatenate(pieces, axis)


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
