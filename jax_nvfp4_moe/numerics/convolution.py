"""The short causal convolution in front of the recurrence of Mamba-2 and of gated delta nets."""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float


def convolve(
    x: Float[Array, "b t c"],
    past: Float[Array, "b n c"],
    weight: Float[Array, "c n+1"],
    present: Bool[Array, "b t"],
) -> tuple[Float[Array, "b t c"], Float[Array, "b n c"]]:
    """Convolve each channel with its weights: ``y_t = sum_j weight_j x_{t-n+j}``, j = 0, ..., n.

    Args:
      x: inputs ``[b, t, c]``.
      past: the n inputs before `x`, ``[b, n, c]``; zeros at the start of a text.
      weight: ``[c, n + 1]``, one row per channel. The last column multiplies the newest token.
      present: bool ``[b, t]``, False for padding, which must follow all tokens of its row.

    Returns:
      The results, float32 ``[b, t, c]``, and the last n inputs of each row, ``[b, n, c]`` in the
      dtype of `past`. Padding does not count as input.
    """
    t, count = x.shape[1], weight.shape[1]
    inputs = jnp.concatenate([past, x.astype(past.dtype)], axis=1)
    y = jnp.zeros(x.shape, jnp.float32)
    for j in range(count):
        y += inputs[:, j : j + t].astype(jnp.float32) * weight[:, j].reshape(1, 1, -1)
    last = jnp.sum(present, axis=1)[:, None] + jnp.arange(count - 1)[None, :]
    return y, jnp.take_along_axis(inputs, last[..., None], axis=1)
