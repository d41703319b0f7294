"""Products of heads with the matrices of latent attention: XLA's dot, or our kernels for few rows.

`nn.attention` calls them. The matrix of a head expands a latent to its keys or values.
Instead of expanding latents, queries are multiplied by the matrices of keys, and the results of
attention by the matrices of values.
"""

import dataclasses
from typing import Any

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int32

from jax_nvfp4_moe.backends.cuda import HEAD_PRODUCT_ROWS, HEAD_PRODUCTS_CUDA
from jax_nvfp4_moe.backends.latents import rotate_key
from jax_nvfp4_moe.backends.resolution import unavailable_for
from jax_nvfp4_moe.numerics.rope import Rope
from jax_nvfp4_moe.ops.dense import precision_for
from jax_nvfp4_moe.ops.derivative import with_derivative_of
from jax_nvfp4_moe.scheme import Problem, Target


def absorb_queries(
    q: Float[Array, "b t n w"],
    keys: Float[Array, "n p k"],
    positions: Int32[Array, "b t"],
    *,
    rope: Rope | None,
    interleaved: bool,
    target: Target | None = None,
) -> Float[Array, "b t n d"]:
    """Return queries in the space of the latents: ``q[..., :p] @ keys``, then rotated channels.

    Args:
      q: queries ``[b, t, n, p + e]``, of which the last e channels are not rotated yet.
      keys: matrix that expands a latent of k channels to the key of each head.
      positions: position of each token.
      rope: parameters of the rotation, with ``e/2`` frequencies; None for none.
      interleaved: whether the two channels of a rotated pair are adjacent in `q`.
      target: the `Target` to lower for; None (default) for the current device.

    Returns:
      ``[b, t, n, k + e]`` in the dtype of `q`. Gradients flow in plain XLA.
    """
    p, k = keys.shape[1:]
    run = _find_kernel("absorb_queries", q, keys, (p, k, q.shape[3] - p), target)
    options = {"rope": rope, "interleaved": interleaved}
    rows = "b t, -, b t -> b t"
    return with_derivative_of(_absorb, run or _absorb, rows, **options)(q, keys, positions)


def expand_values(
    x: Float[Array, "b t n k"], values: Float[Array, "n d k"], *, target: Target | None = None
) -> Float[Array, "b t n d"]:
    """Return ``x @ values.T`` for each head: the values for sums of latents.

    Args:
      x: weighted sums of latents, in the dtype of the result.
      values: matrix that expands a latent of k channels to the value of each head.
      target: the `Target` to lower for; None (default) for the current device.

    Returns:
      ``[b, t, n, d]``. Gradients flow in plain XLA.
    """
    run = _find_kernel("expand_values", x, values, (values.shape[1], values.shape[2], 0), target)
    return with_derivative_of(_expand, run or _expand, "b t, - -> b t")(x, values)


def _find_kernel(op: str, x: Any, matrices: Any, widths, target):
    """Return the kernel for few rows, or None if XLA's dot computes the call."""
    target, rows = target or Target.current(), x.shape[0] * x.shape[1]
    few = isinstance(rows, int) and 0 < rows <= HEAD_PRODUCT_ROWS
    if not few or x.dtype != matrices.dtype:
        return None
    problem = Problem(op, None, target, x.dtype.name, head_widths=widths)
    problem = dataclasses.replace(problem, unavailable=unavailable_for(target))
    record = HEAD_PRODUCTS_CUDA
    return None if record.can.reason_against(problem) else record.lower[op]


def _absorb(q, keys, positions, *, rope, interleaved):
    plain, turning = jnp.split(q, [keys.shape[1]], axis=-1)
    turned = rotate_key(turning, positions, rope, interleaved)
    return jnp.concatenate([_each_head(plain, keys, contracted=1), turned], axis=-1)


def _expand(x, values):
    return _each_head(x, values, contracted=2)


def _each_head(x: Float[Array, "b t n k"], matrix, contracted: int) -> Float[Array, "b t n m"]:
    """Multiply each head by its matrix in ``matrix [n, ., .]``, summing over axis `contracted`."""
    y = lax.dot_general(
        x,
        matrix,
        (((3,), (contracted,)), ((2,), (0,))),
        precision=precision_for(x.dtype),
        preferred_element_type=jnp.float32,
    )
    return jnp.moveaxis(y, 0, 2).astype(x.dtype)
