"""GEMMs with matrices that are not NVFP4, with float32 sums: XLA's dot, or ours for few rows."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from jax_nvfp4_moe.backends import _ffi
from jax_nvfp4_moe.backends.by_rows import by_rows
from jax_nvfp4_moe.backends.cpu import DENSE_CPU
from jax_nvfp4_moe.backends.cuda import (
    DENSE_CUDA,
    DENSE_FACTOR,
    DENSE_FEW_ROWS,
    DENSE_FP8_FACTOR,
)
from jax_nvfp4_moe.backends.resolution import unavailable_for
from jax_nvfp4_moe.numerics.auto_axes import on_auto_axes
from jax_nvfp4_moe.numerics.fp8 import FP8Tensor, dynamic_scale, round_fp8
from jax_nvfp4_moe.scheme import Choice, FP8ActivationScaling, Problem, Target

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
    bias: Float[Array, " n"] | None = None,
    target: Target | None = None,
    dtype=jnp.float32,
) -> Float[Array, "... n"]:
    """Compute ``x @ weight.T + bias`` with float32 sums.

    Few rows run on a kernel of this package, and other calls on XLA's dot. The bias is added to
    the float32 sums, which are then rounded once to `dtype`. Rounding the product before the
    addition, as ``(x @ weight.T) + bias`` does in 16 bits, would round twice.

    Args:
      x: ``[..., k]`` of any float dtype.
      weight: ``[n, k]`` of any float dtype. If the dtypes differ, both operands count as float32.
      bias: ``[n]`` of any float dtype, taken as float32; None (default) for no bias.
      target: the `Target` to lower for. None (default) lowers for any platform. Then few rows run
        on a kernel on the CPU only.
      dtype: dtype to which the sums are rounded; float32 by default.

    Returns:
      ``[..., n]`` in `dtype`.
    """
    rows, dtype = math.prod(x.shape[:-1]), jnp.dtype(dtype)
    if not (isinstance(rows, int) and rows > 0):
        return _multiply(x, weight, bias, dtype)
    form = _find_form(x, weight, rows, target)
    if form is None:
        return _multiply(x, weight, bias, dtype)
    return on_auto_axes(functools.partial(_multiply_as, form, dtype))(x, weight, bias)


def _find_form(x, weight, rows, target):
    """Return a function that is faster on `target` than `_multiply`, or None."""
    if target is None:
        has_other_forms = rows == 1 or x.dtype == weight.dtype == jnp.bfloat16
        return _multiply_anywhere if has_other_forms else None
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
    if target.platform == "cpu" and kinds == ("bfloat16", "bfloat16"):
        return _multiply_on_cpu
    return _reduce if rows == 1 and target.platform == "cuda" else None


@functools.partial(jax.custom_jvp, nondiff_argnums=(0, 1))
def _multiply_as(multiply, dtype, x, weight, bias):
    """Compute ``x @ weight.T + bias`` as `multiply` does."""
    run = functools.partial(multiply, dtype=dtype)
    # XLA divides the rows of its own dot, and the weight too.
    if multiply in _OF_XLA:
        return run(x, weight, bias)
    return by_rows(run, "... _, -, - -> ... _")(x, weight, bias)


@_multiply_as.defjvp
def _differentiate(multiply, dtype, primals, tangents):
    """Differentiate XLA's dot: a custom call has no derivative, and rounding has another one."""
    (x, weight, _), (dx, dweight, dbias) = primals, tangents
    tangent = _multiply(dx, weight, dbias) + _multiply(x, dweight)
    return _multiply_as(multiply, dtype, *primals), tangent.astype(dtype)


def _multiply_anywhere(x, weight, bias, dtype):
    """Multiply rows on the platform of the program, and add the bias."""
    rows, forms = math.prod(x.shape[:-1]), {}
    if x.dtype == weight.dtype == jnp.bfloat16:
        few = rows <= _CPU_FEW_ROWS and _ffi.why_unavailable(DENSE_CPU.can.extension) is None
        forms["cpu"] = DENSE_CPU.lower["dense"] if few else _multiply_on_cpu
    if rows == 1:
        forms["cuda"] = _reduce
    forms["default"] = _multiply
    forms = {name: functools.partial(form, dtype=dtype) for name, form in forms.items()}
    return lax.platform_dependent(x, weight, bias, **forms)


def _add_bias(sums, bias, dtype):
    """Return ``sums + bias``, added in float32 and rounded to `dtype`; `bias` may be None."""
    if bias is not None:
        sums = sums + jnp.expand_dims(bias.astype(jnp.float32), range(sums.ndim - 1))
    return sums.astype(dtype)


def _multiply(x, weight, bias=None, dtype=jnp.float32):
    """Compute ``x @ weight.T + bias`` by one XLA dot with float32 sums."""
    if x.dtype != weight.dtype:
        x, weight = x.astype(jnp.float32), weight.astype(jnp.float32)
    contract = (((x.ndim - 1,), (weight.ndim - 1,)), ((), ()))
    sums = lax.dot_general(
        x,
        weight,
        contract,
        precision=precision_for(weight.dtype),
        preferred_element_type=jnp.float32,
    )
    return _add_bias(sums, bias, dtype)


def _multiply_on_cpu(x, weight, bias, dtype):
    """Compute ``x @ weight.T + bias`` in bfloat16 by one XLA dot of the weight and the rows.

    On a CPU, XLA rearranges the right operand of such a dot in each call. In the loop of `generate`
    it also kept a transposed copy of the weight. The smaller operand therefore stands on the right.
    """
    if math.prod(x.shape[:-1]) >= weight.shape[0]:
        return _multiply(x, weight, bias, dtype)
    return _add_bias(jnp.moveaxis(_multiply(weight, x), 0, -1), bias, dtype)


def _reduce(x, weight, bias, dtype):
    """Multiply one row by a sum of elementwise products, and add the bias.

    XLA's GEMMs with a single row read weights at a third of a GPU's bandwidth.
    """
    products = x.reshape(1, -1).astype(jnp.float32) * weight.astype(jnp.float32)
    return _add_bias(jnp.sum(products, axis=-1).reshape(*x.shape[:-1], -1), bias, dtype)


def _multiply_in_parts(x, weight, bias, dtype):
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
    return _add_bias(first + (second + third), bias, dtype)


_OF_XLA = frozenset({_multiply, _multiply_on_cpu, _reduce, _multiply_in_parts})


def dense_fp8(
    x: Float[Array, "... k"],
    weight: FP8Tensor,
    *,
    activations: FP8ActivationScaling = FP8ActivationScaling.WEIGHTS,
    input_scale=None,
    multiply_by_reciprocal: bool = False,
    bias: Float[Array, " n"] | None = None,
    target: Target | None = None,
    dtype=jnp.float32,
) -> Float[Array, "... n"]:
    """Compute ``x @ dequantize(weight).T`` with float32 sums; `x` may be rounded to E4M3 first.

    The result is ``y = (e4m3(x / s) @ values.T) * s * scale + bias``, computed in this order and
    rounded once. E4M3 values are exact in the dtype of `x`, so the operands of the GEMM are exact
    on every device. Few rows run on a kernel of this package if `target` is a GPU that has one, and
    other calls on XLA's dot.

    If weight rows have a scale for each 128 weights, the kernel multiplies the sum over these by
    it. XLA's dot takes weights that are dequantized, and rounded once to the dtype of `x`.

    Args:
      x: ``[..., k]``, bfloat16, float16 or float32.
      weight: `FP8Tensor` ``[n, k]``.
      activations: how `x` is rounded; by default it is not rounded.
      input_scale: s, a float32 scalar. It is required for `FP8ActivationScaling.STATIC` and
        otherwise not used.
      multiply_by_reciprocal: how `x` is rounded, see `numerics.fp8.round_fp8`; False by default.
      bias: ``[n]`` of any float dtype, taken as float32; None (default) for no bias.
      target: the `Target` to lower for. None (default) lowers for any platform, with XLA's dot on
        GPUs.
      dtype: dtype to which the result is rounded; float32 by default.

    Returns:
      ``[..., n]`` in `dtype`.
    """
    own = None
    if activations is FP8ActivationScaling.STATIC:
        own = jnp.asarray(input_scale, jnp.float32)
    elif activations is not FP8ActivationScaling.WEIGHTS:
        of_token = activations is FP8ActivationScaling.TOKEN
        own = dynamic_scale(x, -1 if of_token else tuple(range(x.ndim)))
    if own is not None:
        own = lax.stop_gradient(own)
        x = _round(x, own, multiply_by_reciprocal)
    few = None if target is None else _find_fp8_kernel(x, weight, target)
    run = _multiply_fp8 if few is None else functools.partial(_multiply_fp8_few, few)
    run = on_auto_axes(functools.partial(run, jnp.dtype(dtype)))
    return run(x, weight.values, weight.scale.astype(jnp.float32), own, bias)


def _find_fp8_kernel(x, weight: FP8Tensor, target):
    """Return a function that is faster on `target` than XLA's dot, or None."""
    rows = math.prod(x.shape[:-1])
    if not (isinstance(rows, int) and 0 < rows <= DENSE_FEW_ROWS and weight.values.size > 0):
        return None
    choice = explain_fp8(weight, x.dtype, target)
    return DENSE_CUDA.lower["dense_fp8"] if choice.backend == DENSE_CUDA.name else None


def explain_fp8(weight: FP8Tensor, dtype, target: Target) -> Choice:
    """Return what runs `dense_fp8` for few rows: "dense_cuda", or "xla" with the reason.

    Args:
      weight: `FP8Tensor` ``[n, k]``, or its shapes.
      dtype: dtype of the rows.
      target: the `Target` to lower for.
    """
    n, k = weight.shape
    problem = Problem("dense_fp8", None, target, jnp.dtype(dtype).name, hidden=k, intermediate=n)
    problem = dataclasses.replace(problem, unavailable=unavailable_for(target))
    reason = DENSE_CUDA.can.reason_against(problem)
    if reason is None and k % DENSE_FP8_FACTOR:
        reason = f"needs rows of a multiple of {DENSE_FP8_FACTOR} numbers, got {k}"
    if reason is not None:
        return Choice(None, "xla", {DENSE_CUDA.name: reason}, problem=problem)
    return Choice(None, DENSE_CUDA.name, {}, problem=problem, notes=DENSE_CUDA.notes(problem))


def _multiply_fp8(dtype, x, values, scale, own, bias):
    """Compute `dense_fp8` by XLA's dot. `own` has the scales of rows of x, or is None."""
    weight = FP8Tensor(values, scale)
    if weight.has_groups:
        y = dense(x, weight.dequantize(x.dtype))
        return _add_bias(y if own is None else y * own, bias, dtype)
    y = dense(x, values.astype(x.dtype))
    y = y if own is None else y * own
    return _add_bias(y * jnp.expand_dims(scale, range(x.ndim - 1)), bias, dtype)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0, 1))
def _multiply_fp8_few(multiply, dtype, x, values, scale, own, bias):
    """Compute what `_multiply_fp8` computes for few rows, as `multiply` does."""
    run = functools.partial(multiply, dtype=dtype)
    scales = "... _" if own is not None and own.shape[:-1] == x.shape[:-1] else "-"
    return by_rows(run, f"... _, -, -, {scales}, - -> ... _")(x, values, scale, own, bias)


@_multiply_fp8_few.defjvp
def _differentiate_fp8_few(multiply, dtype, primals, tangents):
    """Differentiate XLA's dot, because a custom call has no derivative."""
    _, tangent = jax.jvp(functools.partial(_multiply_fp8, dtype), primals, tangents)
    return _multiply_fp8_few(multiply, dtype, *primals), tangent


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
