"""Low-rank products beside frozen weights: ``y + scale * (x @ A.T) @ B.T``, also one per expert.

`nn.linear.lora` and `nn.experts.expert_lora` hold the matrices. All functions are plain XLA, so
that gradients flow to rows and matrices.

Source: Hu, Shen, Wallis, Allen-Zhu, Li, Wang, Wang, Chen, "LoRA: Low-Rank Adaptation of Large
Language Models", arXiv:2106.09685, 2021.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from jax_nvfp4_moe.numerics.activations import ActivationCall, activate
from jax_nvfp4_moe.numerics.changed_weights import add_rounded
from jax_nvfp4_moe.numerics.layouts import CANONICAL
from jax_nvfp4_moe.numerics.tensor import NVFP4Tensor
from jax_nvfp4_moe.numerics.varying import vary_together
from jax_nvfp4_moe.ops.dense import precision_for
from jax_nvfp4_moe.ops.experts.meaning import find_groups, sort_slots

# The most slots of a block. A block has at most a quarter of the mean number of an expert's slots,
# because the places without a slot go through the frozen GEMMs too.
_BLOCK = 32


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LowRank:
    """Two matrices whose product changes a frozen weight by ``scale * b @ a``.

    Attributes:
      a: array ``[r, k]``, or ``[e, r, k]`` for e experts.
      b: array ``[n, r]``, or ``[e, n, r]``.
      scale: factor of the product. Static.
      rounded: whether the sum of the weight and the product is rounded to the format of the weight,
        as merging does; False by default. Static.
    """

    a: Any
    b: Any
    scale: float = dataclasses.field(metadata={"static": True})
    rounded: bool = dataclasses.field(default=False, metadata={"static": True})


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class AdaptedExperts:
    """The experts of one layer, and the low-rank products beside their matrices.

    Attributes:
      experts: the frozen weights, `MoEParams` or `DenseExperts`.
      gate_up: `LowRank` beside ``experts.gate_up``, or None.
      down: `LowRank` beside ``experts.down``, or None.
    """

    experts: Any
    gate_up: LowRank | None
    down: LowRank | None

    @property
    def num_experts(self) -> int:
        """Number of experts."""
        return self.experts.num_experts

    @property
    def gate_up_input_scale(self) -> Any:
        """The input scales of the first GEMM, by which dispatch rounds rows; may be None."""
        return self.experts.gate_up_input_scale


def low_rank(x: Float[Array, "... k"], pair: LowRank) -> Float[Array, "... n"]:
    """Return ``scale * (x @ a.T) @ b.T`` in float32. Operands of products have the dtype of `x`."""
    return pair.scale * _multiply(_multiply(x, pair.a).astype(x.dtype), pair.b)


def product_of(pair: LowRank) -> Float[Array, "... n k"]:
    """Return ``scale * b @ a`` in float32, the change of a weight ``[..., n, k]``."""
    a, b = pair.a.astype(jnp.float32), pair.b.astype(jnp.float32)
    product = jnp.matmul(b, a, precision=lax.Precision.HIGHEST)
    # As in `add_rounded`: the change must not depend on the program that contains it.
    return pair.scale * lax.optimization_barrier(product)


def add_to_each(weight: Any, pair: LowRank) -> Any:
    """Return the weights of all experts with the low-rank products added, in the same format.

    One expert at a time is dequantized.

    Args:
      weight: `NVFP4Tensor` in any layout, `FP8Tensor` or a float array, ``[e, n, k]``.
      pair: the matrices of all experts.
    """
    layout = weight.layout if isinstance(weight, NVFP4Tensor) else None
    canonical = weight if layout is None else weight.to_layout(CANONICAL)

    def add(own):
        weight, a, b = own
        return add_rounded(weight, product_of(dataclasses.replace(pair, a=a, b=b)))

    made = lax.map(add, (canonical, pair.a, pair.b))
    return made if layout is None else made.to_layout(layout)


def only_gradient(product: Callable[[Array], Array], x: Float[Array, "... k"]):
    """Return zeros with the gradient that ``product(x)`` has to its matrices, and none to `x`.

    The sum of a rounded weight and a low-rank product takes the derivative of the rounding for the
    identity (straight-through). The matrices then have the gradients that they have if the product
    is added to the result of the layer. The gradient to `x` comes from the rounded weight.
    """
    y = product(lax.stop_gradient(x))
    return y - lax.stop_gradient(y)


def _multiply(x, matrix):
    """Return ``x @ matrix.T`` in float32, with operands in the dtype of `x`."""
    return lax.dot_general(
        x,
        matrix.astype(x.dtype),
        (((x.ndim - 1,), (1,)), ((), ())),
        precision=precision_for(x.dtype),
        preferred_element_type=jnp.float32,
    )


class ExpertBlocks(NamedTuple):
    """The slots of a call at places in blocks. Slot ``t * k + j`` is token t's j-th expert.

    All slots of a block have the same expert. The blocks are in the order of their experts, and the
    last block of an expert may have places without a slot.

    Attributes:
      slots: int32 ``[g * s]``, the slot at each place of g blocks; the number of slots for none.
      places: int32 ``[m]``, the place of each slot; ``g * s`` for a slot without an expert.
      owners: int32 ``[g]``, the expert of each block.
      sizes: int32 ``[e]``, the number of places of each expert.
    """

    slots: jax.Array
    places: jax.Array
    owners: jax.Array
    sizes: jax.Array

    @property
    def experts(self) -> jax.Array:
        """The expert of each place, int32 ``[g * s]``."""
        return jnp.repeat(self.owners, self.slots.shape[0] // max(self.owners.shape[0], 1))


def block_by_expert(expert_ids: Int[Array, "t k"], num_experts: int) -> ExpertBlocks:
    """Sort slots by their expert into blocks. Ids that are out of range stand for no expert.

    There are enough blocks for any ids, so that their number is static. With few slots for each
    expert, a block has one place.
    """
    m, e = expert_ids.size, num_experts
    size = max(1, min(m // (4 * e), _BLOCK))
    count = (m + (size - 1) * min(e, m)) // size  # an expert may fill its last block with one slot
    order, starts, ends = sort_slots(expert_ids, e)
    blocks = -(-(ends - starts) // size)
    last_blocks = jnp.cumsum(blocks, dtype=jnp.int32)
    owners = jnp.minimum(find_groups(last_blocks, count), e - 1)

    place, owner = jnp.arange(count * size, dtype=jnp.int32), jnp.repeat(owners, size)
    sorted_slot = starts[owner] + place - (last_blocks - blocks)[owner] * size
    slots = jnp.where(sorted_slot < ends[owner], order.at[sorted_slot].get(mode="clip"), m)
    # Places without a slot are written nowhere, and slots without a place keep what is there.
    places = jnp.full(m, count * size, jnp.int32).at[slots].set(place, mode="drop")
    return ExpertBlocks(slots, places, owners, blocks * size)


def _move(rows, there, back, copies=1) -> Array:
    """Return row ``there[j] // copies`` of `rows` for each j, or zeros if it is out of range.

    The derivative moves rows back, and adds up the copies of each row in float32. That of XLA's
    gather adds rows to zeros. XLA makes the zeros of all layers at once, before the first layer,
    and on GPUs it adds in any order.

    Args:
      rows: array ``[m, ...]``.
      there: int32 ``[n]``. No two elements within range are equal.
      back: int32 ``[m * copies]``, where each copy of a row goes: ``there[back[i]] == i``. Out of
        range if it goes nowhere.
      copies: number of copies of each row; 1 by default.
    """
    return _moved(copies, *vary_together((rows, there, back)))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _moved(copies, rows, there, back) -> Array:
    return jnp.asarray(rows).at[there // copies].get(mode="fill", fill_value=0)


def _moved_ahead(copies, rows, there, back):
    return _moved(copies, rows, there, back), (there, back)


def _moved_back(copies, kept, bar):
    there, back = kept
    rows_bar = _move(bar, back, there)
    if copies > 1:
        apart = rows_bar.reshape(-1, copies, *bar.shape[1:])
        rows_bar = apart.sum(axis=1, dtype=jnp.float32).astype(bar.dtype)
    return rows_bar, None, None


_moved.defvjp(_moved_ahead, _moved_back)


def _repeat(matrices, owners) -> Array:
    """Return ``matrices[owners]``, with a derivative that adds in the same order in every run.

    The derivative of XLA's gather adds in any order on GPUs. This one multiplies by zeros and ones,
    in float32. A gradient that is not finite therefore reaches all experts. `gradient.sum_groups`
    keeps it apart, but reads all blocks once for each expert, which large matrices make slow.

    Args:
      matrices: float32 ``[e, r, k]``.
      owners: int32 ``[g]``.
    """
    return _repeated(matrices.shape[0], *vary_together((matrices, owners)))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _repeated(e, matrices, owners) -> Array:
    return matrices[owners]


def _repeated_ahead(e, matrices, owners):
    return _repeated(e, matrices, owners), owners


def _repeated_back(e, owners, bar):
    own = (jnp.arange(e, dtype=owners.dtype)[:, None] == owners[None]).astype(bar.dtype)
    sums = jnp.matmul(own, bar.reshape(len(bar), -1), precision=lax.Precision.HIGHEST)
    return sums.reshape(e, *bar.shape[1:]), None


_repeated.defvjp(_repeated_ahead, _repeated_back)


def grouped_low_rank(
    rows: Float[Array, "p k"], pair: LowRank, blocks: ExpertBlocks
) -> Float[Array, "p n"]:
    """Return ``scale * (row @ a[e].T) @ b[e].T`` for rows in blocks, in the dtype of the rows.

    Sums are float32. All blocks are multiplied by the matrices of their experts in one batched
    product. The work is therefore proportional to the number of places and not to the number of
    experts.

    Args:
      rows: the row of each place of `blocks`.
      pair: the matrices of all experts.
      blocks: the experts of the rows.
    """
    (places, k), count = rows.shape, blocks.owners.shape[0]
    each = rows.reshape(count, places // max(count, 1), k)
    # In 16 bits, a backward pass would round the sum of an expert's blocks after each addition.
    first, second = (_repeat(x.astype(jnp.float32), blocks.owners) for x in (pair.a, pair.b))
    inner = _multiply_each(each, first).astype(rows.dtype)
    y = pair.scale * _multiply_each(inner, second)
    return y.astype(rows.dtype).reshape(places, second.shape[1])


def _multiply_each(blocks, matrices):
    """Return float32 ``[g, s, n]``, the product of blocks ``[g, s, k]`` and a matrix of each."""
    return lax.dot_general(
        blocks,
        matrices.astype(blocks.dtype),
        (((2,), (2,)), ((0,), (0,))),
        precision=precision_for(blocks.dtype),
        preferred_element_type=jnp.float32,
    )


def run_adapted_experts(
    x: Float[Array, "t h"],
    adapted: AdaptedExperts,
    expert_ids: Int[Array, "t k"],
    expert_weights: Float[Array, "t k"],
    *,
    multiply: Callable[[Array, Any, Any, ExpertBlocks], Array],
    call: ActivationCall,
    weight_on_input: bool = False,
) -> Float[Array, "t h"]:
    """Run each token through its experts, with a low-rank product beside each GEMM.

    With ``W1' = W1 + scale * b1 @ a1`` and ``W2' = W2 + scale * b2 @ a2``, this computes what
    `ops.moe_mlp` does for ``W1'`` and ``W2'``. No weight is changed: the products are added to the
    results of the two frozen GEMMs. The first addition comes before the activation, so the GEMMs
    run apart, and their results are rounded to the dtype of `x`. If a `LowRank` is `rounded`, its
    GEMM multiplies by ``round(W + scale * b @ a)`` instead; see `add_to_each`.

    Args:
      x: tokens ``[t, h]``.
      adapted: the frozen weights, and the low-rank products.
      expert_ids: integers ``[t, k]``. Ids that are out of range contribute nothing.
      expert_weights: ``[t, k]``.
      multiply: ``(rows in blocks, weight, input scales, blocks) -> [p, n]``, the frozen GEMM.
      call: the activation.
      weight_on_input: whether the weight of an expert multiplies its input; False by default.

    Returns:
      ``[t, h]`` in the dtype of `x`.
    """
    (t, _), top_k, experts = x.shape, expert_ids.shape[1], adapted.experts
    if not expert_ids.size:
        return jnp.zeros_like(x)
    blocks = block_by_expert(expert_ids, adapted.num_experts)
    weights = _move(expert_weights.reshape(-1).astype(jnp.float32), blocks.slots, blocks.places)
    weights = weights[:, None]
    rows = _move(x, blocks.slots, blocks.places, top_k)  # zeros at places without a slot
    if weight_on_input:
        rows = (rows.astype(jnp.float32) * weights).astype(x.dtype)
        weights = jnp.ones_like(weights)

    def product(rows, name, pair):
        scale, bias = (getattr(experts, f"{name}_{part}") for part in ("input_scale", "bias"))
        weight = getattr(experts, name)
        if pair is not None and pair.rounded:
            weight = lax.stop_gradient(add_to_each(weight, lax.stop_gradient(pair)))
        y = multiply(rows, weight, scale, blocks).astype(jnp.float32)
        if bias is not None:
            y += jnp.take(bias, blocks.experts, axis=0, mode="clip").astype(jnp.float32)
        if pair is None:
            return y
        beside = functools.partial(grouped_low_rank, pair=pair, blocks=blocks)
        change = only_gradient(beside, rows) if pair.rounded else beside(rows)
        return y + change.astype(jnp.float32)

    inner = activate(call, product(rows, "gate_up", adapted.gate_up)).astype(x.dtype)
    y = product(inner, "down", adapted.down) * weights
    y = _move(y, blocks.places, blocks.slots)  # without the places that have no slot
    return y.reshape(t, top_k, -1).sum(axis=1).astype(x.dtype)
