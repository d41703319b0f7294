"""NVFP4 as numbers: E2M1 codes, E4M3 block scales, one float32 global scale; pure jnp.

A weight is ``code * (block_scale * global_scale)`` with one E4M3 ``block_scale`` for each 16
consecutive elements of a row. Two codes share a byte, the even element in the low nibble.
"""

import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jax import lax
from jaxtyping import Array, Float, UInt8

BLOCK = 16
E2M1_MAX = 6.0
E4M3_MAX = 448.0
SCALE_RANGE = E2M1_MAX * E4M3_MAX  # amax / 2688 is the global scale that uses all of E4M3

# Value of each 4-bit code; bit 3 is the sign (OCP Microscaling Formats v1.0, section 5.3.3).
CODE_VALUES = np.array(
    [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0],
    np.float32,
)

# Bits of the float32 value of each byte of a block scale. As bits, because two of the values are
# NaN: `jax_debug_nans` would raise at a constant that holds them.
_SCALE_BITS = (
    np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32).view(np.uint32)
)


def pack(codes: UInt8[Array, "... k"]) -> UInt8[Array, "... half_k"]:
    """Pack two 4-bit codes into a byte: ``packed[i] = codes[2 i] | codes[2 i + 1] << 4``.

    Args:
      codes: values 0 to 15, last axis even. Larger values are not checked.

    Raises:
      ValueError: the last axis is odd.
    """
    if codes.shape[-1] % 2:
        raise ValueError(f"codes: expected an even last axis, got shape {codes.shape}")
    return codes[..., 0::2] | (codes[..., 1::2] << jnp.uint8(4))


def unpack(packed: UInt8[Array, "... half_k"]) -> UInt8[Array, "... k"]:
    """Unpack bytes to 4-bit codes; the inverse of `pack`."""
    pairs = jnp.stack([packed & jnp.uint8(15), packed >> jnp.uint8(4)], axis=-1)
    return pairs.reshape(*packed.shape[:-1], 2 * packed.shape[-1])


def decode(codes: UInt8[Array, "... k"]) -> Float[Array, "... k"]:
    """Return the float32 value of each 4-bit code."""
    return jnp.asarray(CODE_VALUES)[codes]


def decode_scale(block_scale: Array) -> Float[Array, "..."]:
    """Return the float32 value of each float8_e4m3fn block scale.

    By table, not by cast: XLA may take a cast to E4M3 and back for excess precision and drop both.
    """
    bits = jnp.asarray(_SCALE_BITS)[lax.bitcast_convert_type(block_scale, jnp.uint8)]
    return lax.bitcast_convert_type(bits, jnp.float32)


def encode(y: Float[Array, "... k"]) -> UInt8[Array, "... k"]:
    """Round float32 values to E2M1 codes: ties to even, saturating at 6.

    Negative zero keeps its sign (code 8). NaN becomes code 0; its sign differs between devices.

    Source: the thresholds are the midpoints of the code table; equal to `ml_dtypes` on all finite
    bfloat16 values.
    """
    magnitude = jnp.abs(y)
    # The midpoint belongs to the even code: so > where the lower code is even, >= where it is odd.
    above = (
        (magnitude > 0.25).astype(jnp.uint8)
        + (magnitude >= 0.75).astype(jnp.uint8)
        + (magnitude > 1.25).astype(jnp.uint8)
        + (magnitude >= 1.75).astype(jnp.uint8)
        + (magnitude > 2.5).astype(jnp.uint8)
        + (magnitude >= 3.5).astype(jnp.uint8)
        + (magnitude > 5.0).astype(jnp.uint8)
    )
    negative = jnp.signbit(y) & ~jnp.isnan(y)
    return above | (negative.astype(jnp.uint8) << jnp.uint8(3))


def check_blocks(name: str, shape: tuple[int, ...]) -> None:
    """Check that the last axis of `shape` holds whole blocks of 16.

    Raises:
      ValueError: it does not; the message carries `name` and the numbers.
    """
    if len(shape) < 2 or shape[-1] % BLOCK:
        raise ValueError(
            f"{name}: expected at least two axes and a last axis (k) that is a multiple of "
            f"{BLOCK}, the NVFP4 block; got shape {tuple(shape)}"
        )


def amax(x, axis) -> Float[Array, "..."]:
    """Return ``max(|x|)`` in float32 over `axis`, 0 where it is empty, NaN where one is inside.

    Magnitudes order like the integers of their bits, NaN on top. A float maximum would lose NaN in
    XLA's vectorised reduction on a CPU.
    """
    bits = lax.bitcast_convert_type(jnp.abs(x.astype(jnp.float32)), jnp.int32)
    return lax.bitcast_convert_type(jnp.max(bits, axis=axis, initial=0), jnp.float32)


def divide(a, b):
    """Return ``a / b`` in float32, rounded once to nearest even, on every device.

    XLA does not promise that: it multiplies by the rounded reciprocal where the divisor is a
    constant, and on a GPU its division may be off by a unit in the last place. So no divisor is a
    constant here (NaN / NaN is still NaN), and off the CPU the quotient comes from integers.
    """
    a, b = jnp.broadcast_arrays(a, jnp.where(jnp.isnan(a), a, b))
    return lax.platform_dependent(a, b, cpu=jnp.divide, default=_divide_by_integers)


def _divide_by_integers(a, b):
    """Divide significands by long division, eight bits a step, where all numbers are normal."""
    bits_a, bits_b = (lax.bitcast_convert_type(x, jnp.uint32) for x in (a, b))
    exponent_a, exponent_b = ((bits >> 23 & 0xFF).astype(jnp.int32) for bits in (bits_a, bits_b))
    top, bottom = ((bits & 0x7FFFFF) | 0x800000 for bits in (bits_a, bits_b))
    less = top < bottom  # then the quotient starts one place lower
    rest = jnp.where(less, 2 * top, top) - bottom
    quotient = jnp.ones_like(top)
    for _ in range(3):
        rest = rest << 8
        quotient = (quotient << 8) | (rest // bottom)
        rest = rest % bottom
    # 25 bits: one more than float32 keeps, and a quotient is never half way between two floats.
    significand = (quotient + 1) >> 1
    exponent = exponent_a - exponent_b + 127 - less.astype(jnp.int32)
    magnitude = (exponent.astype(jnp.uint32) << 23) + (significand - 0x800000)
    sign = (bits_a ^ bits_b) & jnp.uint32(0x80000000)
    normal = (exponent_a % 255 > 0) & (exponent_b % 255 > 0) & (exponent > 0) & (exponent < 255)
    return jnp.where(normal, lax.bitcast_convert_type(magnitude | sign, jnp.float32), a / b)


def global_scale_of(x: Float[Array, "... n k"]) -> Float[Array, "..."]:
    """Return ``amax(|x|) / 2688`` of each matrix in float32: the scale that wastes no range."""
    return divide(amax(x, (-2, -1)), jnp.float32(SCALE_RANGE))


def quantize(
    x: Float[Array, "... n k"], global_scale: Float[Array, "..."] | None = None
) -> tuple[UInt8[Array, "... n half_k"], Array, Float[Array, "..."]]:
    """Quantize to NVFP4: blocks of 16 along the last axis, all steps in float32.

    With ``g = global_scale``, for each block: ``s8 = e4m3(min(amax / (6 g), 448))``,
    ``s = float32(s8) * g``, ``codes = e2m1(x / s)``; both roundings take ties to even, codes
    saturate at 6, and a block whose ``s`` is 0 becomes zeros.

    Args:
      x: any float dtype; last axis a multiple of 16.
      global_scale: float32, of a shape that broadcasts to ``x.shape[:-2]``;
        ``amax(|x|) / 2688`` of each matrix where not given. Not checked: positive and finite.

    Returns:
      packed uint8 ``[..., n, k/2]``, block_scale float8_e4m3fn ``[..., n, k/16]`` and
      global_scale float32 ``x.shape[:-2]``.
      A block that holds a NaN gets a NaN block scale (0x7f) and zero codes; infinities saturate at
      6 * 448 * g. Where g itself comes from NaN or infinity it is that, and no block scale or code
      means anything. Float32 subnormals, far below any weight, count as zero on a CPU, where XLA
      flushes them.

    Raises:
      ValueError: the last axis is not a multiple of 16.

    Source: NVIDIA ModelOpt's NVFP4 export, to the bit.
    """
    check_blocks("x", x.shape)
    if global_scale is None:
        global_scale = global_scale_of(x)
    scale = jnp.broadcast_to(jnp.asarray(global_scale, jnp.float32), x.shape[:-2])
    g = scale[..., None, None]
    blocks = x.astype(jnp.float32).reshape(*x.shape[:-1], x.shape[-1] // BLOCK, BLOCK)
    block_amax = amax(blocks, -1)
    # A block of zeros is divided by 1: where g is 0 too, 0 / 0 would be NaN.
    divisor = jnp.where(block_amax == 0, 1.0, jnp.float32(E2M1_MAX) * g)
    ratio = divide(block_amax, divisor)
    ratio = jnp.where(jnp.isnan(ratio), jnp.nan, ratio)  # one NaN for all devices
    # Clamp first: a cast to E4M3 gives NaN above 464.
    block_scale = jnp.minimum(ratio, jnp.float32(E4M3_MAX)).astype(jnp.float8_e4m3fn)
    s = decode_scale(block_scale) * g
    zero = s == 0
    codes = divide(blocks, jnp.where(zero, 1.0, s)[..., None])
    codes = encode(jnp.where(zero[..., None], 0.0, codes))
    return pack(codes.reshape(x.shape)), block_scale, scale


def dequantize(packed, scale, dtype=jnp.float32) -> Float[Array, "... n k"]:
    """Return ``code * scale`` of each element, rounded once to `dtype`.

    Args:
      packed: uint8 ``[..., n, k/2]``.
      scale: float32 ``[..., n, k/16]``, block and global scale multiplied.
      dtype: of the result.
    """
    values = decode(unpack(packed))
    blocks = values.reshape(*values.shape[:-1], values.shape[-1] // BLOCK, BLOCK)
    return (blocks * scale[..., None]).reshape(values.shape).astype(dtype)


def fake_quantize(x: Float[Array, "... n k"], global_scale) -> Float[Array, "... n k"]:
    """Return `x` rounded to NVFP4 and back, in float32: ``dequantize(quantize(x, global_scale))``.

    Args:
      x: activations, rows along the last axis but one.
      global_scale: float32, broadcastable to ``x.shape[:-2]``; for one scale per row pass rows as
        matrices, ``x[..., None, :]``.
    """
    packed, block_scale, g = quantize(x, global_scale)
    return dequantize(packed, decode_scale(block_scale) * g[..., None, None])
