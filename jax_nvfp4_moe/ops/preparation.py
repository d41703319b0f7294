"""prepare: weights into the layout of the kernel that will read them, once, at load."""

import jax

from jax_nvfp4_moe.backends.resolution import resolve_backend
from jax_nvfp4_moe.numerics.tensor import MoEParams, NVFP4Tensor, check_moe_params
from jax_nvfp4_moe.ops.moe import find_checkpoint_scheme, resolve_scheme
from jax_nvfp4_moe.scheme import Problem, Scheme, Target


def _to_layout(weights, layout):
    return weights.to_layout(layout)


_convert = jax.jit(_to_layout, static_argnums=1)
_convert_donated = jax.jit(_to_layout, static_argnums=1, donate_argnums=0)


def prepare(
    params: MoEParams,
    *,
    scheme: Scheme | str | None = None,
    target: Target | None = None,
    backend: str | None = None,
) -> MoEParams:
    """Return `params` in the layout that the chosen backend reads.

    Values do not change: ``prepare(p).gate_up.dequantize() == p.gate_up.dequantize()``.

    Args:
      params: the experts of one layer, in any layout.
      scheme, target, backend: as for `ops.moe_mlp`.

    Raises:
      ValueError: shapes disagree, or the scheme is unknown.
      NoBackendError: no backend can run this; says why, one by one.
    """
    return _convert(params, find_moe_layout(params, scheme=scheme, target=target, backend=backend))


def prepare_donated(
    params: MoEParams,
    *,
    scheme: Scheme | str | None = None,
    target: Target | None = None,
    backend: str | None = None,
) -> MoEParams:
    """Return what `prepare` does, and give the arrays of `params` away.

    Their memory holds the result, and they cannot be used again; `prepare` needs the bytes of a
    layer twice. Arguments and errors are those of `prepare`.
    """
    return _convert_donated(
        params, find_moe_layout(params, scheme=scheme, target=target, backend=backend)
    )


def find_moe_layout(
    params: MoEParams,
    *,
    scheme: Scheme | str | None = None,
    target: Target | None = None,
    backend: str | None = None,
) -> str:
    """Return the name of the layout that the backend chosen for `params` reads.

    Arguments and errors are those of `prepare`; no array is read.
    """
    check_moe_params(params)
    target = target or Target.current()
    problem = Problem(
        op="moe_mlp",
        scheme=resolve_scheme(find_checkpoint_scheme(params), scheme, target),
        target=target,
        num_experts=params.num_experts,
        hidden=params.hidden,
        intermediate=params.intermediate,
    )
    return resolve_backend(problem, backend).layout


def prepare_linear(
    weight: NVFP4Tensor, *, scheme: Scheme, target: Target, backend: str | None = None
) -> NVFP4Tensor:
    """Return a matrix ``[n, k]`` in the layout that the backend of `linear` reads."""
    problem = Problem("grouped_gemm", scheme, target, hidden=weight.shape[-1])
    return _convert(weight, resolve_backend(problem, backend).layout)
