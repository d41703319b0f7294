"""The short causal convolution in front of the recurrence of Mamba-2 and of gated delta nets."""

import jax.numpy as jnp
from jax import lax
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
    n, x = past.shape[1], x.astype(past.dtype)
    y = jnp.zeros(x.shape, jnp.float32)
    for j in range(n + 1):
        y += _window(x, past, j).astype(jnp.float32) * weight[:, j].reshape(1, 1, -1)
    # Which token each of the last inputs is; tokens before the first one are in the past.
    last = jnp.sum(present, axis=1)[:, None] + jnp.arange(-n, 0)[None, :]
    new, old = (
        jnp.take_along_axis(values, index[..., None], axis=1, mode="clip")
        for values, index in ((x, last), (past, last + n))
    )
    return y, jnp.where(last[..., None] < 0, old, new)


def _window(x, past, j):
    """Return the inputs that weight j multiplies: `past` from j on, then `x`, t in all.

    Two padded arrays are added instead of joined, because XLA would write the joined inputs to
    memory.
    """
    t, late = x.shape[1], past.shape[1] - j
    zero = jnp.zeros((), x.dtype)
    early = lax.pad(past, zero, ((0, 0, 0), (-j, t - late, 0), (0, 0, 0)))
    return early + lax.pad(x, zero, ((0, 0, 0), (late, -late, 0), (0, 0, 0)))
