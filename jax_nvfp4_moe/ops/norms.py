"""`add_rms_norm`: add to the residual stream of a model, and normalize the sum."""

from collections.abc import Sequence

import jax.numpy as jnp
from jaxtyping import Array, Float

from jax_nvfp4_moe.backends import reference
from jax_nvfp4_moe.backends.resolution import resolve
from jax_nvfp4_moe.numerics.arguments import check_arguments
from jax_nvfp4_moe.ops.derivative import with_derivative_of
from jax_nvfp4_moe.scheme import Problem, Target

_FLOATS = ("bfloat16", "float16", "float32")


@check_arguments
def add_rms_norm(
    x: Float[Array, "... h"],
    added: Float[Array, "... h"] | None,
    weight: Float[Array, " h"],
    *,
    eps: float,
    target: Target | None = None,
    backend: str | Sequence[str] | None = None,
) -> tuple[Float[Array, "... h"], Float[Array, "... h"]]:
    """Add, and normalize the sum by its root mean square.

    ``sum = x + added`` is rounded to the dtype of `x`. Then
    ``y = weight * sum / sqrt(mean(sum^2) + eps)`` over the last axis. The normalization runs in
    float32. The normalized values are cast to the dtype of `weight` and multiplied by it.

    Args:
      x: ``[..., h]``, bfloat16, float16 or float32.
      added: ``[..., h]`` of the dtype of `x`. None normalizes `x` itself.
      weight: ``[h]``, bfloat16, float16 or float32.
      eps: added to the mean of the squares.
      target: the `Target` to lower for; None (default) for the current device.
      backend: name of a backend, or a sequence of names that are tried in that order. None
        (default) chooses the first backend that accepts the problem.

    Returns:
      A tuple ``(sum, y)``, both ``[..., h]`` in the dtype of `x`. Without `added`, the first is
      `x`. Gradients flow to `x`, `added` and `weight`, in plain XLA.

    Raises:
      ValueError: if a shape or a dtype is wrong.
      NoBackendError: if no backend can run the call; the message lists every backend and its
        reason.

    Example:
      >>> import jax.numpy as jnp
      >>> import jax_nvfp4_moe as nvfp4
      >>> x, added = jnp.array([[1.0, -5.0]]), jnp.array([[3.0, 1.0]])
      >>> total, y = nvfp4.ops.add_rms_norm(x, added, jnp.ones(2), eps=0.0)
      >>> total.tolist(), y.round(3).tolist()
      ([[4.0, -4.0]], [[1.0, -1.0]])
    """
    _check(x, added, weight)
    target = target or Target.current()
    problem = Problem("add_rms_norm", None, target, x.dtype.name, hidden=x.shape[-1])
    plan = resolve(problem, backend=backend)
    rows = "... _, ... _, - -> ... _, ... _"
    run = with_derivative_of(reference.add_rms_norm, plan.lower, rows, eps=eps)
    return run(x, added, jnp.asarray(weight))


def _check(x, added, weight):
    """Raise a ValueError that names the argument which does not fit."""
    if x.ndim < 1 or not x.shape[-1] or x.dtype.name not in _FLOATS:
        raise ValueError(f"x: expected {_words()} [..., h], got {x.dtype.name} {x.shape}")
    if added is not None and (added.shape, added.dtype) != (x.shape, x.dtype):
        raise ValueError(
            f"added: expected {x.dtype.name} {x.shape} as x has, got {added.dtype.name} "
            f"{added.shape}"
        )
    if weight.shape != x.shape[-1:] or weight.dtype.name not in _FLOATS:
        raise ValueError(
            f"weight: expected {_words()} {x.shape[-1:]}, got {weight.dtype.name} {weight.shape}"
        )


def _words():
    return f"{', '.join(_FLOATS[:-1])} or {_FLOATS[-1]}"
