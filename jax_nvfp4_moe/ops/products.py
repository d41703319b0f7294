"""`grouped_gemm` and `linear`: GEMMs with NVFP4 weights."""

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jax_nvfp4_moe.backends.by_rows import by_rows
from jax_nvfp4_moe.backends.plan import Plan
from jax_nvfp4_moe.numerics.nvfp4 import check_blocks
from jax_nvfp4_moe.numerics.tensor import NVFP4Tensor
from jax_nvfp4_moe.ops.checks import check_floats
from jax_nvfp4_moe.ops.conversion import report_conversion
from jax_nvfp4_moe.ops.documentation import public_op
from jax_nvfp4_moe.ops.experts.backward import fold_parts, plan_transposed
from jax_nvfp4_moe.ops.experts.meaning import transposed_gemm
from jax_nvfp4_moe.ops.gradient import with_product_gradient
from jax_nvfp4_moe.ops.preparation import plan_product
from jax_nvfp4_moe.scheme import Scheme, Target


def _product(op, x, weight, group_sizes, input_scale, bias, plan, requested):
    """Multiply sorted rows by the weights of their groups, by `plan` or as `requested` says.

    `group_sizes` is None if there is one group, which has all rows. Kernels then need no tables,
    and x is ``[..., k]``. Sorted rows cannot be sharded: which rows belong to which
    group is known only on the device.
    """
    check_floats(x=x)
    check_blocks("weight", weight.shape)
    e, n, _ = weight.shape
    if bias is not None and bias.shape != (e, n):
        raise ValueError(f"bias: expected shape {(e, n)}, got {bias.shape}")
    name = "weight" if plan is None else "module.weight"
    if plan is None:
        declared = Scheme.W4A16 if input_scale is None else Scheme.W4A4
        plan = plan_product(weight, checkpoint_scheme=declared, dtype=x.dtype, **requested)
    else:
        plan.check(dtype=x.dtype.name, num_experts=e)
    report_conversion(op, weight.layout, plan, name)
    if input_scale is not None:
        input_scale = jnp.asarray(input_scale, jnp.float32)
        if input_scale.shape not in ((), (1,), (e,)):
            shapes = "one number" if op == "linear" else f"one number or shape {(e,)}"
            raise ValueError(f"input_scale: expected {shapes}, got shape {input_scale.shape}")
        input_scale = jnp.broadcast_to(input_scale, (e,))
    run = functools.partial(plan.lower, scheme=plan.scheme)
    if group_sizes is None:
        run = by_rows(functools.partial(_flatten, run), "... _, -, -, -, - -> ... _")
    run = with_product_gradient(run, _find_transposed(plan, x.dtype))
    bias = None if bias is None else bias.astype(jnp.float32)
    sizes = None if group_sizes is None else group_sizes.astype(jnp.int32)
    return run(x, weight.to_layout(plan.layout), sizes, input_scale, bias)


def _find_transposed(plan, dtype):
    """Return the product with transposed weights: on a kernel, or as it is defined."""
    transposed = plan_transposed(plan, dtype)
    if transposed is None:
        return transposed_gemm
    return functools.partial(_multiply_transposed, transposed)


def _multiply_transposed(plan, x, weight, group_sizes):
    """Multiply rows by transposed weights on a kernel, which reads one global scale per expert."""
    if weight.shape[0] == 0:  # no row has a group
        return transposed_gemm(x, weight, group_sizes)
    return plan.lower(*fold_parts(x, weight, group_sizes), group_sizes)


def _flatten(run, x, *operands):
    """Run a product on rows ``[..., k]``."""
    y = run(x.reshape(-1, x.shape[-1]), *operands)
    return y.reshape(*x.shape[:-1], y.shape[-1])


@public_op
def grouped_gemm(
    x: Float[Array, "m k"],
    weight: NVFP4Tensor,
    group_sizes: Int[Array, " e"],
    *,
    input_scale: Float[Array, "*e"] | None = None,
    scheme: Scheme | str | None = None,
    target: Target | None = None,
    backend: str | Sequence[str] | None = None,
) -> Float[Array, "m n"]:
    """Multiply each row of `x` by the weight of the group to which the row belongs.

    With ``W = dequantize(weight)`` of shape ``[e, n, k]`` and rows that are sorted by group, row
    ``i`` of group ``g`` gives ``y[i] = W[g] @ x[i]``. Rows after the first ``sum(group_sizes)``
    rows give zeros. Sums are float32.

    Gradients flow to `x`, with every rounding as the identity; `weight` is frozen.

    Args:
      x: rows ``[m, k]``, sorted by group; bfloat16, float16 or float32. m may be 0.
      weight: `NVFP4Tensor` ``[e, n, k]``, canonical or as `prepare` returns it. If the layout is
        not that of the chosen backend, each call converts it, and a warning in the log says so.
      group_sizes: integers ``[e]``, the number of rows of each group. The values are unknown during
        tracing and are not checked. A negative size counts as 0, and rows after the m-th do not
        exist.
      input_scale: float32 scalar or ``[e]``, the global scale of the activations for w4a4: amax /
        2688. None (default) if the activations are not calibrated.
      scheme: "checkpoint", a `Scheme` or its name. None (default) lets the arguments and the device
        decide. With `input_scale`, the weight counts as a w4a4 checkpoint.
      target, backend: where the op runs, and which kernel runs it.

    Returns:
      ``[m, n]`` in the dtype of `x`.

    Raises:
      ValueError: if shapes or dtypes disagree, or the scheme is unknown.
      ValueError: if scheme "w4a4" is requested without `input_scale`.
      NoBackendError: if no backend can run the call.

    Example:
      >>> import jax
      >>> import jax.numpy as jnp
      >>> import jax_nvfp4_moe as nvfp4
      >>> weight = nvfp4.quantize(jax.random.normal(jax.random.key(0), (3, 32, 64)))
      >>> weight = nvfp4.prepare(weight, dtype="float32")
      >>> x = jnp.ones((5, 64))
      >>> y = nvfp4.ops.grouped_gemm(x, weight, jnp.array([2, 0, 2]))
      >>> y.shape, float(jnp.abs(y[4]).max())  # row 4 belongs to no group
      ((5, 32), 0.0)

    Reference:
      `ops.experts.meaning.grouped_gemm` defines the result, up to the order of summation.
    """
    if len(weight.shape) != 3:
        raise ValueError(f"weight: expected shape [e, n, k], got {weight.shape}")
    e, _, k = weight.shape
    if x.ndim != 2 or x.shape[1] != k:
        raise ValueError(f"x: expected shape [m, {k}], got {x.shape}")
    if group_sizes.shape != (e,) or not jnp.issubdtype(group_sizes.dtype, jnp.integer):
        raise ValueError(
            f"group_sizes: expected integers of shape {(e,)}, one number per group; got "
            f"{group_sizes.dtype.name} {group_sizes.shape}"
        )
    requested = {"scheme": scheme, "target": target, "backend": backend}
    return _product("grouped_gemm", x, weight, group_sizes, input_scale, None, None, requested)


@public_op
def linear(
    x: Float[Array, "... k"],
    weight: NVFP4Tensor,
    *,
    input_scale: Float[Array, ""] | None = None,
    bias: Float[Array, " n"] | None = None,
    scheme: Scheme | str | None = None,
    target: Target | None = None,
    backend: str | Sequence[str] | None = None,
    plan: Plan | None = None,
) -> Float[Array, "... n"]:
    """Multiply by one NVFP4 matrix: ``y = x @ dequantize(weight).T + bias``.

    Sums are float32. Gradients flow to `x` and `bias`, with every rounding as the identity;
    `weight` is frozen.

    Args:
      x: ``[..., k]``, bfloat16, float16 or float32.
      weight: `NVFP4Tensor` ``[n, k]``, canonical or as `prepare` returns it. If the layout is not
        that of the chosen backend, each call converts it, and a warning in the log says so.
      input_scale: float32 scalar, the global scale of the activations for w4a4: amax / 2688. None
        (default) if the activations are not calibrated.
      bias: ``[n]`` of any float dtype, taken as float32; None (default) for no bias.
      scheme: "checkpoint", a `Scheme` or its name. None (default) lets the arguments and the device
        decide. With `input_scale`, the weight counts as a w4a4 checkpoint.
      target, backend: where the op runs, and which kernel runs it.
      plan: a `Plan` that replaces `scheme`, `target` and `backend`. Modules pass the plan for which
        their weights were prepared. None (default) makes a plan.

    Returns:
      ``[..., n]`` in the dtype of `x`.

    Raises:
      ValueError: if shapes or dtypes disagree, or the scheme is unknown.
      ValueError: if scheme "w4a4" is requested without `input_scale`.
      NoBackendError: if no backend can run the call.

    Example:
      >>> import jax
      >>> import jax.numpy as jnp
      >>> import jax_nvfp4_moe as nvfp4
      >>> weight = nvfp4.quantize(jax.random.normal(jax.random.key(0), (32, 64)))
      >>> weight = nvfp4.prepare(weight, dtype="float32")
      >>> nvfp4.ops.linear(jnp.ones((2, 5, 64)), weight).shape
      (2, 5, 32)

    Reference:
      `ops.experts.meaning.grouped_gemm` with one group defines the result, up to the order of
      summation.
    """
    if len(weight.shape) != 2:
        raise ValueError(f"weight: expected shape [n, k], got {weight.shape}")
    n, k = weight.shape
    if x.ndim < 1 or x.shape[-1] != k:
        raise ValueError(f"x: expected shape [..., {k}], got {x.shape}")
    if bias is not None and bias.shape != (n,):
        raise ValueError(f"bias: expected shape {(n,)}, got {bias.shape}")
    one = jax.tree.map(lambda leaf: leaf[None], weight)
    bias = None if bias is None else bias[None]
    requested = {"scheme": scheme, "target": target, "backend": backend}
    return _product("linear", x, one, None, input_scale, bias, plan, requested)
