"""Add a change to a stored weight, and round the sum to the format of the weight.

What a file shares among many weights stays: global scales of NVFP4, and all scales of FP8. A weight
to which zeros are added therefore keeps its values, whatever algorithm chose its scales.
"""

import dataclasses
from typing import Any

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from jax_nvfp4_moe.numerics.fp8 import FP8Tensor, round_fp8
from jax_nvfp4_moe.numerics.layouts import CANONICAL
from jax_nvfp4_moe.numerics.nvfp4 import (
    BLOCK,
    E2M1_MAX,
    E4M3_MAX,
    amax,
    decode_scale,
    divide,
    encode_blocks,
    pack,
)
from jax_nvfp4_moe.numerics.tensor import NVFP4Tensor


def add_rounded(weight: Any, change: Float[Array, "... n k"]) -> Any:
    """Return ``round(dequantize(weight) + change)`` in the format of `weight`.

    * NVFP4: global scales stay. A block keeps its block scale s8, unless a value of the sum lies
      beyond ``6 s8 g``. Then it gets ``s8 = e4m3(min(amax / (6 g), 448))``, as in `quantize`. The
      codes are ``e2m1(sum / (s8 g))``.
    * FP8: all scales stay, and sums beyond ``448 * scale`` saturate.
    * A float dtype: the sum is rounded to this dtype.

    Args:
      weight: `NVFP4Tensor` in any layout, `FP8Tensor`, or a float array; ``[..., n, k]``.
      change: float array ``[..., n, k]``, taken as float32.

    Returns:
      What `weight` is, with arrays of the same shapes and in the same layout.
    """
    if isinstance(weight, NVFP4Tensor):
        return _to_nvfp4(weight.to_layout(CANONICAL), change).to_layout(weight.layout)
    if isinstance(weight, FP8Tensor):
        total = _add(weight.dequantize(), change)
        scale = weight.scale_of_each()
        scale = jnp.where(scale == 0, 1.0, scale)  # 0 / 0 would give NaN, and 0 * 0 is the weight
        values = round_fp8(total, scale, multiply_by_reciprocal=False)
        return FP8Tensor(values, weight.scale)
    return _add(weight.astype(jnp.float32), change).astype(weight.dtype)


def _add(weight, change):
    """Return the float32 sum.

    The barrier keeps XLA from computing a product in either operand and the sum as one operation
    that rounds once. The sum would then depend on the program that contains it.
    """
    weight, change = lax.optimization_barrier((weight, change.astype(jnp.float32)))
    return weight + change


def _to_nvfp4(weight: NVFP4Tensor, change) -> NVFP4Tensor:
    """Return the sum in NVFP4, for a canonical weight."""
    total = _add(weight.dequantize(), change)
    blocks = total.reshape(*total.shape[:-1], -1, BLOCK)
    largest, stored = amax(blocks, -1), decode_scale(weight.block_scale)
    reach = jnp.float32(E2M1_MAX) * weight.per_row(weight.global_scale)
    found = divide(largest, jnp.where(largest == 0, 1.0, reach))
    found = decode_scale(jnp.minimum(found, jnp.float32(E4M3_MAX)).astype(jnp.float8_e4m3fn))
    grows = (found > jnp.abs(stored)) | jnp.isnan(found)
    block_scale = jnp.where(grows, found, stored).astype(jnp.float8_e4m3fn)
    made = dataclasses.replace(weight, block_scale=block_scale)
    codes = encode_blocks(blocks, made.scale()).reshape(total.shape)
    return dataclasses.replace(made, packed=pack(codes))
