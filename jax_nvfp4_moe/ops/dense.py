"""GEMMs with matrices that are not NVFP4, with float32 sums: XLA's dot, or ours for few rows."""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float

from jax_nvfp4_moe.backends.kernel_call import kernel_call
from jax_nvfp4_moe.backends.launch_facts import facts
from jax_nvfp4_moe.backends.record import CPU, CUDA, HALVES, OPEN, Backend, Device, Kernel
from jax_nvfp4_moe.backends.resolution import explain_plan
from jax_nvfp4_moe.numerics.fp8 import FP8Tensor, dynamic_scale, round_fp8
from jax_nvfp4_moe.ops.derivative import with_derivative_of
from jax_nvfp4_moe.ops.running import find_plan, list_records, lower_anywhere, run
from jax_nvfp4_moe.scheme import Choice, FP8ActivationScaling, Problem, Target


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
    (n, k), dtype = weight.shape, jnp.dtype(dtype)
    facts: dict[str, Any] = {
        "dtype": x.dtype.name,
        "weight_dtype": weight.dtype.name,
        "hidden": k,
        "intermediate": n,
        "sizes": {"rows": math.prod(x.shape[:-1]), "inputs": k, "outputs": n},
    }
    rule: str | None = "... _, -, - -> ... _"
    if target is None:
        lower = lower_anywhere("dense", **facts)
    else:
        plan = find_plan("dense", target=target, **facts)
        lower, rule = plan.lower, None if plan.backend.sharded_by_xla else rule
    if lower is multiply:
        return multiply(x, weight, bias, dtype)
    return with_derivative_of(multiply, lower, rule, dtype=dtype)(x, weight, bias)


def _add_bias(sums, bias, dtype):
    """Return ``sums + bias``, added in float32 and rounded to `dtype`; `bias` may be None."""
    if bias is not None:
        sums = sums + jnp.expand_dims(bias.astype(jnp.float32), range(sums.ndim - 1))
    return sums.astype(dtype)


def multiply(x, weight, bias=None, dtype=jnp.float32):
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
        return multiply(x, weight, bias, dtype)
    return _add_bias(jnp.moveaxis(multiply(weight, x), 0, -1), bias, dtype)


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
    sums = multiply(x, parts)
    first, second, third = jnp.split(sums, 3, axis=-1)
    return _add_bias(first + (second + third), bias, dtype)


def _lower(ffi_target, x, weight, bias, dtype, *, rows_dtype=None):
    """Lower ``x @ weight.T + bias`` for few rows to an FFI target.

    The function takes x ``[..., k]``, a weight ``[n, k]`` and a bias ``[n]`` or None, and returns
    ``[..., n]`` in `dtype`.

    Args:
      rows_dtype: dtype to which x is cast, for a kernel whose results are float32, and which adds
        no bias. None (default) if the kernel takes x as it is, adds a bias, and returns float32 or
        the dtype of x.
    """
    rows = x.reshape(-1, x.shape[-1]).astype(rows_dtype or x.dtype)
    own = jnp.float32 if rows_dtype or dtype != x.dtype else dtype
    output = jax.ShapeDtypeStruct((rows.shape[0], weight.shape[0]), own)
    operands = (rows, weight) if rows_dtype else (rows, weight, _encode_bias(bias, x.dtype))
    y = kernel_call(ffi_target, output)(*operands)
    if rows_dtype and bias is not None:
        y = y + bias.astype(own)[None]
    return y.reshape(*x.shape[:-1], weight.shape[0]).astype(dtype)


def _encode_bias(bias, dtype):
    """Return the operand ``[n]`` in `dtype` or float32, or ``[0]`` if there is no bias."""
    if bias is None:
        return jnp.zeros(0, dtype)
    return bias if bias.dtype == dtype else bias.astype(jnp.float32)


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
    (n, k), scales = weight.shape, "-"
    if own is not None and own.shape[:-1] == x.shape[:-1]:
        scales = "... _"
    return run(
        "dense_fp8",
        (x, weight.values, weight.scale.astype(jnp.float32), own, bias),
        f"... _, -, -, {scales}, - -> ... _",
        options={"dtype": jnp.dtype(dtype)},
        target=target,
        backend="xla" if target is None else None,
        dtype=x.dtype.name,
        hidden=k,
        intermediate=n,
        sizes={"rows": math.prod(x.shape[:-1]), "FP8 inputs": k, "outputs": n},
    )


def explain_fp8(weight: FP8Tensor, dtype, target: Target) -> Choice:
    """Return what runs `dense_fp8` for few rows: "dense_cuda", or "xla" with the reason.

    Args:
      weight: `FP8Tensor` ``[n, k]``, or its shapes.
      dtype: dtype of the rows.
      target: the `Target` to lower for.
    """
    (n, k), name = weight.shape, jnp.dtype(dtype).name
    facts = {"dtype": name, "hidden": k, "intermediate": n, "sizes": {"FP8 inputs": k}}
    return explain_plan(find_plan("dense_fp8", target=target, **facts), list_records())


def multiply_fp8(x, values, scale, own, bias, dtype):
    """Compute `dense_fp8` by XLA's dot. `own` has the scales of rows of x, or is None."""
    weight = FP8Tensor(values, scale)
    if weight.has_groups:
        y = dense(x, weight.dequantize(x.dtype))
        return _add_bias(y if own is None else y * own, bias, dtype)
    y = dense(x, values.astype(x.dtype))
    y = y if own is None else y * own
    return _add_bias(y * jnp.expand_dims(scale, range(x.ndim - 1)), bias, dtype)


def _lower_fp8(ffi_target, x, values, scale, row_scale, bias, dtype):
    """Lower ``x @ dequantize(weight).T + bias`` to an FFI target.

    The function takes few rows x ``[..., k]``, the values ``[n, k]`` and the scales of an
    `FP8Tensor`, the scales of the rows of x (None, one, or one for each), and a bias ``[n]`` or
    None. It returns ``[..., n]`` in `dtype`.
    """
    rows, n = x.reshape(-1, x.shape[-1]), values.shape[0]
    row_scale = jnp.zeros(0, jnp.float32) if row_scale is None else row_scale.reshape(-1)
    output = jax.ShapeDtypeStruct((rows.shape[0], n), dtype if dtype == x.dtype else np.float32)
    y = kernel_call(ffi_target, output)(rows, values, scale, row_scale, _encode_bias(bias, x.dtype))
    return y.reshape(*x.shape[:-1], n).astype(dtype)


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


def _notes(_: Problem) -> tuple[str, ...]:
    """Say which calls take the kernel."""
    return (f"1 to {facts().DENSE_ROWS[-1]} rows take the kernel; more rows take XLA's dot",)


_SOME = range(1, OPEN)
DENSE_CUDA = Backend(
    "dense_cuda",
    {
        "dense": Kernel(_lower, "nvfp4_dense_few_cuda"),
        "dense_fp8": Kernel(_lower_fp8, "nvfp4_dense_fp8_few_cuda"),
    },
    (CUDA,),
    dtypes=HALVES,
    weight_dtypes={"bfloat16": ("bfloat16", "float32"), "float16": ("float16",)},
    limits={
        "rows": "DENSE_ROWS",
        "inputs": "DENSE_INPUTS",
        "FP8 inputs": "DENSE_E4M3_INPUTS",
        "outputs": _SOME,
    },
    max_extent="MAX_EXTENT",
    notes=_notes,
)
# It is faster than XLA's dot for up to 8 rows.
DENSE_CPU = Backend(
    "dense_cpu",
    {"dense": Kernel(_lower, "nvfp4_dense_cpu", rows_dtype="float32")},
    (CPU,),
    dtypes=HALVES[:1],
    weight_dtypes={"bfloat16": ("bfloat16",)},
    limits={"rows": range(1, 9), "inputs": _SOME, "outputs": _SOME},
    status="executed, measured",
)
# Forms of XLA's own operations that are faster on some devices.
XLA_FORMS = (
    Backend(
        "xla_in_parts",
        {"dense": _multiply_in_parts},
        (Device("cuda", (8, 0)),),
        dtypes=HALVES[:1],
        weight_dtypes={"bfloat16": ("float32",)},
        limits={"rows": range(65, OPEN)},  # more than DENSE_CUDA takes
        sharded_by_xla=True,
    ),
    Backend(
        "xla_cpu",
        {"dense": _multiply_on_cpu},
        (CPU,),
        dtypes=HALVES[:1],
        weight_dtypes={"bfloat16": ("bfloat16",)},
        limits={"rows": _SOME},
        sharded_by_xla=True,
    ),
    Backend(
        "xla_sum",
        {"dense": _reduce},
        (Device("cuda"),),
        dtypes=None,
        limits={"rows": range(1, 2)},
        sharded_by_xla=True,
    ),
)


BACKENDS = (DENSE_CUDA, DENSE_CPU, *XLA_FORMS)
OF_XLA = {"dense": multiply, "dense_fp8": multiply_fp8}
