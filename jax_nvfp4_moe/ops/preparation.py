"""Plans of the ops on NVFP4 weights, and weights in the layout of the kernel that reads them."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp

from jax_nvfp4_moe.backends.resolution import resolve
from jax_nvfp4_moe.numerics.tensor import MoEParams, NVFP4Tensor, check_moe_params
from jax_nvfp4_moe.scheme import Plan, Problem, Scheme, Target


def plan_experts(
    params,
    *,
    checkpoint_scheme: Scheme | str,
    scheme: Scheme | str | None = None,
    target: Target | None = None,
    backend: str | Sequence[str] | None = None,
    dtype=jnp.bfloat16,
    top_k: int = 1,
    activation: str | None = None,
    shards: tuple[int, int] = (1, 1),
) -> Plan:
    """Return the plan of `moe_mlp` on experts of these sizes; no array is read.

    Args:
      params: the experts of the whole layer: what has num_experts, hidden and intermediate.
      checkpoint_scheme: what the checkpoint says of them, "w4a16" or "w4a4".
      scheme, target, backend: as for `ops.moe_mlp`.
      dtype: of the tokens.
      top_k: experts of a token.
      activation: name of the activation.
      shards: into how many parts a mesh divides the experts, and each expert's width.

    Raises:
      ValueError: the scheme or a backend is unknown, or the scheme does not go with the weights.
      NoBackendError: no backend can run this; says why, one by one.
    """
    problem = Problem(
        op="moe_mlp",
        scheme=None,
        target=target or Target.current(),
        dtype=jnp.dtype(dtype).name,
        num_experts=params.num_experts // shards[0],
        top_k=top_k,
        hidden=params.hidden,
        intermediate=params.intermediate // shards[1],
        activation=activation,
    )
    how = {"requested_scheme": scheme, "backend": backend}
    return resolve(problem, checkpoint_scheme=checkpoint_scheme, **how)


def plan_product(
    weight: NVFP4Tensor,
    *,
    checkpoint_scheme: Scheme | str,
    scheme: Scheme | str | None = None,
    target: Target | None = None,
    backend: str | Sequence[str] | None = None,
    dtype=jnp.bfloat16,
) -> Plan:
    """Return the plan of a product with `weight` ``[n, k]``, or ``[e, n, k]`` by groups of rows.

    Arguments and errors are those of `plan_experts`; no array is read.
    """
    *groups, n, k = weight.shape
    problem = Problem(
        op="grouped_gemm",
        scheme=None,
        target=target or Target.current(),
        dtype=jnp.dtype(dtype).name,
        num_experts=groups[0] if groups else 1,
        hidden=k,
        intermediate=n,
    )
    how = {"requested_scheme": scheme, "backend": backend}
    return resolve(problem, checkpoint_scheme=checkpoint_scheme, **how)


def find_checkpoint_scheme(params: MoEParams) -> Scheme:
    """Return what parameters without a checkpoint stand for: w4a4 where they have input scales."""
    return Scheme.W4A4 if params.has_input_scales else Scheme.W4A16


def _to_layout(weights, layout):
    return weights.to_layout(layout)


convert = jax.jit(_to_layout, static_argnums=1)
_convert_donated = jax.jit(_to_layout, static_argnums=1, donate_argnums=0)


def prepare(
    params: MoEParams,
    *,
    scheme: Scheme | str | None = None,
    target: Target | None = None,
    backend: str | Sequence[str] | None = None,
    dtype=jnp.bfloat16,
    top_k: int = 1,
) -> MoEParams:
    """Return `params` in the layout of the backend that `ops.moe_mlp` takes for such calls.

    Values do not change: ``prepare(p).gate_up.dequantize() == p.gate_up.dequantize()``. If calls
    differ from what is said here in a way that leads to another backend, they convert the weights
    each time, and the log says so.

    Args:
      params: the experts of one layer, in any layout; on one device, all that a call sees.
      scheme, target, backend: as for `ops.moe_mlp`.
      dtype: of the tokens of the calls: bfloat16, float16 or float32. Some backends take only some.
      top_k: experts of a token. The kernels take at most 32; up to that it makes no difference.

    Raises:
      ValueError: shapes disagree, or the scheme is unknown.
      NoBackendError: no backend can run this; says why, one by one.
    """
    how = {"scheme": scheme, "target": target, "backend": backend, "dtype": dtype, "top_k": top_k}
    return convert(params, _plan(params, **how).layout)


def prepare_donated(
    params: MoEParams,
    *,
    scheme: Scheme | str | None = None,
    target: Target | None = None,
    backend: str | Sequence[str] | None = None,
    dtype=jnp.bfloat16,
    top_k: int = 1,
) -> MoEParams:
    """Return what `prepare` does, and give the arrays of `params` away.

    Their memory holds the result, and they cannot be used again; `prepare` needs the bytes of a
    layer twice. Arguments and errors are those of `prepare`.
    """
    how = {"scheme": scheme, "target": target, "backend": backend, "dtype": dtype, "top_k": top_k}
    return _convert_donated(params, _plan(params, **how).layout)


def _plan(params, **how):
    check_moe_params(params)
    return plan_experts(params, checkpoint_scheme=find_checkpoint_scheme(params), **how)
