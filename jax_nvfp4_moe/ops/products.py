"""grouped_gemm and linear: products with NVFP4 weights."""

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jax_nvfp4_moe.backends.resolution import log_conversion
from jax_nvfp4_moe.numerics.nvfp4 import check_blocks
from jax_nvfp4_moe.numerics.tensor import NVFP4Tensor
from jax_nvfp4_moe.ops.gradient import with_product_gradient
from jax_nvfp4_moe.ops.moe import check_activations
from jax_nvfp4_moe.ops.preparation import plan_product
from jax_nvfp4_moe.scheme import Plan, Scheme, Target


def _product(op, x, weight, group_sizes, input_scale, bias, plan, requested):
    """Multiply sorted rows by the weights of their groups, as `plan` or what is requested says."""
    check_activations("x", x)
    check_blocks("weight", weight.shape)
    e, n, _ = weight.shape
    if bias is not None and bias.shape != (e, n):
        raise ValueError(f"bias: expected shape {(e, n)}, got {bias.shape}")
    if plan is None:
        declared = Scheme.W4A16 if input_scale is None else Scheme.W4A4
        plan = plan_product(weight, checkpoint_scheme=declared, dtype=x.dtype, **requested)
    else:
        plan.check(dtype=x.dtype.name, num_experts=e)
    if weight.layout != plan.layout:
        log_conversion(op, weight.layout, plan.layout)
    if input_scale is not None:
        input_scale = jnp.broadcast_to(jnp.asarray(input_scale, jnp.float32), (e,))
    run = with_product_gradient(functools.partial(plan.lower, scheme=plan.scheme))
    bias = None if bias is None else bias.astype(jnp.float32)
    weight, group_sizes = weight.to_layout(plan.layout), group_sizes.astype(jnp.int32)
    return run(x, weight, group_sizes, input_scale, bias)


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
    """Multiply each row of `x` by the weight of the group that owns it.

    With ``W = dequantize(weight)`` of shape ``[e, n, k]`` and rows sorted by group, row ``i`` of
    group ``g`` gives ``y[i] = W[g] @ x[i]``. Rows past ``sum(group_sizes)`` come back as zeros.
    Gradients flow to `x`, in plain XLA, as if nothing was rounded; `weight` is frozen.

    Args:
      x: rows ``[m, k]``, bfloat16, float16 or float32, sorted by group.
      weight: `NVFP4Tensor` ``[e, n, k]``.
      group_sizes: rows per group ``[e]``, integers. Their values are unknown while tracing: a
        negative one counts as 0, and rows past m do not exist.
      input_scale: float32 scalar or ``[e]``, the activations' global scale for w4a4.
      scheme: None, "checkpoint" or a `Scheme`; counts as w4a4 where `input_scale` is given.
      target: the device to lower for; the current one where None.
      backend: name of a record; a sequence of names, tried in that order; None to choose.

    Returns:
      ``[m, n]`` in the dtype of `x`; sums are float32.

    Raises:
      ValueError: shapes or dtypes disagree.
      NoBackendError: no backend can run this; says why, one by one.

    Reference:
      `backends.reference.grouped_gemm` defines the result, up to the order of summation.
    """
    if len(weight.shape) != 3:
        raise ValueError(f"weight: expected shape [e, n, k], got {weight.shape}")
    e, _, k = weight.shape
    if x.ndim != 2 or x.shape[1] != k:
        raise ValueError(f"x: expected shape [m, {k}], got {x.shape}")
    if group_sizes.shape != (e,) or not jnp.issubdtype(group_sizes.dtype, jnp.integer):
        raise ValueError(
            f"group_sizes: expected integers of shape {(e,)}, one per group; got "
            f"{group_sizes.dtype.name} {group_sizes.shape}"
        )
    requested = {"scheme": scheme, "target": target, "backend": backend}
    return _product("grouped_gemm", x, weight, group_sizes, input_scale, None, None, requested)


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

    Gradients flow to `x` and `bias`, in plain XLA, as if nothing was rounded; `weight` is frozen.

    Args:
      x: ``[..., k]``, bfloat16, float16 or float32.
      weight: `NVFP4Tensor` ``[n, k]``.
      input_scale: float32 scalar, the activations' global scale for w4a4.
      bias: ``[n]``, taken as float32, or None.
      scheme: None, "checkpoint" or a `Scheme`; counts as w4a4 where `input_scale` is given.
      target: the device to lower for; the current one where None.
      backend: name of a record; a sequence of names, tried in that order; None to choose.
      plan: of `ops.preparation.plan_product`, in place of `scheme`, `target` and `backend`: modules
        pass the plan that their weights were prepared for.

    Returns:
      ``[..., n]`` in the dtype of `x`; sums are float32.

    Raises:
      ValueError: shapes or dtypes disagree.
      NoBackendError: no backend can run this; says why, one by one.

    Reference:
      `backends.reference.grouped_gemm` with one group.
    """
    if len(weight.shape) != 2:
        raise ValueError(f"weight: expected shape [n, k], got {weight.shape}")
    n, k = weight.shape
    if x.ndim < 1 or x.shape[-1] != k:
        raise ValueError(f"x: expected shape [..., {k}], got {x.shape}")
    if bias is not None and bias.shape != (n,):
        raise ValueError(f"bias: expected shape {(n,)}, got {bias.shape}")
    one = jax.tree.map(lambda leaf: leaf[None], weight)
    rows = x.reshape(-1, k)
    sizes = jnp.full(1, rows.shape[0], jnp.int32)
    bias = None if bias is None else bias[None]
    requested = {"scheme": scheme, "target": target, "backend": backend}
    y = _product("linear", rows, one, sizes, input_scale, bias, plan, requested)
    return y.reshape(*x.shape[:-1], n)
