"""Plans of ops on NVFP4 weights, and conversion of weights to the layout of their kernel."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import TypeVar

import jax
import jax.numpy as jnp

from jax_nvfp4_moe.backends.plan import Plan
from jax_nvfp4_moe.backends.resolution import resolve, resolve_again
from jax_nvfp4_moe.numerics.fp8 import FP8Tensor
from jax_nvfp4_moe.numerics.nvfp4 import check_blocks
from jax_nvfp4_moe.numerics.tensor import DenseExperts, MoEParams, NVFP4Tensor, check_moe_params
from jax_nvfp4_moe.ops.compiling_ahead import Noted
from jax_nvfp4_moe.ops.documentation import share_lines
from jax_nvfp4_moe.ops.running import list_records
from jax_nvfp4_moe.scheme import Problem, Scheme, Target

Weights = TypeVar("Weights", MoEParams, NVFP4Tensor, FP8Tensor, DenseExperts)


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
    """Return the plan of `moe_mlp` for experts of the given sizes; no array is read.

    Args:
      params: the experts of the whole layer, or any object with the attributes num_experts, hidden
        and intermediate.
      checkpoint_scheme: what the checkpoint declares for the experts, "w4a16" or "w4a4".
      scheme, target, backend: as in `ops.moe_mlp`.
      dtype: dtype of the tokens, bfloat16 by default.
      top_k: number of experts per token, 1 by default.
      activation: name of the activation, or None (default) if it is unknown.
      shards: number of parts into which a mesh divides the experts, and number of parts into which
        it divides the intermediate size; (1, 1) by default.

    Raises:
      ValueError: if the scheme or a backend is unknown, or the scheme needs input scales that the
        weights lack.
      NoBackendError: if no backend can run the problem; the message lists every backend and its
        reason.
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
    return resolve(problem, list_records(), checkpoint_scheme=checkpoint_scheme, **how)


def plan_product(
    weight: NVFP4Tensor,
    *,
    checkpoint_scheme: Scheme | str,
    scheme: Scheme | str | None = None,
    target: Target | None = None,
    backend: str | Sequence[str] | None = None,
    dtype=jnp.bfloat16,
) -> Plan:
    """Return the plan of a GEMM with `weight` ``[n, k]``, or of a grouped GEMM with ``[e, n, k]``.

    No array is read. The other arguments and the errors are those of `plan_experts`.
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
    return resolve(problem, list_records(), checkpoint_scheme=checkpoint_scheme, **how)


def find_checkpoint_scheme(params: MoEParams) -> Scheme:
    """Return the scheme that parameters stand for: w4a4 if they have input scales, else w4a16."""
    return Scheme.W4A4 if params.has_input_scales else Scheme.W4A16


def default_checkpoint_scheme(has_input_scales: bool, scheme: Scheme | str | None) -> Scheme:
    """Return the scheme that the weights of a module stand for if its caller declares none.

    It is w4a4 if the weights have input scales and `scheme`, the requested scheme, is w4a4.
    Otherwise it is w4a16, also for weights with input scales, as in a relabeled W4A4 file.
    """
    return Scheme.W4A4 if has_input_scales and scheme == Scheme.W4A4 else Scheme.W4A16


def plan_with_input_scales(plan: Plan, scheme: Scheme | str | None = None) -> Plan:
    """Return the plan of the same op for weights that now have calibrated input scales.

    Args:
      plan: the plan so far.
      scheme: the scheme to run, "checkpoint" or a `Scheme`. None (default) keeps what `plan` was
        asked for.

    Raises:
      ValueError: if the scheme is unknown.
      NoBackendError: if no backend can run the op; the message lists every backend and its reason.
    """
    asked = plan.requested_scheme if scheme is None else str(scheme)
    given = dataclasses.replace(plan, checkpoint_scheme=Scheme.W4A4, requested_scheme=asked)
    return resolve_again(given, list_records())


def _to_layout(weights, layout):
    """Return `weights` in `layout`; a function that `jax.jit` can take."""
    return weights.to_layout(layout)


convert = Noted(jax.jit(_to_layout, static_argnums=1))


@functools.partial(jax.jit, static_argnums=(1, 2))
def convert_stacked(weights, layout, stacked: int):
    """Return weights in `layout`, of which `stacked` leading axes count modules."""
    run = functools.partial(_to_layout, layout=layout)
    for _ in range(stacked):
        run = jax.vmap(run)
    return run(weights)


_convert_donated = jax.jit(_to_layout, static_argnums=1, donate_argnums=0)


@share_lines
def prepare(
    params: Weights,
    *,
    scheme: Scheme | str | None = None,
    target: Target | None = None,
    backend: str | Sequence[str] | None = None,
    dtype=jnp.bfloat16,
    top_k: int = 1,
) -> Weights:
    """Convert weights to the layout of the backend that `ops.moe_mlp` or `ops.linear` will use.

    Call it once per layer, after loading or quantizing. The values do not change:
    ``prepare(p).gate_up.dequantize() == p.gate_up.dequantize()``. Without it, the ops convert the
    weights on every call. This also happens if calls differ from the arguments given here so that
    another backend runs. A warning in the log then names the line to write.

    Args:
      params: the weights on one device, in any layout. `MoEParams` of one layer for `ops.moe_mlp`.
        An `NVFP4Tensor`, ``[n, k]`` for `ops.linear` or ``[e, n, k]`` for `ops.grouped_gemm`. An
        `FP8Tensor` and `DenseExperts` have only one layout and are returned as they are.
      scheme: as in the op: "checkpoint", a `Scheme` or its name. None (default) lets the weights
        and the device decide. Give "w4a4" for an `NVFP4Tensor` whose calls have an input scale.
      target, backend: where the op runs, and which kernel runs it.
      dtype: dtype of the tokens of the calls: bfloat16 (default), float16 or float32. Some backends
        accept only some of them.
      top_k: number of experts per token of the calls, 1 by default. It matters only above 32, which
        is the most that the kernels accept.

    Returns:
      Weights of the same class and values in the layout of the chosen backend.

    Raises:
      TypeError: if `params` is something else, such as an array or a module.
      ValueError: if shapes disagree, the scheme or a backend is unknown, or the scheme needs input
        scales that `params` lack.
      NoBackendError: if no backend can run the call.

    Example:
      >>> import jax
      >>> import jax_nvfp4_moe as nvfp4
      >>> params = nvfp4.testing.random_moe_params(
      ...     jax.random.key(0), num_experts=4, hidden=64, intermediate=32
      ... )
      >>> hopper = nvfp4.Target("cuda", (9, 0))
      >>> prepared = nvfp4.prepare(params, scheme="w4a16", target=hopper)
      >>> params.layout, prepared.layout
      ('canonical', 'mma_64x64')
      >>> weight = nvfp4.quantize(jax.random.normal(jax.random.key(1), (64, 64)))
      >>> nvfp4.prepare(weight, target=hopper).layout
      'mma_64x64'

    Reference:
      `numerics.layouts` defines the layouts.
    """
    how = {"scheme": scheme, "target": target, "backend": backend, "dtype": dtype, "top_k": top_k}
    if isinstance(params, FP8Tensor | DenseExperts):
        return params
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
    """Do what `prepare` does, and reuse the memory of the arrays in `params`.

    The arrays of `params` cannot be used afterwards. `prepare` needs the memory of a layer twice;
    this function needs it once. Arguments and errors are those of `prepare`.
    """
    how = {"scheme": scheme, "target": target, "backend": backend, "dtype": dtype, "top_k": top_k}
    return _convert_donated(params, _plan(params, **how).layout)


def _plan(params, **how):
    """Check `params` and return the plan for calls with them."""
    if isinstance(params, NVFP4Tensor):
        return _plan_tensor(params, **how)
    if not isinstance(params, MoEParams):
        raise TypeError(
            f"params: expected MoEParams or an NVFP4Tensor, got {type(params).__name__}. Quantize "
            "arrays first, with `quantize_experts` or `quantize`. Modules prepare their weights "
            "themselves"
        )
    check_moe_params(params)
    return plan_experts(params, checkpoint_scheme=find_checkpoint_scheme(params), **how)


def _plan_tensor(weight, *, scheme, top_k, **how):
    """Check a matrix, or those of a grouped GEMM, and return the plan for calls with it."""
    del top_k  # a GEMM has none
    if len(weight.shape) not in (2, 3):
        raise ValueError(f"params: expected shape [n, k] or [e, n, k], got {weight.shape}")
    check_blocks("params", weight.shape)
    # The input scale is an argument of the calls. Whoever asks for w4a4 has one.
    declared = Scheme.W4A4 if scheme == Scheme.W4A4 else Scheme.W4A16
    return plan_product(weight, checkpoint_scheme=declared, scheme=scheme, **how)
