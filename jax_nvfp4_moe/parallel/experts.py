"""Experts over a mesh: shared out along `expert`, and each cut along `tensor`.

Along `tensor` the intermediate dimension is cut: a shard has the same rows of gate and of up, and
the columns of down that multiply them. Blocks of 16 are never cut. Each shard is prepared for its
own sizes. All shards see all tokens; what they compute adds up::

  y = psum(moe_mlp(x, own part, ids counted from the first own expert, weights))

so that one all-reduce of the tokens is all that is sent. It adds float32, whatever the dtype.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import Tracer
from jaxtyping import Array, Float, Int

from jax_nvfp4_moe.checkpoint.memory import aligned_empty
from jax_nvfp4_moe.numerics.fp8 import FP8Tensor
from jax_nvfp4_moe.numerics.layouts import CANONICAL
from jax_nvfp4_moe.numerics.nvfp4 import BLOCK
from jax_nvfp4_moe.numerics.tensor import DenseExperts, MoEParams, NVFP4Tensor
from jax_nvfp4_moe.parallel.expert_mesh import (
    EXPERT,
    TENSOR,
    ExpertMesh,
    check_parts,
    replicate,
    stack_parts,
)
from jax_nvfp4_moe.parallel.streaming import join_pieces, on_shards, piece_size

# How one array of an expert layer is cut along `tensor`: rows in each half, columns, not at all, or
# left to the first shard (zero in the others, so that it counts once in the sum).
Cut = Literal["rows", "columns", "whole", "first"]
_ALL = slice(None)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ShardedExperts:
    """The weights of one expert layer over the devices of a grid.

    Attributes:
      stacked: `MoEParams` or `DenseExperts` of one shard's sizes, each array with an axis more in
        front, ``[tensor, e, ...]``, cut along its first two.
      row_scale: float32 ``[num_experts]``, `gate_up_input_scale` of all experts, whole on every
        device, or None.
      num_experts, hidden, intermediate: static; sizes of the whole layer.
      expert_mesh: static.
    """

    stacked: MoEParams | DenseExperts
    row_scale: jax.Array | None
    num_experts: int = dataclasses.field(metadata={"static": True})
    hidden: int = dataclasses.field(metadata={"static": True})
    intermediate: int = dataclasses.field(metadata={"static": True})
    expert_mesh: ExpertMesh = dataclasses.field(metadata={"static": True})

    @property
    def local_experts(self) -> int:
        """Number of experts of one shard."""
        return self.num_experts // self.expert_mesh.expert

    @property
    def local_intermediate(self) -> int:
        """Width of one shard of an expert."""
        return self.intermediate // self.expert_mesh.tensor

    @property
    def nbytes(self) -> int:
        """Bytes that all arrays occupy on all devices together."""
        return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(self))


def shard_experts(
    params: MoEParams | DenseExperts,
    expert_mesh: ExpertMesh,
    *,
    layout: str | None = None,
    interleaved: bool = False,
) -> ShardedExperts:
    """Cut one expert layer for the devices of `expert_mesh`; a device gets only its own part.

    Args:
      params: the whole layer; its arrays may be numpy, JAX or deferred ones.
      expert_mesh: of the devices.
      layout: that each shard takes; canonical where None. `DenseExperts` have none.
      interleaved: whether gate and up rows alternate, as `swigluoai` has them.

    Raises:
      ValueError: the axes do not divide the experts or the blocks; lists the legal sizes.
    """
    check_experts(params, expert_mesh)
    if isinstance(params, MoEParams) and params.layout != CANONICAL:
        params = params.to_layout(CANONICAL)
    halves = 2 if params.gated and not interleaved else 1

    if any(isinstance(leaf, Tracer) for leaf in jax.tree.leaves(params)):
        stacked = _stack_traced(params, layout, halves, expert_mesh)
    else:
        stacked = _read_pieces(params, layout, halves, expert_mesh)
    row_scale = replicate(params.gate_up_input_scale, expert_mesh)
    sizes = params.num_experts, params.hidden, params.intermediate
    return ShardedExperts(stacked, row_scale, *sizes, expert_mesh)


def check_experts(params: MoEParams | DenseExperts, expert_mesh: ExpertMesh) -> None:
    """Check that `expert_mesh` divides the experts and the intermediate dimension by blocks.

    Raises:
      ValueError: it does not; lists the legal sizes.
    """
    check_parts(EXPERT, expert_mesh.expert, "num_experts", params.num_experts)
    block = BLOCK if isinstance(params, MoEParams) else 1
    check_parts(TENSOR, expert_mesh.tensor, "intermediate", params.intermediate, block)


def _map_arrays(params, cut: Callable[[Any, Cut], Any]):
    """Return `params` with each array, or None, replaced by ``cut(array, how)``."""

    def matrices(weight, how: Cut):
        if isinstance(weight, NVFP4Tensor):
            return dataclasses.replace(
                weight,
                packed=cut(weight.packed, how),
                block_scale=cut(weight.block_scale, how),
                global_scale=cut(weight.global_scale, "whole"),
                global_divisor=cut(weight.global_divisor, "whole"),
            )
        if isinstance(weight, FP8Tensor):
            scale = cut(weight.scale, "rows" if how == "rows" else "whole")
            return dataclasses.replace(weight, values=cut(weight.values, how), scale=scale)
        return cut(weight, how)

    return dataclasses.replace(
        params,
        gate_up=matrices(params.gate_up, "rows"),
        down=matrices(params.down, "columns"),
        gate_up_bias=cut(params.gate_up_bias, "rows"),
        down_bias=cut(params.down_bias, "first"),
        gate_up_input_scale=cut(params.gate_up_input_scale, "whole"),
        down_input_scale=cut(params.down_input_scale, "whole"),
    )


def _stack_traced(params, layout, halves: int, expert_mesh: ExpertMesh):
    """Return the parts of all shards, traced, in `layout`."""

    def stack(leaf, how: Cut):
        if leaf is None:
            return None
        return jnp.stack(
            [_part(leaf, how, halves, t, expert_mesh.tensor) for t in range(expert_mesh.tensor)]
        )

    stacked = _map_arrays(params, stack)
    if layout is None:
        return stacked
    return on_shards(lambda own: own.to_layout(layout), expert_mesh)(stacked)


def _read_pieces(params, layout, halves: int, expert_mesh: ExpertMesh):
    """Return the parts of all shards in `layout`; each process reads its own, piece by piece."""
    params = jax.tree.map(lambda x: np.asarray(x) if isinstance(x, jax.Array) else x, params)
    count = params.num_experts // expert_mesh.expert
    step = piece_size(params, count, expert_mesh.target, expert_mesh.tensor)

    def read(first):
        def stack(leaf, how: Cut):
            if leaf is None:
                return None
            shape = [expert_mesh.tensor, expert_mesh.expert * step, *leaf.shape[1:]]
            if how in ("rows", "columns"):
                shape[2 if how == "rows" else -1] //= expert_mesh.tensor

            def part(index):
                start = (index[1].start or 0) // step * count + first
                experts = slice(start, start + step)
                return _part(leaf, how, halves, index[0].start or 0, expert_mesh.tensor, experts)[
                    None
                ]

            return stack_parts(shape, expert_mesh.sharding(TENSOR, EXPERT), part)

        return _map_arrays(params, stack)

    return join_pieces(read, count, step, layout, expert_mesh)


def _part(leaf, how: Cut, halves: int, t: int, parts: int, experts: slice = _ALL):
    """Return part `t` of `parts` of the chosen experts of one array ``[e, ...]``."""
    if how == "rows" and parts > 1:
        half = leaf.shape[1] // halves
        width = half // parts
        starts = [first * half + t * width for first in range(halves)]
        rows = [leaf[experts, start : start + width] for start in starts]
        if isinstance(leaf, jax.Array):
            return jnp.concatenate(rows, axis=1)
        shape = [len(rows[0]), halves * width, *rows[0].shape[2:]]
        return np.concatenate(rows, axis=1, out=aligned_empty(tuple(shape), rows[0].dtype))
    if how == "columns":
        width = leaf.shape[-1] // parts
        return leaf[experts, :, t * width : (t + 1) * width]
    whole = leaf[experts]
    return whole * 0 if how == "first" and t else whole


def _squeeze(tree):
    return jax.tree.map(lambda leaf: leaf[0], tree)


def run_sharded(
    run: Callable,
    x: Float[Array, "t h"],
    experts: ShardedExperts,
    expert_ids: Int[Array, "t k"],
    expert_weights: Float[Array, "t k"],
) -> Float[Array, "t h"]:
    """Run each shard on all tokens and add up: ``psum(run(x, own, expert_ids - first, weights))``.

    Args:
      run: ``(x, params, expert_ids, expert_weights) -> [t, h]``; skips ids that are out of range.
      x: tokens; over Explicit axes gathered where they are cut, and the result is cut as they are.
      experts: the weights.
      expert_ids: of the whole layer.
      expert_weights: of the same shape.
    """
    expert_mesh = experts.expert_mesh

    def body(x, stacked, ids, weights):
        first = lax.axis_index(EXPERT) * experts.local_experts if EXPERT in expert_mesh.axes else 0
        y = run(x, own_part(stacked, expert_mesh), ids.astype(jnp.int32) - first, weights)
        return lax.psum(y.astype(jnp.float32), expert_mesh.axes).astype(y.dtype)

    whole = expert_mesh.spec()
    specs = whole, expert_mesh.spec(TENSOR, EXPERT), whole, whole
    rows = (expert_mesh.reshard(leaf) for leaf in (x, expert_ids, expert_weights))
    given, ids, weights = rows
    y = expert_mesh.shard_map(body, specs, whole)(given, experts.stacked, ids, weights)
    return expert_mesh.reshard(y, jax.typeof(x).sharding.spec[0])


def own_part(
    stacked: MoEParams | DenseExperts, expert_mesh: ExpertMesh
) -> MoEParams | DenseExperts:
    """Return the weights of the shard that this runs in."""
    own = _squeeze(stacked)
    if expert_mesh.tensor == 1 or own.down_bias is None:
        return own
    return dataclasses.replace(own, down_bias=_count_once(own.down_bias))


@jax.custom_vjp
def _count_once(bias):
    """Return a bias that all shards along `tensor` but the first have as zeros, which stay zeros.

    The gradient of each would be that of the sum of all: steps would count it once for each shard.
    """
    return bias


def _mask_bar(_, bar):
    return (jnp.where(lax.axis_index(TENSOR) == 0, bar, jnp.zeros_like(bar)),)


_count_once.defvjp(lambda bias: (bias, None), _mask_bar)
