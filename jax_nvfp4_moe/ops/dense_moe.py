"""`dense_moe`: an expert layer that is not NVFP4, computed expert by expert."""

import dataclasses

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jax_nvfp4_moe.numerics.activations import ActivationCall, activate, find_activation
from jax_nvfp4_moe.numerics.fp8 import FP8Tensor
from jax_nvfp4_moe.numerics.routing import narrow_ids
from jax_nvfp4_moe.numerics.tensor import DenseExperts
from jax_nvfp4_moe.ops.dense import dense, dense_fp8
from jax_nvfp4_moe.ops.experts.meaning import combine_experts
from jax_nvfp4_moe.ops.gradient import (
    BIASES,
    ExpertLayer,
    in_float32,
    take_expert,
    with_expert_gradient,
)
from jax_nvfp4_moe.ops.moe import check_call
from jax_nvfp4_moe.scheme import FP8ActivationScaling


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
    bounded. Gradients flow to `x`, `expert_weights` and biases; the matrices are frozen.

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
    run = with_expert_gradient(forward, layer)
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
