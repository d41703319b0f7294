"""Rotary position embedding."""

import dataclasses

import jax.numpy as jnp
from jaxtyping import Array, Float, Int32


@dataclasses.dataclass(frozen=True)
class Rope:
    """Rotary embedding of one model; static.

    Attributes:
      frequencies: radians per position of each pair of channels, float32.
      scale: multiplies cosines and sines.
      attention_scale: multiplies the attention's logits (DeepSeek's ``mscale_all_dim``).
    """

    frequencies: tuple[float, ...]
    scale: float = 1.0
    attention_scale: float = 1.0


def rotate(x: Float[Array, "b t n d"], positions: Int32[Array, "b t"], rope: Rope):
    """Rotate channel pairs ``(i, i + r/2)`` by ``position * frequency_i``, in float32.

    Only the first r channels are rotated, two for each frequency of `rope`; the rest pass.
    """
    width = 2 * len(rope.frequencies)
    if width < x.shape[-1]:
        turned = rotate(x[..., :width], positions, rope)
        return jnp.concatenate([turned, x[..., width:]], axis=-1)
    angles = positions.astype(jnp.float32)[..., None] * jnp.asarray(
        rope.frequencies, jnp.float32
    ).reshape(1, 1, -1)
    cos, sin = (f(angles)[:, :, None, None, :] * rope.scale for f in (jnp.cos, jnp.sin))
    # Halves are turned over rather than concatenated, so that XLA fuses this into what reads it.
    halves = x.astype(jnp.float32).reshape(*x.shape[:-1], 2, -1)
    signs = jnp.array([-1.0, 1.0], jnp.float32).reshape(1, 1, 1, 2, 1)
    rotated = halves * cos + jnp.flip(halves, axis=-2) * (signs * sin)
    return rotated.reshape(x.shape).astype(x.dtype)
