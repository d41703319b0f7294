"""The short causal convolution before the recurrence of Mamba-2 and of gated delta nets."""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float


def convolve(
    x: Float[Array, "b t c"],
    past: Float[Array, "b n c"],
    weight: Float[Array, "c n+1"],
    present: Bool[Array, "b t"],
) -> tuple[Float[Array, "b t c"], Float[Array, "b n c"]]:
    """Convolve each channel with its weights: ``y_t = sum_j weight_j x_{t-n+j}``, j from 0 to n.

    Args:
      x: inputs.
      past: the n inputs before them, zeros at the start.
      weight: of each channel; the last multiplies the newest token.
      present: False for padding, which is behind all other tokens of its row.

    Returns:
      float32 results, and the last inputs of each row without its padding.
    """
    t, count = x.shape[1], weight.shape[1]
    inputs = jnp.concatenate([past, x.astype(past.dtype)], axis=1)
    y = jnp.zeros(x.shape, jnp.float32)
    for j in range(count):
        y += inputs[:, j : j + t].astype(jnp.float32) * weight[:, j].reshape(1, 1, -1)
    last = jnp.sum(present, axis=1)[:, None] + jnp.arange(count - 1)[None, :]
    return y, jnp.take_along_axis(inputs, last[..., None], axis=1)
