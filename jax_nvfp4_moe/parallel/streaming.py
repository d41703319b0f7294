"""Load experts from the host to their devices in chunks, so that a layer never exists twice.

A chunk is a few experts. Each chunk is read, copied to its devices, converted to the kernel layout
there, and written into the arrays of all experts. These arrays are donated, so that their memory is
reused. The chunks are read one ahead; see `read_ahead`. Loading therefore needs memory for the
layer and a few chunks.
"""

import functools
from collections.abc import Iterator
from typing import TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jax_nvfp4_moe.numerics.tensor import DenseExperts, MoEParams
from jax_nvfp4_moe.parallel.expert_mesh import ExpertMesh
from jax_nvfp4_moe.parallel.expert_specs import on_shards
from jax_nvfp4_moe.scheme import Target

Experts = TypeVar("Experts", MoEParams, DenseExperts)

# The number of bytes that `largest_chunk` returns. On a CPU, chunks and experts share one
# memory, and malloc keeps what the conversion of a chunk needed. A GPU prefers few and large
# transfers.
_CPU_BYTES, _GPU_BYTES = 4 << 20, 64 << 20


def largest_chunk(target: Target) -> int:
    """Return the largest number of bytes of a chunk in one shard, but for a larger expert."""
    return _CPU_BYTES if target.platform == "cpu" else _GPU_BYTES


def chunk_size(
    params: MoEParams | DenseExperts, count: int, target: Target, shards: int = 1
) -> int:
    """Return the number of experts per chunk: a divisor of `count`, and at least one.

    Args:
      params: `MoEParams` or `DenseExperts` of the whole layer.
      count: number of experts of one shard.
      target: the device that receives the chunks.
      shards: number of shards of each expert, 1 by default.
    """
    expert = sum(leaf.nbytes for leaf in jax.tree.leaves(params)) // params.num_experts // shards
    most = min(count, max(1, largest_chunk(target) // max(1, expert)))
    return next(size for size in range(most, 0, -1) if count % size == 0)


def join_chunks(
    chunks: Iterator[Experts],
    count: int,
    step: int,
    layout: str | None,
    expert_mesh: ExpertMesh | None = None,
) -> Experts:
    """Return the experts of all chunks in `layout`.

    Args:
      chunks: the canonical chunks in order, of which as many are taken as the experts need: numpy
        arrays ``[step, ...]``, or global arrays ``[expert * step, ...]`` on the devices of a mesh.
      count: number of experts of one shard, a multiple of `step`.
      step: number of experts per chunk.
      layout: name of the layout of the result; None for no conversion.
      expert_mesh: the mesh of the shards; None (default) for one device.
    """
    if step == count:
        return jax.block_until_ready(_convert_whole(next(chunks), layout, expert_mesh))
    joined = None
    for first in range(0, count, step):
        chunk = next(chunks)
        chunk = chunk if expert_mesh else jax.device_put(chunk)
        if joined is None:
            joined = _allocate(chunk, count, layout, expert_mesh)
        # Wait here, so that at most one further chunk, the one that is being read, is in memory.
        joined = jax.block_until_ready(_write(joined, chunk, np.int32(first), layout, expert_mesh))
        del chunk
    assert joined is not None
    return joined


def lower_join(chunk: Experts, count: int, layout: str | None) -> list[jax.stages.Lowered]:
    """Return the programs of `join_chunks` on one device, which finds them compiled if they are.

    Args:
      chunk: shapes ``[step, ...]`` of a chunk.
      count, layout: as for `join_chunks`.
    """
    if chunk.num_experts == count:
        return [_convert_whole.lower(chunk, layout, None)]
    joined = jax.eval_shape(lambda chunk: _allocate(chunk, count, layout, None), chunk)
    first = jax.ShapeDtypeStruct((), np.int32)
    return [
        _allocate.lower(chunk, count, layout, None),
        _write.lower(joined, chunk, first, layout, None),
    ]


@functools.partial(jax.jit, static_argnames=("layout", "expert_mesh"))
def _convert_whole(chunk, layout, expert_mesh):
    """Return the experts of the only chunk in `layout`, on their devices."""
    return on_shards(lambda chunk: _convert(chunk, layout), expert_mesh)(chunk)


@functools.partial(jax.jit, static_argnames=("count", "layout", "expert_mesh"))
def _allocate(chunk, count, layout, expert_mesh):
    """Return zeros for `count` experts per shard, with the arrays that `chunk` has in `layout`."""

    def make(chunk):
        made = jax.eval_shape(lambda: _convert(chunk, layout))
        return jax.tree.map(lambda leaf: jnp.zeros((count, *leaf.shape[1:]), leaf.dtype), made)

    return on_shards(make, expert_mesh)(chunk)


@functools.partial(jax.jit, static_argnames=("layout", "expert_mesh"), donate_argnames="joined")
def _write(joined, chunk, first, layout, expert_mesh):
    """Return `joined` with the experts of `chunk`, in `layout`, written from index `first` on."""

    def write(joined, chunk):
        return jax.tree.map(update, joined, _convert(chunk, layout))

    def update(whole, part):
        # Update integers, because XLA's CPU compiler converts a whole array of FP8 or bfloat16 to a
        # wider type and back.
        bits = jnp.dtype(f"uint{8 * whole.dtype.itemsize}")
        words, new = (lax.bitcast_convert_type(one, bits) for one in (whole, part))
        updated = lax.dynamic_update_slice_in_dim(words, new, first, axis=0)
        return lax.bitcast_convert_type(updated, whole.dtype)

    return on_shards(write, expert_mesh)(joined, chunk)


def _convert(experts, layout):
    """Return the experts in `layout`; None leaves them unchanged."""
    return experts if layout is None else experts.to_layout(layout)
