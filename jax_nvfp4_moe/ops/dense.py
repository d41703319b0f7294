"""GEMMs with matrices that are not NVFP4, with float32 sums: XLA's dot, or ours for few rows."""

import functools
import math

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from jax_nvfp4_moe.backends import _ffi
from jax_nvfp4_moe.backends.cpu import DENSE_CPU
from jax_nvfp4_moe.numerics.fp8 import FP8Tensor, dynamic_scale, round_fp8
from jax_nvfp4_moe.scheme import FP8ActivationScaling

# Rows up to which our CPU kernel is faster than XLA's dot.
_FEW_ROWS = 8


def precision_for(dtype) -> lax.Precision:
    """Return the precision of dense GEMMs: highest for float32, else the default of the device."""
    return lax.Precision.HIGHEST if jnp.dtype(dtype) == jnp.float32 else lax.Precision.DEFAULT


def dense(x: Float[Array, "... k"], weight: Float[Array, "n k"]) -> Float[Array, "... n"]:
    """Compute ``x @ weight.T`` with float32 sums.

    Args:
      x: ``[..., k]`` of any float dtype.
      weight: ``[n, k]`` of the dtype of `x`.

    Returns:
      float32 ``[..., n]``.
    """
    rows = math.prod(x.shape[:-1])
    if not (isinstance(rows, int) and 0 < rows <= _FEW_ROWS):
        return _multiply(x, weight)
    return _multiply_few(x, weight)


@jax.custom_jvp
def _multiply_few(x, weight):
    """Compute ``x @ weight.T`` for at most `_FEW_ROWS` rows."""
    forms = {}
    compiled = _ffi.why_unavailable(DENSE_CPU.can.extension) is None
    if compiled and x.dtype == weight.dtype == jnp.bfloat16:
        forms["cpu"] = DENSE_CPU.lower["dense"]
    if math.prod(x.shape[:-1]) == 1:
        forms["cuda"] = _reduce
    return lax.platform_dependent(x, weight, **forms, default=_multiply)


@_multiply_few.defjvp
def _differentiate_few(primals, tangents):
    """Differentiate XLA's dot, because a custom call has no derivative."""
    (x, weight), (dx, dweight) = primals, tangents
    return _multiply_few(x, weight), _multiply(dx, weight) + _multiply(x, dweight)


def _multiply(x, weight):
    """Compute ``x @ weight.T`` as one XLA dot with float32 sums."""
    contract = (((x.ndim - 1,), (1,)), ((), ()))
    return lax.dot_general(
        x,
        weight,
        contract,
        precision=precision_for(weight.dtype),
        preferred_element_type=jnp.float32,
    )


def _reduce(x, weight):
    """Multiply one row by a sum of elementwise products.

    XLA's GEMMs with a single row read weights at a third of a GPU's bandwidth.
    """
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
    """Compute ``x @ dequantize(weight).T`` in float32; `x` may be rounded to E4M3 first.

    The result is ``y = (e4m3(x / s) @ values.T) * (s * scale)``. E4M3 values are exact in the dtype
    of `x`, so the operands of the GEMM are exact on every device.

    Args:
      x: ``[..., k]``, bfloat16, float16 or float32.
      weight: `FP8Tensor` ``[n, k]``.
      activations: how `x` is rounded; by default it is not rounded.
      input_scale: s, a float32 scalar. It is required for `FP8ActivationScaling.STATIC` and
        otherwise not used.
      multiply_by_reciprocal: how `x` is rounded, see `numerics.fp8.round_fp8`; False by default.

    Returns:
      float32 ``[..., n]``.
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
    """Return the rounded value with the derivative of ``x / scale``.

    JAX's derivative of the cast would round the tangent to E4M3 too.
    """
    x, scale = primals
    tangent = tangents[0].astype(jnp.float32) / scale
    return _round(x, scale, multiply_by_reciprocal), tangent.astype(x.dtype)
