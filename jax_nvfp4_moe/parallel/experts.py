"""Experts on a mesh: sharded along `expert`, and each expert sharded along `tensor`.

Along `tensor` the intermediate dimension is sharded. A shard holds the same rows of gate and of up,
and the columns of down that multiply them. No shard boundary cuts a block of 16. Weights are global
arrays: first the rows of shard 0 (gate rows before up rows), then those of shard 1, and so on. The
part of each shard is in the layout of a kernel for its own sizes.

With "psum", all shards see all tokens, or those of their part of `data`. Their results are added up
in float32 for every dtype::

  y = psum(moe_mlp(x, own part, ids counted from the first own expert, weights))

The only communication is then one all-reduce of the tokens.
"""

import contextlib
import dataclasses
import functools
from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import Tracer
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int

from jax_nvfp4_moe.checkpoint.reading.memory import aligned_empty
from jax_nvfp4_moe.checkpoint.reading.read_ahead import read_ahead
from jax_nvfp4_moe.numerics.layouts import CANONICAL
from jax_nvfp4_moe.numerics.nvfp4 import BLOCK
from jax_nvfp4_moe.numerics.tensor import DenseExperts, MoEParams
from jax_nvfp4_moe.ops.low_rank import AdaptedExperts
from jax_nvfp4_moe.ops.routing import shift_ids
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
from jax_nvfp4_moe.parallel.shard_order import reorder_for_shards
from jax_nvfp4_moe.parallel.shard_spec import ArrayLayout, ShardLayout, array_layouts
from jax_nvfp4_moe.parallel.streaming import chunk_size, join_chunks

Experts = TypeVar("Experts", MoEParams, DenseExperts)


def expert_layout(
    params: MoEParams | DenseExperts, expert_mesh: ExpertMesh, *, interleaved: bool = False
) -> ShardLayout | None:
    """Return how the experts of one layer are sharded along `tensor`; None if they are not sharded.

    Args:
      params: the whole layer in the canonical layout.
      expert_mesh: the mesh of the devices.
      interleaved: whether gate and up rows alternate, as for `swigluoai`; False by default.
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
    """Shard one expert layer over the devices of `expert_mesh`; each device receives only its part.

    `expert_layout` describes the order of the entries in the result. If a layout pads, `rows` and
    `columns` of the resulting tensors are those of one shard. `gate_up_input_scale` is replicated,
    because dispatch quantizes rows for experts of other shards.

    Args:
      params: `MoEParams` or `DenseExperts` of the whole layer, with numpy, JAX or lazy arrays.
      expert_mesh: the mesh of the devices.
      layout: layout of each shard; None (default) for the canonical layout. `DenseExperts` have no
        layout.
      interleaved: whether gate and up rows alternate, as for `swigluoai`; False by default.

    Returns:
      Experts of the same class, as global arrays.

    Raises:
      ValueError: if the axes do not divide the experts or the blocks of 16; the message lists the
        legal sizes.

    Example:
      >>> import jax
      >>> import jax_nvfp4_moe as nvfp4
      >>> from jax_nvfp4_moe.parallel import find_expert_mesh, shard_experts
      >>> params = nvfp4.testing.random_moe_params(
      ...     jax.random.key(0), num_experts=4, hidden=64, intermediate=32
      ... )
      >>> mesh = jax.make_mesh((1, 1), ("expert", "tensor"))
      >>> sharded = shard_experts(params, find_expert_mesh(mesh))
      >>> tuple(sharded.down.packed.sharding.spec)
      ('expert', None, 'tensor')
    """
    check_experts(params, expert_mesh)
    if isinstance(params, MoEParams) and params.layout != CANONICAL:
        params = params.to_layout(CANONICAL)
    sharded = expert_layout(params, expert_mesh, interleaved=interleaved)
    if any(isinstance(leaf, Tracer) for leaf in jax.tree.leaves(params)):
        return _shard_traced(params, layout, sharded, expert_mesh)
    return _read_chunks(params, layout, sharded, expert_mesh)


def check_experts(params: MoEParams | DenseExperts, expert_mesh: ExpertMesh) -> None:
    """Check that `expert_mesh` divides the experts, and the intermediate size into whole blocks.

    Raises:
      ValueError: if it does not; the message lists the legal sizes.
    """
    check_parts(EXPERT, expert_mesh.expert, "num_experts", params.num_experts)
    block = BLOCK if isinstance(params, MoEParams) else 1
    check_parts(TENSOR, expert_mesh.tensor, "intermediate", params.intermediate, block)


def convert_shards(params: MoEParams, expert_mesh: ExpertMesh, layout: str) -> MoEParams:
    """Return sharded `MoEParams` with the part of each shard in `layout`."""
    if params.layout == layout:
        return params
    return jax.jit(on_shards(lambda own: own.to_layout(layout), expert_mesh))(params)


def _shard_traced(params, layout, sharded: ShardLayout | None, expert_mesh: ExpertMesh):
    """Return the parts of all shards in `layout`, inside a trace."""
    params = jax.tree.map(reorder_for_shards, params, array_layouts(params, sharded))
    if layout is None:
        return params
    return on_shards(lambda own: own.to_layout(layout), expert_mesh)(params)


def _read_chunks(params, layout, sharded: ShardLayout | None, expert_mesh: ExpertMesh):
    """Return the parts of all shards in `layout`; each process reads its own parts in chunks."""
    params = jax.tree.map(lambda x: np.asarray(x) if isinstance(x, jax.Array) else x, params)
    scale = replicate(params.gate_up_input_scale, expert_mesh)
    params = dataclasses.replace(params, gate_up_input_scale=None)
    layouts = array_layouts(params, sharded)
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

    reads = (functools.partial(read, first) for first in range(0, count, step))
    with contextlib.closing(read_ahead(reads)) as chunks:
        experts = join_chunks(chunks, count, step, layout, expert_mesh)
    return dataclasses.replace(experts, gate_up_input_scale=scale)


def _read_part(leaf, layout: ArrayLayout, index, experts: slice):
    """Return what one shard holds of `experts` of one array ``[e, ...]``.

    Args:
      leaf: the array in the order of one device.
      layout: how the array is sharded.
      index: position of the shard in the global array.
      experts: the experts to read.
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
      x: tokens ``[t, h]``. They are sharded along `data`, and each part is replicated along the
        other axes. Over Explicit axes, the result gets the sharding of `x`.
      params: the weights, as `shard_experts` returns them.
      expert_ids: ``[t, k]``, ids of the whole layer.
      expert_weights: ``[t, k]``.
      expert_mesh: the mesh of `params`.

    Returns:
      ``[t, h]`` in the dtype that `run` returns.
    """

    def body(x, params, ids, weights):
        ids = ids.astype(jnp.int32)
        if expert_mesh.expert > 1:
            first = lax.axis_index(expert_mesh.name(EXPERT)) * params.num_experts
            # In the program of each device, the router and the experts are calls of one chain.
            chained = expert_mesh.is_inside
            ids = shift_ids(ids, first, target=expert_mesh.target) if chained else ids - first
        y = run(x, own_part(params, expert_mesh), ids, weights)
        return expert_mesh.add_up(y, EXPERT, TENSOR)

    role = expert_mesh.rows(x.shape[0])
    rows: PartitionSpec = expert_mesh.spec(role)
    specs = rows, expert_specs(params, expert_mesh), rows, rows
    given, ids, weights = (
        expert_mesh.reshard(leaf, role) for leaf in (x, expert_ids, expert_weights)
    )
    y = expert_mesh.shard_map(body, specs, rows)(given, params, ids, weights)
    return expert_mesh.reshard(y, jax.typeof(x).sharding.spec[0])


def own_part(params: Any, expert_mesh: ExpertMesh) -> Any:
    """Return the weights of the current shard, in the form that `run` expects.

    Args:
      params: what the shard holds, by `expert_specs`.
      expert_mesh: the mesh of the shards.
    """
    if isinstance(params, AdaptedExperts):
        return dataclasses.replace(params, experts=own_part(params.experts, expert_mesh))
    scale = params.gate_up_input_scale
    if scale is not None and expert_mesh.expert > 1:
        local_experts = params.num_experts
        first = lax.axis_index(expert_mesh.name(EXPERT)) * local_experts
        scale = lax.dynamic_slice_in_dim(scale, first, local_experts)
    bias = params.down_bias
    if bias is not None and expert_mesh.tensor > 1:
        bias = first_shard_only(bias, expert_mesh.name(TENSOR))
    return dataclasses.replace(params, gate_up_input_scale=scale, down_bias=bias)
