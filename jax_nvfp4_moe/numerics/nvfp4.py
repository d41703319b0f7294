"""The NVFP4 format: E2M1 codes, E4M3 block scales and one float32 global scale; plain `jax.numpy`.

The value of a weight is ``code * (block_scale * global_scale)``. Each 16 consecutive elements of a
row form a block, which has one E4M3 ``block_scale``. Two codes share a byte, and the even element
is in the low nibble.
"""

import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jax import lax
from jaxtyping import Array, Float, UInt8

BLOCK = 16
E2M1_MAX = 6.0
E4M3_MAX = 448.0
SCALE_RANGE = E2M1_MAX * E4M3_MAX  # amax / 2688 is the smallest global scale that clips nothing

# Value of each 4-bit code; bit 3 is the sign (OCP Microscaling Formats v1.0, section 5.3.3).
CODE_VALUES = np.array(
    [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0],
    np.float32,
)

# The float32 value of each of the 256 bytes of a block scale, as bits. Two of the values are NaN,
# and `jax_debug_nans` raises at a float constant that contains NaN.
_SCALE_BITS = (
    np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32).view(np.uint32)
)


def pack(codes: UInt8[Array, "... k"]) -> UInt8[Array, "... half_k"]:
    """Pack pairs of 4-bit codes into bytes: ``packed[i] = codes[2 i] | codes[2 i + 1] << 4``.

    Args:
      codes: uint8 ``[..., k]`` with k even. The function does not check that the values are below
        16.

    Returns:
      uint8 ``[..., k/2]``.

    Raises:
      ValueError: if the last axis is odd.

    Example:
      >>> import jax.numpy as jnp
      >>> from jax_nvfp4_moe.numerics.nvfp4 import pack, unpack
      >>> packed = pack(jnp.array([1, 2, 3, 4], jnp.uint8))
      >>> [hex(byte) for byte in packed.tolist()]
      ['0x21', '0x43']
      >>> unpack(packed).tolist()
      [1, 2, 3, 4]
    """
    if codes.shape[-1] % 2:
        raise ValueError(f"codes: expected an even last axis, got shape {codes.shape}")
    return codes[..., 0::2] | (codes[..., 1::2] << jnp.uint8(4))


@functools.partial(jax.jit, inline=True)
def unpack(packed: UInt8[Array, "... half_k"]) -> UInt8[Array, "... k"]:
    """Unpack bytes ``[..., k/2]`` to 4-bit codes ``[..., k]``; the inverse of `pack`.

    Args:
      packed: uint8 ``[..., k/2]``, two codes in each byte.

    Returns:
      uint8 ``[..., k]`` with values from 0 to 15.

    Example:
      >>> import jax.numpy as jnp
      >>> from jax_nvfp4_moe.numerics.nvfp4 import unpack
      >>> unpack(jnp.array([0x21], jnp.uint8)).tolist()
      [1, 2]
    """
    pairs = jnp.stack([packed & jnp.uint8(15), packed >> jnp.uint8(4)], axis=-1)
    return pairs.reshape(*packed.shape[:-1], 2 * packed.shape[-1])


@functools.partial(jax.jit, inline=True)
def decode(codes: UInt8[Array, "... k"]) -> Float[Array, "... k"]:
    """Return the float32 value of each 4-bit code.

    Args:
      codes: uint8 ``[..., k]`` with values from 0 to 15.

    Returns:
      float32 ``[..., k]``: 0, 0.5, 1, 1.5, 2, 3, 4, 6, then the same values negated.

    Example:
      >>> import jax.numpy as jnp
      >>> from jax_nvfp4_moe.numerics.nvfp4 import decode
      >>> decode(jnp.array([0, 1, 7, 15], jnp.uint8)).tolist()
      [0.0, 0.5, 6.0, -6.0]

    Source: OCP Microscaling Formats v1.0, section 5.3.3.
    """
    return jnp.asarray(CODE_VALUES)[codes]


@functools.partial(jax.jit, inline=True)
def decode_scale(block_scale: Array) -> Float[Array, "..."]:
    """Return the float32 value of each float8_e4m3fn block scale.

    The values come from a table. XLA may treat a cast to E4M3 that is followed by the cast back as
    excess precision, and remove both casts.
    """
    bits = jnp.asarray(_SCALE_BITS)[lax.bitcast_convert_type(block_scale, jnp.uint8)]
    return lax.bitcast_convert_type(bits, jnp.float32)


def encode(y: Float[Array, "... k"]) -> UInt8[Array, "... k"]:
    """Round float32 values to E2M1 codes: ties round to even, and values saturate at 6.

    Negative zero keeps its sign (code 8). NaN becomes code 0 whatever its sign, which differs
    between devices.

    Args:
      y: float32 ``[..., k]``.

    Returns:
      uint8 ``[..., k]`` with values from 0 to 15.

    Source: the thresholds are the midpoints between neighboring codes. The result equals that of
    `ml_dtypes` for all finite bfloat16 values.
    """
    magnitude = jnp.abs(y)
    # A midpoint rounds to the even code: the comparison is > if the lower code is even, and >= if
    # it is odd.
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
    """Check that the last axis of `shape` consists of whole blocks of 16.

    Args:
      name: what the error message calls the array.
      shape: shape of the array, with at least two axes.

    Raises:
      ValueError: if there are fewer than two axes, or the last axis is not a multiple of 16.
    """
    if len(shape) < 2 or shape[-1] % BLOCK:
        raise ValueError(
            f"{name}: expected at least two axes and a last axis (k) that is a multiple of "
            f"{BLOCK}, the size of an NVFP4 block; got shape {tuple(shape)}"
        )


def amax(x, axis) -> Float[Array, "..."]:
    """Return ``max(|x|)`` over `axis` in float32: 0 for an empty axis, NaN if `x` contains NaN.

    The maximum is taken of the bits as integers. Magnitudes have the same order as their bits, with
    NaN above infinity. A float maximum would lose NaN in XLA's vectorized reduction on a CPU.
    """
    bits = lax.bitcast_convert_type(jnp.abs(x.astype(jnp.float32)), jnp.int32)
    return lax.bitcast_convert_type(jnp.max(bits, axis=axis, initial=0), jnp.float32)


def divide(a, b):
    """Return ``a / b`` in float32, rounded once to nearest even, on every device.

    XLA does not guarantee this. It replaces a constant divisor by its rounded reciprocal, and
    division on a GPU may be off by a unit in the last place. Therefore the divisor is never a
    constant here: it depends on `a` where `a` is NaN, and NaN / NaN is still NaN. On other devices
    than a CPU the quotient is computed from integers.
    """
    a, b = jnp.broadcast_arrays(a, jnp.where(jnp.isnan(a), a, b))
    return lax.platform_dependent(a, b, cpu=jnp.divide, default=_divide_by_integers)


def _divide_by_integers(a, b):
    """Divide by long division of the significands, eight bits per step.

    If an operand or the result is not a normal number, the result is that of ``a / b``.
    """
    bits_a, bits_b = (lax.bitcast_convert_type(x, jnp.uint32) for x in (a, b))
    exponent_a, exponent_b = ((bits >> 23 & 0xFF).astype(jnp.int32) for bits in (bits_a, bits_b))
    top, bottom = ((bits & 0x7FFFFF) | 0x800000 for bits in (bits_a, bits_b))
    less = top < bottom  # the quotient of the significands is then below 1: shift it by one bit
    rest = jnp.where(less, 2 * top, top) - bottom
    quotient = jnp.ones_like(top)
    for _ in range(3):
        rest = rest << 8
        quotient = (quotient << 8) | (rest // bottom)
        rest = rest % bottom
    # The quotient has 25 bits, one more than float32 keeps. It is never half way between two
    # floats, so adding 1 and dropping the last bit rounds to nearest.
    significand = (quotient + 1) >> 1
    exponent = exponent_a - exponent_b + 127 - less.astype(jnp.int32)
    magnitude = (exponent.astype(jnp.uint32) << 23) + (significand - 0x800000)
    sign = (bits_a ^ bits_b) & jnp.uint32(0x80000000)
    normal = (exponent_a % 255 > 0) & (exponent_b % 255 > 0) & (exponent > 0) & (exponent < 255)
    return jnp.where(normal, lax.bitcast_convert_type(magnitude | sign, jnp.float32), a / b)


def global_scale_of(x: Float[Array, "... n k"]) -> Float[Array, "..."]:
    """Return ``amax(|x|) / 2688`` of each matrix in float32.

    This is the smallest global scale with which no block scale is clipped: the largest magnitude
    gets code 6 and block scale 448.
    """
    return divide(amax(x, (-2, -1)), jnp.float32(SCALE_RANGE))


@functools.partial(jax.jit, inline=True)
def quantize(
    x: Float[Array, "... n k"], global_scale: Float[Array, "..."] | None = None
) -> tuple[UInt8[Array, "... n half_k"], Array, Float[Array, "..."]]:
    """Quantize to NVFP4 in blocks of 16 along the last axis; all steps are in float32.

    With ``g = global_scale``, each block gets ``s8 = e4m3(min(amax / (6 g), 448))``,
    ``s = float32(s8) * g`` and ``codes = e2m1(x / s)``. Both roundings take ties to even, and codes
    saturate at 6. If ``s`` is 0, all codes of the block are 0.

    Special values:

    * A block that contains NaN gets a NaN block scale (0x7f) and zero codes.
    * Infinities saturate at ``6 * 448 * g``.
    * If `global_scale` is None and `x` contains NaN or infinity, g is NaN or infinity too. All
      block scales and codes of that matrix are then meaningless.
    * On a CPU, XLA flushes float32 subnormals to zero.

    Args:
      x: array ``[..., n, k]`` of any float dtype; k is a multiple of 16.
      global_scale: g, float32, of a shape that broadcasts to ``x.shape[:-2]``. None, the default,
        takes ``amax(|x|) / 2688`` of each matrix. The function does not check that it is positive
        and finite.

    Returns:
      A tuple ``(packed, block_scale, global_scale)``: uint8 ``[..., n, k/2]``, float8_e4m3fn
      ``[..., n, k/16]`` and float32 ``x.shape[:-2]``.

    Raises:
      ValueError: if `x` has fewer than two axes, or k is not a multiple of 16.

    Example:
      >>> import jax.numpy as jnp
      >>> from jax_nvfp4_moe.numerics.nvfp4 import quantize
      >>> x = jnp.arange(32, dtype=jnp.float32).reshape(1, 32)
      >>> packed, block_scale, global_scale = quantize(x)
      >>> packed.shape, block_scale.shape, global_scale.shape
      ((1, 16), (1, 2), ())

    Source: NVIDIA ModelOpt's NVFP4 export; the result has the same bits.
    """
    check_blocks("x", x.shape)
    if global_scale is None:
        global_scale = global_scale_of(x)
    scale = jnp.broadcast_to(jnp.asarray(global_scale, jnp.float32), x.shape[:-2])
    g = scale[..., None, None]
    blocks = x.astype(jnp.float32).reshape(*x.shape[:-1], x.shape[-1] // BLOCK, BLOCK)
    block_amax = amax(blocks, -1)
    # A block of zeros is divided by 1. If g is 0 too, 0 / 0 would give NaN.
    divisor = jnp.where(block_amax == 0, 1.0, jnp.float32(E2M1_MAX) * g)
    ratio = divide(block_amax, divisor)
    ratio = jnp.where(jnp.isnan(ratio), jnp.nan, ratio)  # the same NaN bits on every device
    # Clamp before the cast: a cast of a value above 464 to E4M3 gives NaN.
    block_scale = jnp.minimum(ratio, jnp.float32(E4M3_MAX)).astype(jnp.float8_e4m3fn)
    codes = encode_blocks(blocks, decode_scale(block_scale) * g)
    return pack(codes.reshape(x.shape)), block_scale, scale


def encode_blocks(
    blocks: Float[Array, "... blocks 16"], scale: Float[Array, "... blocks"]
) -> UInt8[Array, "... blocks 16"]:
    """Return the codes ``e2m1(blocks / scale)``; all codes of a block with scale 0 are 0."""
    zero = scale == 0
    codes = divide(blocks, jnp.where(zero, 1.0, scale)[..., None])
    return encode(jnp.where(zero[..., None], 0.0, codes))


@functools.partial(jax.jit, inline=True, static_argnames=("dtype",))
def dequantize(packed, scale, dtype=jnp.float32) -> Float[Array, "... n k"]:
    """Return ``code * scale`` of each element, rounded once to `dtype`.

    Args:
      packed: uint8 ``[..., n, k/2]``, two codes in each byte.
      scale: float32 ``[..., n, k/16]``, the product of block scale and global scale.
      dtype: dtype of the result, float32 by default.

    Returns:
      ``[..., n, k]`` of `dtype`.

    Example:
      >>> import jax.numpy as jnp
      >>> from jax_nvfp4_moe.numerics.nvfp4 import dequantize
      >>> packed = jnp.full((1, 8), 0x21, jnp.uint8)  # codes 1 and 2: 0.5 and 1
      >>> dequantize(packed, jnp.full((1, 1), 4.0))[0, :4].tolist()
      [2.0, 4.0, 2.0, 4.0]
    """
    values = decode(unpack(packed))
    blocks = values.reshape(*values.shape[:-1], values.shape[-1] // BLOCK, BLOCK)
    return (blocks * scale[..., None]).reshape(values.shape).astype(dtype)


def fake_quantize(x: Float[Array, "... n k"], global_scale) -> Float[Array, "... n k"]:
    """Round `x` to NVFP4 and back: ``dequantize(quantize(x, global_scale))`` in float32.

    Args:
      x: activations ``[..., n, k]`` of any float dtype; k is a multiple of 16.
      global_scale: float32, of a shape that broadcasts to ``x.shape[:-2]``, or None for
        ``amax(|x|) / 2688`` of each matrix. To give each row its own scale, pass rows as matrices:
        ``x[..., None, :]``.

    Returns:
      float32 ``[..., n, k]``.

    Raises:
      ValueError: if `x` has fewer than two axes, or k is not a multiple of 16.

    Example:
      >>> import jax.numpy as jnp
      >>> from jax_nvfp4_moe.numerics.nvfp4 import fake_quantize
      >>> x = jnp.array([[0.0, 1.0, 2.2, 6.0] * 4])
      >>> fake_quantize(x, 1.0)[0, :4].tolist()
      [0.0, 1.0, 2.0, 6.0]
    """
    packed, block_scale, g = quantize(x, global_scale)
    return dequantize(packed, decode_scale(block_scale) * g[..., None, None])
