"""`add_rms_norm`: add to the residual stream of a model, and normalize the sum."""

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from jax_nvfp4_moe.backends.kernel_call import kernel_call
from jax_nvfp4_moe.backends.record import CUDA, Backend, Kernel
from jax_nvfp4_moe.numerics.norms import normalize
from jax_nvfp4_moe.ops.checks import check_floats, check_shapes
from jax_nvfp4_moe.ops.documentation import public_op
from jax_nvfp4_moe.ops.running import run
from jax_nvfp4_moe.scheme import Target


@public_op
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
      target, backend: where the op runs, and which kernel runs it.

    Returns:
      A tuple ``(sum, y)``, both ``[..., h]`` in the dtype of `x`. Without `added`, the first is
      `x`. Gradients flow to `x`, `added` and `weight`, in plain XLA.

    Raises:
      ValueError: if a shape or a dtype is wrong.
      NoBackendError: if no backend can run the call.

    Example:
      >>> import jax.numpy as jnp
      >>> import jax_nvfp4_moe as nvfp4
      >>> x, added = jnp.array([[1.0, -5.0]]), jnp.array([[3.0, 1.0]])
      >>> total, y = nvfp4.ops.add_rms_norm(x, added, jnp.ones(2), eps=0.0)
      >>> total.tolist(), y.round(3).tolist()
      ([[4.0, -4.0]], [[1.0, -1.0]])
    """
    _check(x, added, weight)
    return run(
        "add_rms_norm",
        (x, added, jnp.asarray(weight)),
        "... _, ... _, - -> ... _, ... _",
        target=target,
        backend=backend,
        options={"eps": eps},
        dtype=x.dtype.name,
        hidden=x.shape[-1],
    )


def _check(x, added, weight):
    """Raise a ValueError that names the argument which does not fit."""
    check_floats(x=x, weight=weight)
    if x.ndim < 1 or not x.shape[-1]:
        raise ValueError(f"x: expected [..., h] with h above 0, got {x.shape}")
    if added is not None and (added.shape, added.dtype) != (x.shape, x.dtype):
        raise ValueError(
            f"added: expected {x.dtype.name} {x.shape} as x has, got {added.dtype.name} "
            f"{added.shape}"
        )
    check_shapes({"weight": (weight, x.shape[-1:])})


@functools.partial(jax.jit, inline=True, static_argnames=("eps",))
def meaning(x, added, weight, *, eps):
    """Add and normalize; `ops.add_rms_norm` describes the result."""
    if added is not None:
        x = x + added
    return x, normalize(x, weight, eps)


def _lower(ffi_target, x, added, weight, *, eps):
    """Lower `add_rms_norm` to an FFI target."""
    rows = x.reshape(-1, x.shape[-1])
    nothing = jnp.zeros((0, 0), x.dtype)
    operand = nothing if added is None else added.reshape(rows.shape)
    outputs = (
        jax.ShapeDtypeStruct(operand.shape, x.dtype),
        jax.ShapeDtypeStruct(rows.shape, x.dtype),
    )
    total, y = kernel_call(ffi_target, outputs)(rows, operand, weight, eps=np.float32(eps))
    return (x if added is None else total.reshape(x.shape)), y.reshape(x.shape)


NORM_CUDA = Backend(
    "norm_cuda",
    {"add_rms_norm": Kernel(_lower, "nvfp4_add_rms_norm_cuda")},
    (CUDA,),
    max_extent="MAX_EXTENT",
)


BACKENDS = (NORM_CUDA,)
MEANINGS = {"add_rms_norm": meaning}
