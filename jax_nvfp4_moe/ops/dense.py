"""GEMMs with matrices that are not NVFP4, with float32 sums: XLA's dot, or ours for few rows."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from jax_nvfp4_moe.backends import _ffi
from jax_nvfp4_moe.backends.cpu import DENSE_CPU
from jax_nvfp4_moe.backends.cuda import DENSE_CUDA, DENSE_FACTOR, DENSE_FEW_ROWS
from jax_nvfp4_moe.backends.resolution import unavailable_for
from jax_nvfp4_moe.numerics.fp8 import FP8Tensor, dynamic_scale, round_fp8
from jax_nvfp4_moe.scheme import FP8ActivationScaling, Problem, Target

# Rows up to which our CPU kernel is faster than XLA's dot.
_CPU_FEW_ROWS = 8
# Platform -> its kernel, the most rows, the number of which k is a multiple, and the dtypes of the
# operands.
_KERNELS = {
    "cpu": (DENSE_CPU, _CPU_FEW_ROWS, 1, {("bfloat16", "bfloat16")}),
    "cuda": (
        DENSE_CUDA,
        DENSE_FEW_ROWS,
        DENSE_FACTOR,
        {("bfloat16", "bfloat16"), ("float16", "float16"), ("bfloat16", "float32")},
    ),
}


def precision_for(dtype) -> lax.Precision:
    """Return the precision of dense GEMMs: highest for float32, else the default of the device."""
    return lax.Precision.HIGHEST if jnp.dtype(dtype) == jnp.float32 else lax.Precision.DEFAULT


def dense(
    x: Float[Array, "... k"],
    weight: Float[Array, "n k"],
    *,
    target: Target | None = None,
    dtype=jnp.float32,
) -> Float[Array, "... n"]:
    """Compute ``x @ weight.T`` with float32 sums.

    Few rows run on a kernel of this package, and other calls on XLA's dot.

    Args:
      x: ``[..., k]`` of any float dtype.
      weight: ``[n, k]`` of any float dtype. If the dtypes differ, both operands count as float32.
      target: the `Target` to lower for. None (default) lowers for any platform. Then few rows run
        on a kernel on the CPU only.
      dtype: dtype to which the sums are rounded; float32 by default.

    Returns:
      ``[..., n]`` in `dtype`.
    """
    rows, dtype = math.prod(x.shape[:-1]), jnp.dtype(dtype)
    if not (isinstance(rows, int) and rows > 0):
        return _multiply(x, weight, dtype)
    few = _multiply_anywhere if target is None else _find_kernel(x, weight, rows, target)
    if few is None or (target is None and rows > _CPU_FEW_ROWS):
        return _multiply(x, weight, dtype)
    return _multiply_as(few, dtype, x, weight)


def _find_kernel(x, weight, rows, target):
    """Return a function that is faster on `target` than XLA's dot, or None."""
    if target.platform not in _KERNELS:
        return None
    record, most_rows, factor, pairs = _KERNELS[target.platform]
    kinds = x.dtype.name, weight.dtype.name
    if target.platform == "cuda" and rows > most_rows and kinds == ("bfloat16", "float32"):
        return _multiply_in_parts
    n, k = weight.shape
    problem = Problem("dense", None, target, x.dtype.name, hidden=k, intermediate=n)
    problem = dataclasses.replace(problem, unavailable=unavailable_for(target))
    fits = rows <= most_rows and n > 0 and k > 0 and k % factor == 0
    known = fits and kinds in pairs
    if known and record.can.reason_against(problem) is None:
        return record.lower["dense"]
    return _reduce if rows == 1 and target.platform == "cuda" else None


@functools.partial(jax.custom_jvp, nondiff_argnums=(0, 1))
def _multiply_as(multiply, dtype, x, weight):
    """Compute ``x @ weight.T`` as `multiply` does."""
    return multiply(x, weight, dtype)


@_multiply_as.defjvp
def _differentiate(multiply, dtype, primals, tangents):
    """Differentiate XLA's dot: a custom call has no derivative, and rounding has another one."""
    (x, weight), (dx, dweight) = primals, tangents
    tangent = _multiply(dx, weight) + _multiply(x, dweight)
    return _multiply_as(multiply, dtype, x, weight), tangent.astype(dtype)


def _multiply_anywhere(x, weight, dtype):
    """Compute ``x @ weight.T`` for at most `_CPU_FEW_ROWS` rows on the platform of the program."""
    forms = {}
    compiled = _ffi.why_unavailable(DENSE_CPU.can.extension) is None
    if compiled and x.dtype == weight.dtype == jnp.bfloat16:
        forms["cpu"] = DENSE_CPU.lower["dense"]
    if math.prod(x.shape[:-1]) == 1:
        forms["cuda"] = _reduce
    forms["default"] = _multiply
    forms = {name: functools.partial(form, dtype=dtype) for name, form in forms.items()}
    return lax.platform_dependent(x, weight, **forms)


def _multiply(x, weight, dtype=jnp.float32):
    """Compute ``x @ weight.T`` as one XLA dot with float32 sums."""
    if x.dtype != weight.dtype:
        x, weight = x.astype(jnp.float32), weight.astype(jnp.float32)
    contract = (((x.ndim - 1,), (1,)), ((), ()))
    sums = lax.dot_general(
        x,
        weight,
        contract,
        precision=precision_for(weight.dtype),
        preferred_element_type=jnp.float32,
    )
    return sums.astype(dtype)


def _reduce(x, weight, dtype):
    """Multiply one row by a sum of elementwise products.

    XLA's GEMMs with a single row read weights at a third of a GPU's bandwidth.
    """
    products = x.reshape(1, -1).astype(jnp.float32) * weight.astype(jnp.float32)
    return jnp.sum(products, axis=-1).reshape(*x.shape[:-1], -1).astype(dtype)


def _multiply_in_parts(x, weight, dtype):
    """Multiply bfloat16 rows by a float32 matrix, as exactly as a GEMM in float32.

    The 24 bits of a float32 are the sum of three bfloat16 numbers of 8 bits, and a product of two
    bfloat16 numbers is exact in float32. Tensor cores multiply by the three parts in a small share
    of the time that a GPU takes without them.
    """
    parts, rest = [], weight
    for _ in range(2):
        part = lax.reduce_precision(rest, exponent_bits=8, mantissa_bits=7)
        parts.append(part)
        rest = rest - part  # exact
    parts = jnp.concatenate([*parts, rest]).astype(jnp.bfloat16)
    sums = _multiply(x, parts)
    first, second, third = jnp.split(sums, 3, axis=-1)
    return (first + (second + third)).astype(dtype)


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
