"""Casts to fewer bits that every program has.

With ``xla_allow_excess_precision``, its default, XLA drops a cast from float32 and the cast back if
it computes both in one fused kernel. Which operations it fuses depends on the whole program. The
same function would therefore round in one program, and not in another. For example, a decoding step
with `ops.chain_calls` would have other bits than without. XLA keeps `lax.reduce_precision`.
"""

from collections.abc import Callable

import jax.numpy as jnp
from jax import lax
from jax.typing import ArrayLike, DTypeLike
from jaxtyping import Array

_FLOAT32_EXPONENT = 8  # bits
_HALVES = (jnp.bfloat16, jnp.float16)


def cast(x: Array, dtype: DTypeLike) -> Array:
    """Return ``x.astype(dtype)``. Casts from float32 to 16 bits round in every program.

    Use it for a result that other operations of XLA read in float32. Kernels read what is in
    memory, so that their operands need no more than `astype`.

    Args:
      x: array of any dtype.
      dtype: the dtype of the result.
    """
    if x.dtype == jnp.float32 and dtype in _HALVES:
        info = jnp.finfo(dtype)
        # The exponent keeps its bits: `reduce_precision` would set subnormal numbers to zero.
        rounded = lax.reduce_precision(x, _FLOAT32_EXPONENT, info.nmant)
        # Numbers that are subnormal in float16 have fewer bits there, and must not round twice.
        has_fewer = info.nexp < _FLOAT32_EXPONENT
        x = jnp.where(jnp.abs(x) < float(info.tiny), x, rounded) if has_fewer else rounded
    return x.astype(dtype)


def compute(operation: Callable[..., Array], *operands: ArrayLike) -> Array:
    """Return ``operation(*operands)``, which rounds to the dtype of the operands in every program.

    A GPU before compute capability 9.0 adds and multiplies numbers of 16 bits in float32, with
    casts around that. Sums and products in float32, rounded once, have the same bits.

    Args:
      operation: elementwise, such as `jnp.add`.
      *operands: what `operation` takes.
    """
    dtype = jnp.result_type(*operands)
    wide = (jnp.asarray(operand, dtype).astype(jnp.float32) for operand in operands)
    return cast(operation(*wide), dtype) if dtype in _HALVES else operation(*operands)
