"""Queries that grow with their position, which keeps the attention of long contexts sharp.

Source: arXiv:2501.19399; `modeling_llama4` and `modeling_mistral4` of transformers.
"""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int32


def grow(
    q: Float[Array, "b t n d"], positions: Int32[Array, "b t"], scale: float, length: float
) -> Float[Array, "b t n d"]:
    """Return ``q * (1 + scale * log(1 + floor(position / length)))``, computed in float32.

    Args:
      q: the queries ``[b, t, n, d]``.
      positions: int32 ``[b, t]``.
      scale: the growth for each factor of e in the position.
      length: the position from which queries grow.
    """
    steps = jnp.floor(positions.astype(jnp.float32) / length)
    factors = 1.0 + scale * jnp.log1p(steps)
    return (q.astype(jnp.float32) * factors[:, :, None, None]).astype(q.dtype)
