"""RMSNorm."""

import jax.numpy as jnp
from flax import nnx
from jax import lax
from jaxtyping import Array, Float


class RMSNorm(nnx.Module):
    """``weight * x / sqrt(mean(x^2) + eps)`` over the last axis, float32 inside.

    The product with the weight is in the weight's dtype.

    Attributes:
      weight: `nnx.Param` ``[h]``.
      eps: static.
    """

    def __init__(self, weight: Float[Array, " h"], eps: float):
        """Make a norm of `weight` ``[h]``."""
        self.weight = nnx.Param(weight)
        self.eps = eps

    def __call__(
        self, x: Float[Array, "... h"], mean: Float[Array, "... 1"] | None = None
    ) -> Float[Array, "... h"]:
        """Normalize; the result has the dtype of `x`.

        Args:
          x: a vector, or the part of one that `weight` is for.
          mean: of the squares of the whole vector; None where `x` is that.
        """
        return normalize(x, self.weight.get_value(), self.eps, mean)


def normalize(x, weight, eps: float, mean=None):
    """Return ``weight * x / sqrt(mean(x^2) + eps)``, in the dtype of `x`.

    Args:
      x: ``[..., h]``.
      weight: ``[h]``, or ``[n, h]`` for n heads.
      eps: added to the mean.
      mean: of the squares, ``[..., 1]``; None: that of `x` over its last axis.
    """
    wide = x.astype(jnp.float32)
    mean = mean_square(x) if mean is None else mean
    normal = (wide * lax.rsqrt(mean + eps)).astype(weight.dtype)
    return (normal * jnp.expand_dims(weight, range(x.ndim - weight.ndim))).astype(x.dtype)


def mean_square(x: Float[Array, "... h"]) -> Float[Array, "... 1"]:
    """Return ``mean(x^2)`` over the last axis, in float32."""
    return jnp.mean(jnp.square(x.astype(jnp.float32)), axis=-1, keepdims=True)
