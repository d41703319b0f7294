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
from jax_nvfp4_moe.ops.experts.meaning import find_groups

_BLOCK = 64  # the most rows of one expert that are multiplied at once


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


class SortedSlots(NamedTuple):
    """The slots of a call, sorted by their expert. Slot ``t * k + j`` is token t's j-th expert.

    Attributes:
      order: int32 ``[m]``, the slots in the order of their experts. Slots without one come last.
      back: int32 ``[m]``, the place of each slot in that order.
      experts: int32 ``[m]``, the expert of each sorted slot; the number of experts for none.
      sizes: int32 ``[e]``, the number of slots of each expert.
    """

    order: jax.Array
    back: jax.Array
    experts: jax.Array
    sizes: jax.Array


def sort_by_expert(expert_ids: Int[Array, "t k"], num_experts: int) -> SortedSlots:
    """Sort slots by their expert. Ids that are out of range stand for no expert."""
    flat = expert_ids.reshape(-1)
    flat = jnp.where((flat >= 0) & (flat < num_experts), flat, num_experts).astype(jnp.int32)
    order = jnp.argsort(flat, stable=True).astype(jnp.int32)
    back = jnp.argsort(order).astype(jnp.int32)
    sizes = jnp.zeros(num_experts, jnp.int32).at[flat].add(1, mode="drop")
    return SortedSlots(order, back, flat[order], sizes)


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


def grouped_low_rank(
    rows: Float[Array, "m k"], pair: LowRank, slots: SortedSlots
) -> Float[Array, "m n"]:
    """Return ``scale * (row @ a[e].T) @ b[e].T`` for sorted rows, in float32.

    The rows of each expert are divided into blocks, and the last one is padded. All blocks are
    multiplied by the matrices of their experts in one batched product. The work is therefore
    proportional to the number of rows and not to the number of experts.

    Args:
      rows: rows in the order of `slots`.
      pair: the matrices of all experts.
      slots: the experts of the rows. Rows without an expert give zeros.
    """
    m, e = rows.shape[0], slots.sizes.shape[0]
    size = max(1, min(m // max(e, 1), _BLOCK))
    count = (m + (size - 1) * min(e, m)) // size  # an expert may fill its last block with one row
    if not m or not e:
        return jnp.zeros((m, pair.b.shape[1]), jnp.float32)
    ends = jnp.cumsum(slots.sizes)
    last_blocks = jnp.cumsum(-(-slots.sizes // size))
    starts, first_blocks = ends - slots.sizes, last_blocks - -(-slots.sizes // size)
    block = jnp.arange(count, dtype=jnp.int32)
    owner = jnp.minimum(find_groups(last_blocks, count), e - 1)
    first = starts[owner] + (block - first_blocks[owner]) * size
    taken = first[:, None] + jnp.arange(size, dtype=jnp.int32)[None]
    taken = jnp.where(taken < ends[owner][:, None], taken, m).reshape(-1)
    expert = jnp.minimum(slots.experts, e - 1)
    within = jnp.arange(m, dtype=jnp.int32) - starts[expert]
    place = (first_blocks[expert] + within // size) * size + within % size
    place = jnp.where(slots.experts < e, place, count * size)
    blocks = _move(rows, taken, place).reshape(count, size, -1)
    # In 16 bits, a backward pass would round the sum of an expert's blocks after each addition.
    first, second = (matrix.astype(jnp.float32)[owner] for matrix in (pair.a, pair.b))
    inner = _multiply_each(blocks, first).astype(rows.dtype)
    y = pair.scale * _multiply_each(inner, second)
    return _move(y.reshape(count * size, -1), place, taken)


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
    multiply: Callable[[Array, Any, Any, SortedSlots], Array],
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
      multiply: ``(sorted rows, weight, input scales, slots) -> [m, n]``, the frozen GEMM.
      call: the activation.
      weight_on_input: whether the weight of an expert multiplies its input; False by default.

    Returns:
      ``[t, h]`` in the dtype of `x`.
    """
    (t, _), top_k, experts = x.shape, expert_ids.shape[1], adapted.experts
    if not expert_ids.size:
        return jnp.zeros_like(x)
    slots = sort_by_expert(expert_ids, adapted.num_experts)
    weights = _move(expert_weights.reshape(-1).astype(jnp.float32), slots.order, slots.back)
    weights = weights[:, None]
    rows = _move(x, slots.order, slots.back, top_k)
    if weight_on_input:
        rows = (rows.astype(jnp.float32) * weights).astype(x.dtype)
        weights = jnp.ones_like(weights)

    def product(rows, name, pair):
        scale, bias = (getattr(experts, f"{name}_{part}") for part in ("input_scale", "bias"))
        weight = getattr(experts, name)
        if pair is not None and pair.rounded:
            weight = lax.stop_gradient(add_to_each(weight, lax.stop_gradient(pair)))
        y = multiply(rows, weight, scale, slots).astype(jnp.float32)
        if bias is not None:
            y += jnp.take(bias, slots.experts, axis=0, mode="clip").astype(jnp.float32)
        if pair is None:
            return y
        beside = functools.partial(grouped_low_rank, pair=pair, slots=slots)
        return y + (only_gradient(beside, rows) if pair.rounded else beside(rows))

    inner = activate(call, product(rows, "gate_up", adapted.gate_up)).astype(x.dtype)
    y = product(inner, "down", adapted.down) * weights
    y = jnp.where((slots.experts < adapted.num_experts)[:, None], y, 0)
    y = _move(y, slots.back, slots.order)
    return y.reshape(t, top_k, -1).sum(axis=1).astype(x.dtype)
