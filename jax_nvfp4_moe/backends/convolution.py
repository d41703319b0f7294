"""`causal_convolution` in jnp: the reference."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int32

from jax_nvfp4_moe.backends.attention import PADDING
from jax_nvfp4_moe.numerics.convolution import convolve


def causal_convolution(
    x: Float[Array, "b t n"],
    positions: Int32[Array, "b t"],
    inputs: Float[Array, "b taps-1 c"],
    *,
    weight: Float[Array, "c taps"],
    bias: Float[Array, " c"] | None,
    widths: tuple[int, ...],
    first: int = 0,
    heads: int = 1,
    stride: int | None = None,
    activation: Callable = jax.nn.silu,
) -> tuple[tuple[Float[Array, "b t part"], ...], Float[Array, "b taps-1 c"]]:
    """Compute `ops.causal_convolution`; `activation` is what follows the convolution."""
    stride = sum(widths) if stride is None else stride
    x = x[..., first : first + heads * stride]
    if heads == 1:
        x = x[..., : sum(widths)]
    else:
        each = x.reshape(*x.shape[:-1], heads, stride)[..., : sum(widths)]
        parts = jnp.split(each, _ends(widths), axis=-1)
        x = jnp.concatenate([lax.collapse(part, 2) for part in parts], axis=-1)
    mixed, inputs = convolve(x, inputs, weight, positions < PADDING)
    if bias is not None:
        mixed = mixed + bias[None, None]
    ends = [heads * end for end in _ends(widths)]
    return tuple(jnp.split(activation(mixed), ends, axis=-1)), inputs


def _ends(widths):
    """Return where all parts but the last one end."""
    return [sum(widths[: i + 1]) for i in range(len(widths) - 1)]
