"""`route`: from router logits to the experts of each token and their weights; `shift_ids`."""

import dataclasses
import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int32

from jax_nvfp4_moe.backends.by_rows import by_rows
from jax_nvfp4_moe.backends.kernel_call import kernel_call
from jax_nvfp4_moe.backends.record import CUDA, Backend, Kernel
from jax_nvfp4_moe.numerics import routing
from jax_nvfp4_moe.numerics.auto_axes import on_auto_axes
from jax_nvfp4_moe.numerics.routing import (
    TINY,
    Router,
    check_experts,
    normalize_weights,
    weigh,
)
from jax_nvfp4_moe.numerics.varying import vary_together
from jax_nvfp4_moe.ops.documentation import public_op
from jax_nvfp4_moe.ops.running import find_plan
from jax_nvfp4_moe.scheme import Target


@public_op
def route(
    router: Router,
    logits: Float[Array, "t e"],
    bias: Float[Array, " e"] | None = None,
    *,
    target: Target | None = None,
    backend: str | Sequence[str] | None = None,
) -> tuple[Int32[Array, "t top_k"], Float[Array, "t top_k"]]:
    """Choose `top_k` experts for each token, best first, and compute their weights.

    By default, ``s = score(logits)``, the ids are those of the largest ``s + bias``, and
    ``weights = scaling * s[ids] / sum(s[ids])``. `Router` describes the other forms. Gradients flow
    from the weights to the logits, with the choice of experts held fixed.

    Args:
      router: the `Router` that says how to route.
      logits: ``[t, e]`` of any float dtype; the computation is in float32.
      bias: correction of the scores ``[e]``, which changes the choice but not the weights. None
        (default) for no correction.
      target, backend: where the op runs, and which kernel runs it.

    Returns:
      A tuple ``(expert_ids, expert_weights)``: int32 ``[t, top_k]`` and float32 ``[t, top_k]``.

    Raises:
      ValueError: if shapes disagree, the groups do not divide the experts, or the kept groups have
        fewer than `top_k` experts.
      NoBackendError: if no backend can run the call.

    Example:
      >>> import jax.numpy as jnp
      >>> import jax_nvfp4_moe as nvfp4
      >>> logits = jnp.array([[0.0, 2.0, 1.0, -1.0]])
      >>> ids, weights = nvfp4.ops.route(nvfp4.Router(top_k=2), logits)
      >>> ids.tolist(), [round(float(w), 3) for w in weights[0]]
      ([[1, 2]], [0.731, 0.269])

    Reference:
      `numerics.routing.route` defines the result, up to the rounding of scores.
    """
    if logits.ndim != 2:
        raise ValueError(f"logits: expected shape [t, e], got {logits.shape}")
    e = logits.shape[1]
    if bias is not None and bias.shape != (e,):
        raise ValueError(f"bias: expected shape {(e,)}, got {bias.shape}")
    check_experts(router, e)
    facts = {"dtype": "float32", "num_experts": e, "top_k": router.top_k}
    plan = find_plan("route", target=target, backend=backend, **facts)
    bias = None if bias is None else bias.astype(jnp.float32)
    run = functools.partial(_route, plan.lower, router)
    return on_auto_axes(run)(logits.astype(jnp.float32), bias)


def shift_ids(
    ids: Int32[Array, "t top_k"], first: Int32[Array, ""], *, target: Target | None = None
) -> Int32[Array, "t top_k"]:
    """Return ``ids - first``: the ids of experts, counted from the first one of a device.

    On a GPU it is a call of a chain (`ops.chain_calls`). The kernel of the router does its work, if
    nothing else reads the ids of the router.

    Args:
      ids: ids of experts.
      first: what they are counted from.
      target: where the op runs.
    """
    plan = find_plan("shift_ids", target=target, dtype="int32", top_k=ids.shape[1])
    return plan.lower(ids, first)


def _route(lower, router, logits, bias):
    """Return the ids, and the weights with their derivative."""
    logits, bias = vary_together((logits, bias))
    ids, weights = _choose(lower, router, *jax.tree.map(lax.stop_gradient, (logits, bias)))
    return ids, _with_derivative(router, logits, ids, weights)


def _choose(lower, router, logits, bias):
    """Return ids and weights as the lowered op computes them."""

    def run(router):
        return by_rows(functools.partial(lower, router), "t, - -> t, t")(logits, bias)

    if router.select == "near":  # the kernels do not know these weights
        ids, _ = run(dataclasses.replace(router, select="logits", scaling=1.0))
        return ids, weigh(router, logits, ids)
    if router.epsilon == TINY or not router.renormalize or router.select == "logits":
        return run(router)
    # The kernels know one epsilon. For another they choose the experts, and the weights are
    # divided here.
    plain = dataclasses.replace(router, renormalize=False, scaling=1.0, epsilon=TINY)
    ids, weights = run(plain)
    return ids, normalize_weights(router, weights) * router.scaling


# The kernels have no derivative. The derivative of the weights depends on the chosen ids only. Ids
# are no result of this function: the tangent of integers has a type that cannot vary between
# devices, and JAX would refuse it inside `jax.shard_map`.
@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _with_derivative(router, logits, ids, weights):
    """Return `weights`, with the derivative of `weigh`."""
    return weights


@_with_derivative.defjvp
def _differentiate(router, primals, tangents):
    """Compute the tangent of the weights for the ids that the forward pass chose."""
    logits, ids, weights = primals
    _, tangent = jax.jvp(lambda logits: weigh(router, logits, ids), (logits,), tangents[:1])
    return weights, tangent


def _lower(ffi_target, router, logits, bias):
    """Lower `route` to an FFI target.

    Routing by logits uses no correction, no groups and no renormalization, so the call then passes
    neutral values.
    """
    shape, by_score = (logits.shape[0], router.top_k), router.select == "scores"
    outputs = (
        jax.ShapeDtypeStruct(shape, jnp.int32),
        jax.ShapeDtypeStruct(shape, jnp.float32),
    )
    ids, weights = kernel_call(ffi_target, outputs)(
        logits,
        bias if bias is not None and by_score else jnp.zeros(0, jnp.float32),
        score=router.score,
        select_logits=not by_score,
        renormalize=router.renormalize and by_score,
        num_groups=np.int32(router.num_groups if by_score else 1),
        groups_kept=np.int32(router.groups_kept if by_score else 1),
        scaling=np.float32(router.scaling),
    )
    return ids, weights


def _lower_shift(ffi_target, ids, first):
    """Lower `shift_ids` to an FFI target."""
    return kernel_call(ffi_target, jax.ShapeDtypeStruct(ids.shape, ids.dtype))(ids, first)


ROUTE_CUDA = Backend(
    "route_cuda",
    {"route": Kernel(_lower, "nvfp4_route_cuda")},
    (CUDA,),
    dtypes=("float32",),
    max_experts="MAX_EXPERTS",
    max_top_k="MAX_TOP_K",
)
SHIFT_IDS_CUDA = Backend(
    "shift_ids_cuda",
    {"shift_ids": Kernel(_lower_shift, "nvfp4_shift_ids_cuda")},
    (CUDA,),
    dtypes=("int32",),
    max_top_k="MAX_TOP_K",
)


BACKENDS = (ROUTE_CUDA, SHIFT_IDS_CUDA)
MEANINGS = {"route": routing.route}
OF_XLA = {"shift_ids": jnp.subtract}
