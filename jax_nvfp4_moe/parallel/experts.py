"""Experts over a mesh: divided among the shards along `expert`, and each one along `tensor`.

Along `tensor` the intermediate dimension is divided: a shard has the same rows of gate and of up,
and the columns of down that multiply them. Blocks of 16 stay whole. Weights are global arrays: the
rows of shard 0 come first, gate rows before up rows, then those of shard 1. Each shard's part is in
the layout of a kernel for its own sizes.

All shards see all tokens, and their results add up, in float32 whatever the dtype::

  y = psum(moe_mlp(x, own part, ids counted from the first own expert, weights))

So one all-reduce of the tokens is all that the shards send.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import Tracer
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int

from jax_nvfp4_moe.checkpoint.memory import aligned_empty
from jax_nvfp4_moe.numerics.layouts import CANONICAL
from jax_nvfp4_moe.numerics.nvfp4 import BLOCK
from jax_nvfp4_moe.numerics.tensor import DenseExperts, MoEParams
from jax_nvfp4_moe.parallel.expert_mesh import (
    EXPERT,
    TENSOR,
    ExpertMesh,
    check_parts,
    first_shard_only,
    replicate,
    stack_parts,
)
from jax_nvfp4_moe.parallel.expert_specs import expert_specs, on_shards
from jax_nvfp4_moe.parallel.shard_order import divide_shards
from jax_nvfp4_moe.parallel.shard_spec import ArrayLayout, ShardLayout, array_layouts
from jax_nvfp4_moe.parallel.streaming import chunk_size, join_chunks

Experts = TypeVar("Experts", MoEParams, DenseExperts)


def expert_layout(
    params: MoEParams | DenseExperts, expert_mesh: ExpertMesh, *, interleaved: bool = False
) -> ShardLayout | None:
    """Return how the experts of one layer are divided along `tensor`; None where they are not.

    Args:
      params: the whole layer, canonical.
      expert_mesh: of the devices.
      interleaved: whether gate and up rows alternate, as `swigluoai` has them.
    """
    shards = expert_mesh.tensor
    if shards == 1:
        return None
    halves = 2 if params.gated and not interleaved else 1
    width = params.gate_up.shape[1] // (halves * shards)
    return ShardLayout("rows", ((width, shards),) * halves, shards)


def shard_experts(
    params: MoEParams | DenseExperts,
    expert_mesh: ExpertMesh,
    *,
    layout: str | None = None,
    interleaved: bool = False,
) -> Any:
    """Divide one expert layer among the devices of `expert_mesh`; a device gets only its own part.

    `expert_layout` says in which order the entries of the result stand. In a layout that pads,
    `rows` and `columns` of the result's tensors are those of one shard. `gate_up_input_scale` is
    replicated, because dispatch rounds rows for experts of other shards.

    Args:
      params: the whole layer; its arrays may be numpy, JAX or lazy ones.
      expert_mesh: of the devices.
      layout: that each shard takes; canonical where None. `DenseExperts` have none.
      interleaved: whether gate and up rows alternate, as `swigluoai` has them.

    Returns:
      The same experts, of the same class, as global arrays.

    Raises:
      ValueError: the axes do not divide the experts or the blocks; lists the legal sizes.
    """
    check_experts(params, expert_mesh)
    if isinstance(params, MoEParams) and params.layout != CANONICAL:
        params = params.to_layout(CANONICAL)
    divided = expert_layout(params, expert_mesh, interleaved=interleaved)
    if any(isinstance(leaf, Tracer) for leaf in jax.tree.leaves(params)):
        return _divide_traced(params, layout, divided, expert_mesh)
    return _read_chunks(params, layout, divided, expert_mesh)


def check_experts(params: MoEParams | DenseExperts, expert_mesh: ExpertMesh) -> None:
    """Check that `expert_mesh` divides the experts and the intermediate dimension by blocks.

    Raises:
      ValueError: it does not; lists the legal sizes.
    """
    check_parts(EXPERT, expert_mesh.expert, "num_experts", params.num_experts)
    block = BLOCK if isinstance(params, MoEParams) else 1
    check_parts(TENSOR, expert_mesh.tensor, "intermediate", params.intermediate, block)


def convert_shards(params: Any, expert_mesh: ExpertMesh, layout: str) -> Any:
    """Return `MoEParams` over a mesh with each shard's part in `layout`."""
    if params.layout == layout:
        return params
    return jax.jit(on_shards(lambda own: own.to_layout(layout), expert_mesh))(params)


def _divide_traced(params, layout, divided: ShardLayout | None, expert_mesh: ExpertMesh):
    """Return the parts of all shards, traced, in `layout`."""
    params = jax.tree.map(divide_shards, params, array_layouts(params, divided))
    if layout is None:
        return params
    return on_shards(lambda own: own.to_layout(layout), expert_mesh)(params)


def _read_chunks(params, layout, divided: ShardLayout | None, expert_mesh: ExpertMesh):
    """Return the parts of all shards in `layout`; each process reads its own, chunk by chunk."""
    params = jax.tree.map(lambda x: np.asarray(x) if isinstance(x, jax.Array) else x, params)
    scale = replicate(params.gate_up_input_scale, expert_mesh)
    params = dataclasses.replace(params, gate_up_input_scale=None)
    layouts = array_layouts(params, divided)
    specs = expert_specs(params, expert_mesh)
    count = params.num_experts // expert_mesh.expert
    step = chunk_size(params, count, expert_mesh.target, expert_mesh.tensor)

    def read(first):
        def read_array(leaf, how: ArrayLayout, spec):
            def part(index):
                start = (index[0].start or 0) // step * count + first
                return _read_part(leaf, how, index, slice(start, start + step))

            shape = expert_mesh.expert * step, *leaf.shape[1:]
            return stack_parts(shape, expert_mesh.named_sharding(spec), part)

        return jax.tree.map(read_array, params, layouts, specs)

    experts = join_chunks(read, count, step, layout, expert_mesh)
    return dataclasses.replace(experts, gate_up_input_scale=scale)


def _read_part(leaf, layout: ArrayLayout, index, experts: slice):
    """Return what one shard holds of `experts` of one array ``[e, ...]``.

    Args:
      leaf: the array on one device.
      layout: how it is divided.
      index: of the shard in the global array.
      experts: those to read.
    """
    if layout.axis is None:
        return leaf[experts]
    before, width = (slice(None),) * (layout.axis - 1), leaf.shape[layout.axis]
    shard = (index[layout.axis].start or 0) * layout.shards // width
    parts = [leaf[(experts, *before, one)] for one in layout.ranges(width, shard)]
    if len(parts) == 1:
        return parts[0]
    shape = list(parts[0].shape)
    shape[layout.axis] = width // layout.shards
    return np.concatenate(parts, layout.axis, out=aligned_empty(tuple(shape), parts[0].dtype))


def run_sharded(
    run: Callable,
    x: Float[Array, "t h"],
    params: MoEParams | DenseExperts,
    expert_ids: Int[Array, "t k"],
    expert_weights: Float[Array, "t k"],
    *,
    expert_mesh: ExpertMesh,
) -> Float[Array, "t h"]:
    """Run each shard on all tokens and add up: ``psum(run(x, own, expert_ids - first, weights))``.

    Args:
      run: ``(x, params, expert_ids, expert_weights) -> [t, h]``; skips ids that are out of range.
      x: tokens; over Explicit axes they are gathered where they are sharded, and the result has
        their sharding.
      params: the weights, as `shard_experts` returns them.
      expert_ids: of the whole layer.
      expert_weights: of the same shape.
      expert_mesh: of `params`.
    """
    local_experts = params.num_experts // expert_mesh.expert

    def body(x, params, ids, weights):
        first = lax.axis_index(EXPERT) * local_experts if EXPERT in expert_mesh.axes else 0
        y = run(x, own_part(params, expert_mesh), ids.astype(jnp.int32) - first, weights)
        return lax.psum(y.astype(jnp.float32), expert_mesh.axes).astype(y.dtype)

    whole: PartitionSpec = expert_mesh.spec()
    specs = whole, expert_specs(params, expert_mesh), whole, whole
    given, ids, weights = (expert_mesh.reshard(leaf) for leaf in (x, expert_ids, expert_weights))
    y = expert_mesh.shard_map(body, specs, whole)(given, params, ids, weights)
    return expert_mesh.reshard(y, jax.typeof(x).sharding.spec[0])


def own_part(params: Experts, expert_mesh: ExpertMesh) -> Experts:
    """Return the weights of the shard that this runs in, as `run` takes them.

    Args:
      params: what the shard holds: `expert_specs` says so.
      expert_mesh: of the shards.
    """
    scale: Any = params.gate_up_input_scale
    if scale is not None and expert_mesh.expert > 1:
        local_experts = params.num_experts
        first = lax.axis_index(EXPERT) * local_experts
        scale = lax.dynamic_slice_in_dim(scale, first, local_experts)
    bias: Any = params.down_bias
    if bias is not None and expert_mesh.tensor > 1:
        bias = first_shard_only(bias)
    return dataclasses.replace(params, gate_up_input_scale=scale, down_bias=bias)
