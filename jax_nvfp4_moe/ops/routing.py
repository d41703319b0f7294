"""route: from router logits to the experts of each token and their weights."""

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int32

from jax_nvfp4_moe.backends.resolution import resolve
from jax_nvfp4_moe.numerics.routing import Router, check_experts, weigh
from jax_nvfp4_moe.scheme import Problem, Target


def route(
    router: Router,
    logits: Float[Array, "t e"],
    bias: Float[Array, " e"] | None = None,
    *,
    target: Target | None = None,
    backend: str | Sequence[str] | None = None,
) -> tuple[Int32[Array, "t top_k"], Float[Array, "t top_k"]]:
    """Choose `top_k` experts for each token, best first, and their weights.

    Gradients flow from the weights to the logits, with the choice of experts held fixed.

    Args:
      router: how to route; see `numerics.routing.Router`.
      logits: ``[t, e]``; computed in float32.
      bias: score correction ``[e]``, or None.
      target: the device to lower for; the current one where None.
      backend: name of a record; a sequence of names, tried in that order; None to choose.

    Returns:
      expert_ids int32 ``[t, top_k]`` and expert_weights float32 ``[t, top_k]``.

    Raises:
      ValueError: shapes disagree, there are fewer experts than `top_k`, or they do not fill the
        groups.
      NoBackendError: no backend can run this; says why, one by one.

    Reference:
      `numerics.routing.route` defines the result, up to the rounding of scores.
    """
    if logits.ndim != 2:
        raise ValueError(f"logits: expected shape [t, e], got {logits.shape}")
    e = logits.shape[1]
    if bias is not None and bias.shape != (e,):
        raise ValueError(f"bias: expected shape {(e,)}, got {bias.shape}")
    check_experts(router, e)
    target = target or Target.current()
    problem = Problem("route", None, target, "float32", num_experts=e, top_k=router.top_k)
    plan = resolve(problem, backend=backend)
    bias = None if bias is None else bias.astype(jnp.float32)
    return _differentiable(plan.lower, router, logits.astype(jnp.float32), bias)


# A kernel has no derivative of its own; that of the weights needs the ids it chose and no more.
@functools.partial(jax.custom_jvp, nondiff_argnums=(0, 1))
def _differentiable(lower, router, logits, bias):
    return lower(router, logits, bias)


@_differentiable.defjvp
def _differentiate(lower, router, primals, tangents):
    """Take the tangent of the weights at the ids that the primal chose."""
    ids, weights = _differentiable(lower, router, *primals)
    _, tangent = jax.jvp(lambda logits: weigh(router, logits, ids), primals[:1], tangents[:1])
    return (ids, weights), (np.zeros(ids.shape, jax.dtypes.float0), tangent)
