"""Products with matrices that are not NVFP4: plain XLA dots, float32 sums."""

import functools
import math

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from jax_nvfp4_moe.numerics.fp8 import FP8Tensor, dynamic_scale, round_fp8
from jax_nvfp4_moe.scheme import FP8ActivationScaling


def precision_for(dtype) -> lax.Precision:
    """Return the precision of dense products: full in float32, the device's default below."""
    return lax.Precision.HIGHEST if jnp.dtype(dtype) == jnp.float32 else lax.Precision.DEFAULT


def dense(x: Float[Array, "... k"], weight: Float[Array, "n k"]) -> Float[Array, "... n"]:
    """Return ``x @ weight.T`` of one dtype, summed and returned in float32."""
    if math.prod(x.shape[:-1]) == 1:
        return lax.platform_dependent(x, weight, cuda=_reduce, default=_multiply)
    return _multiply(x, weight)


def _multiply(x, weight):
    contract = (((x.ndim - 1,), (1,)), ((), ()))
    return lax.dot_general(
        x,
        weight,
        contract,
        precision=precision_for(weight.dtype),
        preferred_element_type=jnp.float32,
    )


def _reduce(x, weight):
    """Multiply one row: XLA's matrix products read weights at a third of a GPU's bandwidth."""
    products = x.reshape(1, -1).astype(jnp.float32) * weight.astype(jnp.float32)
    return jnp.sum(products, axis=-1).reshape(*x.shape[:-1], -1)


def dense_fp8(
    x: Float[Array, "... k"],
    weight: FP8Tensor,
    *,
    activations: FP8ActivationScaling = FP8ActivationScaling.WEIGHTS,
    input_scale=None,
    multiply_by_reciprocal: bool = False,
) -> Float[Array, "... n"]:
    """Return ``x @ dequantize(weight).T`` in float32, `x` rounded to E4M3 first as asked.

    ``y = (e4m3(x / s) @ values.T) * (s * scale)``: E4M3 values are exact in the dtype of `x`, so
    that the operands of the product are, whatever the device multiplies.

    Args:
      x: bfloat16, float16 or float32.
      weight: ``[n, k]``.
      activations: how `x` is rounded.
      input_scale: s of `FP8ActivationScaling.STATIC`, float32 scalar.
      multiply_by_reciprocal: see `numerics.fp8.round_fp8`.
    """
    values = weight.values.astype(x.dtype)
    scale = weight.scale.astype(jnp.float32)
    if activations is FP8ActivationScaling.WEIGHTS:
        return dense(x, values) * jnp.expand_dims(scale, range(x.ndim - 1))
    if activations is FP8ActivationScaling.STATIC:
        own = jnp.asarray(input_scale, jnp.float32)
    else:
        own = dynamic_scale(
            x, -1 if activations is FP8ActivationScaling.TOKEN else tuple(range(x.ndim))
        )
    own = lax.stop_gradient(own)
    return (
        dense(_round(x, own, multiply_by_reciprocal), values)
        * own
        * jnp.expand_dims(scale, range(x.ndim - 1))
    )


@functools.partial(jax.custom_jvp, nondiff_argnums=(2,))
def _round(x, scale, multiply_by_reciprocal):
    """Return ``x / scale`` rounded to E4M3, in the dtype of `x`."""
    return round_fp8(x, scale, multiply_by_reciprocal=multiply_by_reciprocal).astype(x.dtype)


@_round.defjvp
def _round_straight_through(multiply_by_reciprocal, primals, tangents):
    """Take the derivative of ``x / scale``; that of a cast would be rounded to E4M3 as well."""
    x, scale = primals
    tangent = tangents[0].astype(jnp.float32) / scale
    return _round(x, scale, multiply_by_reciprocal), tangent.astype(x.dtype)
