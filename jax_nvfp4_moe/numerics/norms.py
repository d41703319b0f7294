"""RMS norm and layer norm as pure functions; both compute in float32."""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from jax_nvfp4_moe.numerics.casts import cast, compute


@functools.partial(jax.jit, inline=True, static_argnames=("eps",))
def normalize(x, weight, eps: float, mean=None):
    """Return ``weight * x / sqrt(mean(x^2) + eps)``, in the dtype of `x`.

    Args:
      x: ``[..., h]``.
      weight: ``[h]``, or ``[n, h]`` with one row for each of n heads.
      eps: added to the mean.
      mean: mean of the squares, float32 ``[..., 1]``. None computes it from `x`.
    """
    wide, axes = x.astype(jnp.float32), range(x.ndim - weight.ndim)
    mean = mean_square(x) if mean is None else mean
    normal = cast(wide * lax.rsqrt(mean + eps), weight.dtype)
    return cast(compute(jnp.multiply, normal, jnp.expand_dims(weight, axes)), x.dtype)


@functools.partial(jax.jit, inline=True, static_argnames=("eps",))
def normalize_plainly(x: Float[Array, "... h"], eps: float) -> Float[Array, "... h"]:
    """Return ``x / sqrt(mean(x^2) + eps)`` over the last axis, in the dtype of `x`.

    Args:
      x: ``[..., h]``. The computation is in float32.
      eps: added to the mean.
    """
    return cast(x.astype(jnp.float32) * lax.rsqrt(mean_square(x) + eps), x.dtype)


@functools.partial(jax.jit, inline=True, static_argnames=("eps",))
def layer_normalize(x: Float[Array, "... h"], weight, bias, eps: float) -> Float[Array, "... h"]:
    """Return ``weight * (x - mean(x)) / sqrt(var(x) + eps) + bias``, in the dtype of `x`.

    Args:
      x: ``[..., h]``. Mean and variance are those of its last axis, in float32.
      weight: ``[h]``.
      bias: ``[h]``, or None for no bias.
      eps: added to the variance.

    Source: Ba et al., "Layer Normalization", arXiv:1607.06450.
    """
    wide = x.astype(jnp.float32)
    wide = wide - jnp.mean(wide, axis=-1, keepdims=True)
    normal = wide * lax.rsqrt(mean_square(wide) + eps)
    axes = range(x.ndim - 1)
    normal = normal * jnp.expand_dims(weight.astype(jnp.float32), axes)
    if bias is not None:
        normal = normal + jnp.expand_dims(bias.astype(jnp.float32), axes)
    return cast(normal, x.dtype)


@functools.partial(jax.jit, inline=True)
def mean_square(x: Float[Array, "... h"]) -> Float[Array, "... 1"]:
    """Return ``mean(x^2)`` over the last axis, in float32."""
    return jnp.mean(jnp.square(x.astype(jnp.float32)), axis=-1, keepdims=True)
