"""Rotary position embedding.

Source: Su et al., "RoFormer: Enhanced Transformer with Rotary Position Embedding",
arXiv:2104.09864.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int32

from jax_nvfp4_moe.numerics.casts import cast


@dataclasses.dataclass(frozen=True)
class Rope:
    """Parameters of a model's rotary embedding; static.

    Attributes:
      frequencies: radians per position for each pair of channels.
      scale: factor on the cosines and sines. Defaults to 1.
      attention_scale: factor on the attention logits (``mscale_all_dim`` of DeepSeek). Defaults to
        1.
    """

    frequencies: tuple[float, ...]
    scale: float = 1.0
    attention_scale: float = 1.0


@functools.partial(jax.jit, inline=True, static_argnames=("rope",))
def rotate(x: Float[Array, "b t n d"], positions: Int32[Array, "b t"], rope: Rope):
    """Rotate each channel pair ``(i, i + r/2)`` by ``position * frequency_i``, in float32.

    Args:
      x: queries or keys ``[b, t, n, d]``, n heads of d channels.
      positions: int32 ``[b, t]``.
      rope: parameters with ``r/2`` frequencies. Only the first r channels are rotated; the others
        pass unchanged.

    Returns:
      ``[b, t, n, d]`` in the dtype of `x`.
    """
    width = 2 * len(rope.frequencies)
    if width < x.shape[-1]:
        turned = rotate(x[..., :width], positions, rope)
        return jnp.concatenate([turned, x[..., width:]], axis=-1)
    angles = positions.astype(jnp.float32)[..., None] * jnp.asarray(
        rope.frequencies, jnp.float32
    ).reshape(1, 1, -1)
    cos, sin = (f(angles)[:, :, None, None, :] * rope.scale for f in (jnp.cos, jnp.sin))
    # Flip the halves instead of concatenating them: XLA can fuse a flip into its consumer.
    halves = x.astype(jnp.float32).reshape(*x.shape[:-1], 2, width // 2)
    signs = jnp.array([-1.0, 1.0], jnp.float32).reshape(1, 1, 1, 2, 1)
    rotated = halves * cos + jnp.flip(halves, axis=-2) * (signs * sin)
    return cast(rotated.reshape(x.shape), x.dtype)


def pair_halves(x: Float[Array, "... d"]) -> Float[Array, "... d"]:
    """Move the two channels of each adjacent pair half a width apart, where `rotate` pairs them."""
    return jnp.concatenate([x[..., 0::2], x[..., 1::2]], axis=-1)


@functools.partial(jax.jit, inline=True, static_argnames=("rope", "back"))
def rotate_last(x: Float[Array, "b t n d"], positions: Int32[Array, "b t"], rope: Rope, back=False):
    """Rotate adjacent pairs of the last channels by ``position * frequency``, in float32.

    Args:
      x: ``[b, t, n, d]``, n heads of d channels. With r frequencies, the last 2r channels are
        rotated, and the others pass unchanged.
      positions: int32 ``[b, t]``.
      rope: the frequencies. Pair i has the channels ``2i`` and ``2i + 1`` of the last 2r.
      back: whether to rotate in the other direction, by ``-position * frequency``. Static; defaults
        to False.

    Returns:
      ``[b, t, n, d]`` in the dtype of `x`, with all channels in their places.
    """
    kept = x.shape[-1] - 2 * len(rope.frequencies)
    angles = positions.astype(jnp.float32)[..., None] * jnp.asarray(
        rope.frequencies, jnp.float32
    ).reshape(1, 1, -1)
    cos, sin = (f(angles)[:, :, None, :] * rope.scale for f in (jnp.cos, jnp.sin))
    sin = -sin if back else sin
    first, second = (x[..., start::2].astype(jnp.float32) for start in (kept, kept + 1))
    turned = jnp.stack([first * cos - second * sin, first * sin + second * cos], axis=-1)
    turned = cast(lax.collapse(turned, 3), x.dtype)
    return jnp.concatenate([x[..., :kept], turned], axis=-1)
