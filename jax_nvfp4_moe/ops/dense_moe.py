"""`dense_moe`: an expert layer that is not NVFP4, computed expert by expert."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from jax_nvfp4_moe.numerics.activations import ActivationCall, activate, find_activation
from jax_nvfp4_moe.numerics.fp8 import FP8Tensor
from jax_nvfp4_moe.numerics.routing import narrow_ids
from jax_nvfp4_moe.numerics.tensor import DenseExperts
from jax_nvfp4_moe.ops.chosen_keys import multiply
from jax_nvfp4_moe.ops.dense import dense, dense_fp8
from jax_nvfp4_moe.ops.experts.meaning import combine_experts
from jax_nvfp4_moe.ops.gradient import (
    BIASES,
    ExpertLayer,
    in_float32,
    take_expert,
    visit_experts,
    with_expert_gradient,
)
from jax_nvfp4_moe.ops.moe import check_call
from jax_nvfp4_moe.scheme import FP8ActivationScaling

# Up to so many slots, that is tokens times experts of each, the chosen experts are gathered, so
# many at a time. A gathered expert is written and read once more, in memory of its own.
_FEW_SLOTS, _AT_ONCE = 64, 8


def dense_moe(
    x: Float[Array, "t h"],
    experts: DenseExperts,
    expert_ids: Int[Array, "t k"],
    expert_weights: Float[Array, "t k"],
    *,
    activations: FP8ActivationScaling = FP8ActivationScaling.WEIGHTS,
    activation: str | ActivationCall = "silu",
    alpha: float | None = None,
    beta: float | None = None,
    limit: float | None = None,
    weight_on_input: bool = False,
) -> Float[Array, "t h"]:
    """Run each token through its experts and add up their weighted outputs.

    This is the function of `ops.moe_mlp` for matrices in a float dtype or in FP8. It uses plain XLA
    and is slow. Mixed checkpoints keep a layer or two in BF16 or FP8, and this op lets them run.
    Only one expert is converted at a time, and its tokens go through in chunks, so memory stays
    bounded. If few tokens choose fewer experts than there are, the chosen experts are gathered,
    eight at a time, and the others are not read. Gradients flow to `x`, `expert_weights` and
    biases; the matrices are frozen.

    Args:
      x: tokens ``[t, h]``, bfloat16, float16 or float32.
      experts: the `DenseExperts` of the layer.
      expert_ids: integers ``[t, k]``. An id that is -1 or out of range contributes nothing.
      expert_weights: ``[t, k]`` of any float dtype, taken as float32.
      activations: how the inputs of GEMMs with FP8 matrices are rounded; by default they are not.
      activation, alpha, beta, limit, weight_on_input: as in `ops.moe_mlp`.

    Returns:
      ``[t, h]`` in the dtype of `x`.

    Raises:
      ValueError: if shapes or dtypes disagree, or the activation is unknown.
    """
    call = find_activation(activation, alpha, beta, limit)
    check_call(x, experts, expert_ids, expert_weights, call)

    run_rows = _RunRows(call, activations, experts.multiply_by_reciprocal, x.dtype)

    def forward(x, experts, expert_ids, expert_weights):
        if expert_ids.size <= min(_FEW_SLOTS, experts.num_experts - 1) and not run_rows.rounds:
            return _run_slots(call, x, experts, expert_ids, expert_weights, weight_on_input)
        biases = {name: getattr(experts, name) for name in BIASES}

        def run_expert(expert, rows):
            return run_rows(take_expert(experts, expert), take_expert(biases, expert), rows)

        return combine_experts(
            x,
            experts.num_experts,
            expert_ids,
            expert_weights,
            run_expert,
            weight_on_input=weight_on_input,
        )

    layer = ExpertLayer(experts.num_experts, take_expert, run_rows, weight_on_input)
    run = with_expert_gradient(forward, functools.partial(visit_experts, layer))
    ids, weights = narrow_ids(expert_ids), expert_weights.astype(jnp.float32)
    return run(x, in_float32(experts), ids, weights)


@dataclasses.dataclass(frozen=True)
class _RunRows:
    """Run rows of one expert through both GEMMs; see `ExpertLayer`.

    Attributes:
      call: the activation.
      activations: how the inputs of GEMMs with FP8 matrices are rounded.
      multiply_by_reciprocal: how these are divided by their scale.
      dtype: dtype of the tokens.
    """

    call: ActivationCall
    activations: FP8ActivationScaling
    multiply_by_reciprocal: bool
    dtype: jnp.dtype

    @property
    def rounds(self) -> bool:
        """Whether the inputs of GEMMs are rounded."""
        return self.activations is not FP8ActivationScaling.WEIGHTS

    def __call__(self, one, biases, rows):
        """Return float32 ``[m, h]`` for rows ``[m, h]``."""
        first = one.gate_up, one.gate_up_input_scale, biases["gate_up_bias"]
        inner = activate(self.call, self._multiply(rows, *first))
        return self._multiply(inner, one.down, one.down_input_scale, biases["down_bias"])

    def _multiply(self, rows, weight, input_scale, bias):
        """Round rows if the weight is in FP8 and rounding is wanted, multiply, and add the bias."""
        rows = rows.astype(self.dtype)
        if isinstance(weight, FP8Tensor):
            how = {
                "input_scale": input_scale,
                "multiply_by_reciprocal": self.multiply_by_reciprocal,
            }
            y = dense_fp8(rows, weight, activations=self.activations, **how)
        else:
            y = dense(rows, weight.astype(self.dtype))
        return y if bias is None else y + bias[None]


def _run_slots(call, x, experts, expert_ids, expert_weights, weight_on_input):
    """Return the result of the layer, with the experts of each slot gathered."""
    (t, h), top_k = x.shape, expert_ids.shape[1]
    if t * top_k == 0:
        return jnp.zeros((t, h), x.dtype)
    x, experts = jax.tree.map(jnp.asarray, (x, experts))
    ids, weights = expert_ids.reshape(-1), expert_weights.reshape(-1)
    known = (ids >= 0) & (ids < experts.num_experts)
    rows = jnp.repeat(x, top_k, axis=0)
    if weight_on_input:
        rows = (rows.astype(jnp.float32) * weights[:, None]).astype(x.dtype)
        weights = jnp.ones_like(weights)

    def run(group):
        own, rows = group
        chosen = take_expert(experts, own)
        inner = activate(call, _multiply_each(rows, chosen.gate_up, chosen.gate_up_bias))
        return _multiply_each(inner.astype(x.dtype), chosen.down, chosen.down_bias)

    at_once = min(len(ids), _AT_ONCE)
    behind = -len(ids) % at_once
    own = jnp.pad(jnp.where(known, ids, 0), (0, behind)).reshape(-1, at_once)
    y = lax.map(run, (own, jnp.pad(rows, [(0, behind), (0, 0)]).reshape(-1, at_once, h)))
    y = y.reshape(-1, h)[: len(ids)] * weights[:, None]
    return jnp.where(known[:, None], y, 0).reshape(t, top_k, h).sum(axis=1).astype(x.dtype)


def _multiply_each(rows, weights, bias):
    """Return the product ``[g, n]`` of each row of ``[g, k]`` with a matrix of its own."""
    if isinstance(weights, FP8Tensor):
        weights = weights.dequantize(rows.dtype)
    y = multiply(rows[:, None], weights.astype(rows.dtype), contracted=(2, 2))[:, 0]
    return y if bias is None else y + bias
