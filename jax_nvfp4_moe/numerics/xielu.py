"""xIELU: an activation whose two halves have learned slopes.

Source: arXiv:2411.13010; `XIELUActivation` of transformers.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float


def xielu(
    x: Float[Array, "... i"],
    alpha_p: Float[Array, " 1"],
    alpha_n: Float[Array, " 1"],
    beta: Float[Array, ""] | float = 0.5,
    eps: Float[Array, ""] | float = -1e-6,
) -> Float[Array, "... i"]:
    """Apply xIELU in float32.

    With ``a = softplus(alpha_p)`` and ``b = beta + softplus(alpha_n)``, the result is ``a x^2 +
    beta x`` for positive x, and ``b (exp(min(x, eps)) - 1 - x) + beta x`` for the others.

    Args:
      x: ``[..., i]``, any float dtype.
      alpha_p: ``[1]``, learned, for positive inputs.
      alpha_n: ``[1]``, learned, for the others.
      beta: the slope at 0.
      eps: the largest exponent, a negative number.

    Returns:
      float32 ``[..., i]``.
    """
    x = x.astype(jnp.float32)
    a, b = (jax.nn.softplus(alpha.reshape(())) for alpha in (alpha_p, alpha_n))
    positive = a * jnp.square(x)
    negative = (beta + b) * (jnp.expm1(jnp.minimum(x, eps)) - x)
    return jnp.where(x > 0, positive, negative) + beta * x
