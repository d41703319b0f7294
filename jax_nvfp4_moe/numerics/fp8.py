"""FP8 (E4M3) as numbers: weights with one scale a matrix or a row, and the rounding of activations.

``w[n, k] = values[n, k] * scale[n]``. Products of two E4M3 values are exact in float32, and each
E4M3 value is exact in bfloat16 and float16.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax

from jax_nvfp4_moe.numerics.nvfp4 import amax, divide

LARGEST = 448.0  # E4M3 has no infinities


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class FP8Tensor:
    """Matrices in FP8: ``w[..., n, k] = values * scale``.

    Attributes:
      values: float8_e4m3fn ``[..., n, k]``.
      scale: float32 ``[..., n]``; where a file has one of the whole matrix, all are equal.
    """

    values: jax.Array
    scale: jax.Array

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape ``[..., n, k]``."""
        return self.values.shape

    def dequantize(self, dtype=jnp.float32) -> jax.Array:
        """Return the weights ``[..., n, k]``, computed in float32 and rounded once to `dtype`."""
        return (self.values.astype(jnp.float32) * self.scale[..., None]).astype(dtype)


def round_fp8(x, scale, *, multiply_by_reciprocal: bool):
    """Round ``x / scale`` to E4M3: ties to even, saturating at 448; NaN and infinity give NaN.

    Args:
      x: any float dtype.
      scale: float32, broadcast to `x`.
      multiply_by_reciprocal: round ``x * (448 / amax)`` with ``amax = 448 * scale``, as ModelOpt
        does; it
        differs from the quotient, which compressed-tensors takes, by a unit in the last place, and
        that can move a value that lies between two E4M3 numbers to the other.

    Source: `tensor_quant.fp8_eager` of nvidia-modelopt, `lifecycle.forward` of compressed-tensors.
    """
    x = x.astype(jnp.float32)
    scale = jnp.asarray(scale, jnp.float32)
    if multiply_by_reciprocal:
        scaled = x * divide(jnp.float32(LARGEST), scale * jnp.float32(LARGEST))
    else:
        scaled = divide(x, scale)
    rounded = jnp.clip(scaled, -LARGEST, LARGEST)
    # An infinity would saturate to an ordinary number, and hide what went wrong in its token.
    values = jnp.where(jnp.isfinite(x), rounded, jnp.nan).astype(jnp.float8_e4m3fn)
    # XLA may take a conversion and the one back for none (xla_allow_excess_precision); it does on
    # CUDA.
    return lax.optimization_barrier(values)


def dynamic_scale(x, axis):
    """Return ``amax(|x|) / 448`` in float32 over `axis`, kept; 1 where all are zero."""
    largest = jnp.expand_dims(amax(x, axis), axis)
    return jnp.where(largest == 0, jnp.float32(1), divide(largest, jnp.float32(LARGEST)))


def fake_round_fp8(x, scale, *, multiply_by_reciprocal: bool):
    """Round to E4M3 and back: float32 ``round_fp8(x, scale) * scale``."""
    return (
        round_fp8(x, scale, multiply_by_reciprocal=multiply_by_reciprocal).astype(jnp.float32)
        * scale
    )
