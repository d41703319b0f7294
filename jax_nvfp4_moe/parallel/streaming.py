"""Experts from the host to their devices a few at a time, so that no layer is there twice.

A piece is read, put on its devices, converted there, and written into the arrays of all experts,
whose memory is given away and taken back; a thread reads the next one meanwhile. What is needed
beside the layer is a few pieces.
"""

import concurrent.futures
import functools
from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jax_nvfp4_moe.numerics.tensor import DenseExperts, MoEParams
from jax_nvfp4_moe.parallel.expert_mesh import EXPERT, TENSOR, ExpertMesh
from jax_nvfp4_moe.scheme import Target

Experts = TypeVar("Experts", MoEParams, DenseExperts)

# Most bytes of a piece in one shard. A CPU has pieces and experts in one memory, and malloc keeps
# what the conversion of pieces needed; a GPU wants few and large transfers.
_CPU_BYTES, _GPU_BYTES = 4 << 20, 64 << 20


def piece_size(params: Any, count: int, target: Target, parts: int = 1) -> int:
    """Return how many experts make a piece: a divisor of `count`, and at least one.

    Args:
      params: `MoEParams` or `DenseExperts` of the whole layer.
      count: experts of one shard.
      target: the device that takes them.
      parts: into how many shards an expert is cut.
    """
    expert = sum(leaf.nbytes for leaf in jax.tree.leaves(params)) // params.num_experts // parts
    largest = _CPU_BYTES if target.platform == "cpu" else _GPU_BYTES
    most = min(count, max(1, largest // max(1, expert)))
    return next(size for size in range(most, 0, -1) if count % size == 0)


def join_pieces(
    read: Callable[[int], Experts],
    count: int,
    step: int,
    layout: str | None,
    expert_mesh: ExpertMesh | None = None,
) -> Experts:
    """Return the experts of all pieces, in `layout`.

    Args:
      read: first expert of a piece, counted in each shard -> that piece, canonical: numpy arrays
        ``[step, ...]``, or ``[tensor, expert * step, ...]`` on the devices of a grid. Called in
        another thread, where the caller's `jax.default_device` does not hold.
      count: experts of one shard, a multiple of `step`.
      step: experts of a piece.
      layout: name of that of the result; None leaves the arrays as they are.
      expert_mesh: of the shards; None for one device.
    """
    joined = None
    with concurrent.futures.ThreadPoolExecutor(1) as reader:
        coming = reader.submit(read, 0)
        for first in range(0, count, step):
            piece = coming.result()
            if first + step < count:
                coming = reader.submit(read, first + step)
            piece = piece if expert_mesh else jax.device_put(piece)
            if joined is None:
                joined = _allocate(piece, count, layout, expert_mesh)
            # No more than the piece that is read waits beside this one.
            joined = jax.block_until_ready(
                _write(joined, piece, np.int32(first), layout, expert_mesh)
            )
    assert joined is not None
    return joined


@functools.partial(jax.jit, static_argnames=("count", "layout", "expert_mesh"))
def _allocate(piece, count, layout, expert_mesh):
    """Return zeros for `count` experts a shard, like those of `piece` in `layout`."""

    def make(piece):
        made = jax.eval_shape(lambda: _convert(piece, layout))
        return jax.tree.map(lambda leaf: jnp.zeros((count, *leaf.shape[1:]), leaf.dtype), made)

    return on_shards(make, expert_mesh)(piece)


@functools.partial(jax.jit, static_argnames=("layout", "expert_mesh"), donate_argnames="joined")
def _write(joined, piece, first, layout, expert_mesh):
    """Return `joined`, its experts from `first` on being those of `piece` in `layout`."""

    def write(joined, piece):
        return jax.tree.map(update, joined, _convert(piece, layout))

    def update(whole, part):
        # As integers: XLA's CPU compiler converts a whole array of FP8 or bfloat16, forth and back.
        bits = jnp.dtype(f"uint{8 * whole.dtype.itemsize}")
        words, new = (lax.bitcast_convert_type(one, bits) for one in (whole, part))
        updated = lax.dynamic_update_slice_in_dim(words, new, first, axis=0)
        return lax.bitcast_convert_type(updated, whole.dtype)

    return on_shards(write, expert_mesh)(joined, piece)


def _convert(experts, layout):
    return experts if layout is None else experts.to_layout(layout)


def on_shards(run: Callable, expert_mesh: ExpertMesh | None) -> Callable:
    """Return `run` as it runs on the experts ``[e, ...]`` of each shard; as it is without a grid.

    Over a grid arrays are ``[tensor, e, ...]``, cut along these two.
    """
    if expert_mesh is None:
        return run

    def body(*args):
        own = jax.tree.map(lambda leaf: leaf[0], args)
        return jax.tree.map(lambda leaf: leaf[None], run(*own))

    spec = expert_mesh.spec(TENSOR, EXPERT)
    return lambda *args: expert_mesh.shard_map(body, (spec,) * len(args), spec)(*args)
