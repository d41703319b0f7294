"""dense_moe: an expert layer that is not NVFP4, one expert at a time."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jax_nvfp4_moe.activations import activate, find_activation
from jax_nvfp4_moe.backends.reference import combine_experts
from jax_nvfp4_moe.float8 import FP8Tensor
from jax_nvfp4_moe.ops.dense import dense, dense_fp8
from jax_nvfp4_moe.ops.moe import check_call
from jax_nvfp4_moe.scheme import Float8
from jax_nvfp4_moe.tensor import DenseExperts


def dense_moe(
    x: Float[Array, "t h"],
    experts: DenseExperts,
    expert_ids: Int[Array, "t k"],
    expert_weights: Float[Array, "t k"],
    *,
    activations: Float8 = Float8.WEIGHTS,
    activation: str = "silu",
    alpha: float | None = None,
    beta: float | None = None,
    limit: float | None = None,
    weight_on_input: bool = False,
) -> Float[Array, "t h"]:
    """Run each token through its experts and add up their weighted outputs.

    The meaning of `ops.moe_mlp` with matrices in a float dtype or in FP8. Memory stays bounded: one
    expert is converted at once, and its tokens go through in pieces. No kernel: mixed checkpoints
    keep a layer or two in BF16 or FP8, and those run, slowly, rather than be refused.

    Args:
      x: tokens ``[t, h]``, bfloat16, float16 or float32.
      experts: of the layer.
      expert_ids: an id of -1 or out of range contributes nothing.
      expert_weights: of the same shape, taken as float32.
      activations: how the inputs of products with FP8 matrices are rounded.
      activation, alpha, beta, limit, weight_on_input: as for `ops.moe_mlp`.

    Returns:
      ``[t, h]`` in the dtype of `x`.

    Raises:
      ValueError: shapes or dtypes disagree, or the activation is unknown.
    """
    call = find_activation(activation, alpha, beta, limit)
    check_call(x, experts, expert_ids, expert_weights, call)

    def product(rows, weight, bias, input_scale, expert):
        one = jax.tree.map(lambda leaf: leaf[expert], weight)
        rows = rows.astype(x.dtype)
        if isinstance(one, FP8Tensor):
            scale = None if input_scale is None else input_scale[expert]
            y = dense_fp8(
                rows,
                one,
                activations=activations,
                input_scale=scale,
                by_factor=experts.by_factor,
            )
        else:
            y = dense(rows, one.astype(x.dtype))
        return y if bias is None else y + bias[expert][None].astype(jnp.float32)

    def run_rows(expert, rows):
        first = experts.gate_up, experts.gate_up_bias, experts.gate_up_input_scale
        inner = activate(call, product(rows, *first, expert))
        second = experts.down, experts.down_bias, experts.down_input_scale
        return product(inner, *second, expert)

    return combine_experts(
        x,
        experts.num_experts,
        expert_ids.astype(jnp.int32),
        expert_weights.astype(jnp.float32),
        run_rows,
        weight_on_input=weight_on_input,
    )
