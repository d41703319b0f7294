"""FP8 (E4M3) weights with one scale per matrix, row or group, and rounding of activations to FP8.

The value of a weight is ``w[n, k] = values[n, k] * scale[n]``, or ``values[n, k] * scale[n, k //
128]``. Each E4M3 value is exact in bfloat16 and in float16, and the product of two E4M3 values is
exact in float32.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax

from jax_nvfp4_moe.numerics.nvfp4 import amax, divide

LARGEST = 448.0  # the largest E4M3 value; the format has no infinities
GROUP = 128  # weights of a row that share a scale, if a row has several


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class FP8Tensor:
    """Matrices in FP8 (E4M3): ``w[..., n, k] = values[..., n, k] * scale[..., n]``.

    Attributes:
      values: float8_e4m3fn ``[..., n, k]``.
      scale: float32 ``[..., n]``, one scale per row. If a file stores one scale for the whole
        matrix, all rows have that scale. Or float32 ``[..., n, ceil(k / 128)]``, one scale for each
        128 weights of a row. If a file stores one scale for each 128 x 128 weights, the rows of a
        block have that scale.
    """

    values: jax.Array
    scale: jax.Array

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape ``[..., n, k]`` of the matrices."""
        return self.values.shape

    @property
    def has_groups(self) -> bool:
        """Whether a row has one scale for each 128 weights, and not one for all."""
        return self.scale.ndim == self.values.ndim

    def dequantize(self, dtype=jnp.float32) -> jax.Array:
        """Return the weights ``[..., n, k]``, computed in float32 and rounded once to `dtype`."""
        return (self.values.astype(jnp.float32) * self.scale_of_each()).astype(dtype)

    def scale_of_each(self) -> jax.Array:
        """Return the float32 scale of each weight, of a shape that broadcasts to the values."""
        if self.has_groups:
            return jnp.repeat(self.scale, GROUP, axis=-1)[..., : self.values.shape[-1]]
        return self.scale[..., None]


def round_fp8(x, scale, *, multiply_by_reciprocal: bool):
    """Round ``x / scale`` to E4M3.

    Ties round to even, and finite values saturate at 448. NaN and infinity become NaN.

    Args:
      x: array of any float dtype and shape.
      scale: float32, of a shape that broadcasts to `x`.
      multiply_by_reciprocal: if True, round ``x * (448 / amax)`` with ``amax = 448 * scale``, as
        ModelOpt does. If False, round the quotient ``x / scale``, as compressed-tensors does. The
        two results differ by a unit in the last place, which can change how a value between two
        E4M3 numbers rounds.

    Returns:
      float8_e4m3fn, of the shape of `x`.

    Source: `tensor_quant.fp8_eager` of nvidia-modelopt and `lifecycle.forward` of
    compressed-tensors.
    """
    x = x.astype(jnp.float32)
    scale = jnp.asarray(scale, jnp.float32)
    if multiply_by_reciprocal:
        scaled = x * divide(jnp.float32(LARGEST), scale * jnp.float32(LARGEST))
    else:
        scaled = divide(x, scale)
    rounded = jnp.clip(scaled, -LARGEST, LARGEST)
    # An infinity would saturate at 448, and the finite result would hide the error in that token.
    values = jnp.where(jnp.isfinite(x), rounded, jnp.nan).astype(jnp.float8_e4m3fn)
    # With xla_allow_excess_precision, XLA may remove a conversion to E4M3 that is followed by the
    # conversion back, and it does so on CUDA. The barrier keeps the rounding.
    return lax.optimization_barrier(values)


def dynamic_scale(x, axis):
    """Return ``max(|x|) / 448`` over `axis`, in float32.

    The reduced axes stay with size 1. The scale is 1 where all values are zero, because a scale of
    0 would divide 0 by 0.
    """
    largest = jnp.expand_dims(amax(x, axis), axis)
    return jnp.where(largest == 0, jnp.float32(1), divide(largest, jnp.float32(LARGEST)))


def fake_round_fp8(x, scale, *, multiply_by_reciprocal: bool):
    """Return ``round_fp8(x, scale) * scale`` in float32: `x` rounded to E4M3 and back."""
    return (
        round_fp8(x, scale, multiply_by_reciprocal=multiply_by_reciprocal).astype(jnp.float32)
        * scale
    )
