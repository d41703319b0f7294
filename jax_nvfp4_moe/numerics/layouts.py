"""Byte orders of packed weights for kernels, each a pair of inverse pure functions.

A `Layout` permutes the bytes of ``packed [..., n, k/2]`` and ``block_scale [..., n, k/16]`` without
changing the values of the weights. It may pad with zeros, which the inverse removes.

A layout and its inverse return the same bytes, with one exception. The ``mma`` and ``fp4`` layouts
do not store the sign of a block scale:

* A block with a negative scale returns with the positive scale and with negated codes.
* A block with a zero scale returns with zero codes.

These are other bytes with the same values.
"""

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

CANONICAL = "canonical"


@dataclasses.dataclass(frozen=True)
class Layout:
    """A named byte order that a kernel reads, with the functions that convert to it and back.

    Attributes:
      name: the name that a tensor in this layout stores as a static field.
      version: increased whenever the bytes change, so that a saved tensor is never misread.
      apply: ``(packed, scales) -> (packed, scales)`` from the canonical order; both are uint8.
      undo: ``(packed, scales, rows, columns) -> (packed, scales)``, the inverse of `apply`. `rows`
        and `columns` are n and k before padding.
      of_halves: name of the layout for a matrix of two halves, all gate rows and then all up rows.
        None (default) if such a matrix takes this layout too.
    """

    name: str
    version: int
    apply: Callable
    undo: Callable
    of_halves: str | None = None


def _pad(array, rows, columns):
    """Pad the last two axes with zeros to `rows` and `columns`."""
    missing = [(0, rows - array.shape[-2]), (0, columns - array.shape[-1])]
    return jnp.pad(array, [(0, 0)] * (array.ndim - 2) + missing)


def _up(n, multiple):
    """Round `n` up to a multiple of `multiple`."""
    return -(-n // multiple) * multiple


def _permute(array, tiles, order, shape):
    """View the last two axes as `tiles`, permute these axes by `order`, and reshape to `shape`."""
    lead = array.shape[:-2]
    axes = (*range(len(lead)), *(len(lead) + axis for axis in order))
    return array.reshape(*lead, *tiles).transpose(axes).reshape(*lead, *shape)


# cpu_16x16: each vector register of a CPU holds 16 rows side by side.
#
# A tile has 16 rows x 16 columns: 128 bytes of codes, which are two 64-byte vectors z. The 16-bit
# word 2 * row + p of vector z holds column 8 z + 2 j + p in nibble j. Four shifts of a vector
# therefore give bfloat16 pairs (k, k + 1) of 16 rows, in the order that dot-product instructions
# read.


# Four bytes of a row contain eight codes. They become the two words of that row: first all even
# codes, then all odd codes. This permutes the nibbles of 32 bits by two exchanges, and each
# exchange is its own inverse.


def _exchange(words, shift, mask):
    """Exchange the bits of `mask` with the bits that are `shift` places above them."""
    moved = (words ^ (words >> jnp.uint32(shift))) & jnp.uint32(mask)
    return words ^ moved ^ (moved << jnp.uint32(shift))


def _apply_cpu(packed, scales):
    """Convert to cpu_16x16."""
    n, half_k = _up(packed.shape[-2], 16), packed.shape[-1]
    words = _as_words(_pad(packed, n, half_k))
    words = _exchange(_exchange(words, 4, 0x00F000F0), 8, 0x0000FF00)
    words = _permute(words, (n // 16, 16, half_k // 4), (0, 2, 1), (n, half_k // 4))
    blocks = scales.shape[-1]
    scales = _permute(_pad(scales, n, blocks), (n // 16, 16, blocks), (0, 2, 1), (n, blocks))
    return _as_bytes(words), scales


def _undo_cpu(packed, scales, rows, columns):
    """Convert from cpu_16x16."""
    del columns  # this layout does not pad columns
    n, half_k = packed.shape[-2:]
    words = _permute(_as_words(packed), (n // 16, half_k // 4, 16), (0, 2, 1), (n, half_k // 4))
    words = _exchange(_exchange(words, 8, 0x0000FF00), 4, 0x00F000F0)
    blocks = scales.shape[-1]
    scales = _permute(scales, (n // 16, blocks, 16), (0, 2, 1), (n, blocks))
    return _as_bytes(words)[..., :rows, :], scales[..., :rows, :]


def _as_words(packed):
    # A -1 in the shape would be undefined for an array of no experts.
    """View four bytes along the last axis as one uint32 word."""
    words = packed.reshape(*packed.shape[:-1], packed.shape[-1] // 4, 4)
    return lax.bitcast_convert_type(words, jnp.uint32)


def _as_bytes(words):
    """View each uint32 word along the last axis as four bytes; the inverse of `_as_words`."""
    shape = (*words.shape[:-1], 4 * words.shape[-1])
    return lax.bitcast_convert_type(words, jnp.uint8).reshape(shape)


# swizzle_128x4: codes in canonical order, scales in tiles of 128 rows x 4 blocks.
#
# If a row has K blocks, the scale of row m and block b is at this index:
#
#   ((m // 128) * ceil(K / 4) + b // 4) * 512 + (m % 32) * 16 + (m % 128) // 32 * 4 + b % 4
#
# The block-scaled matrix instructions of Blackwell read this order (cuBLAS documentation, "1D block
# scaling factors layout").


def _apply_swizzle(packed, scales):
    """Convert to swizzle_128x4."""
    rows, blocks = _up(scales.shape[-2], 128), _up(scales.shape[-1], 4)
    tiles = (rows // 128, 4, 32, blocks // 4, 4)
    return packed, _permute(_pad(scales, rows, blocks), tiles, (0, 3, 2, 1, 4), (rows, blocks))


def _undo_swizzle(packed, scales, rows, columns):
    """Convert from swizzle_128x4."""
    shape = scales.shape[-2:]
    tiles = (shape[0] // 128, shape[1] // 4, 32, 4, 4)
    scales = _permute(scales, tiles, (0, 3, 2, 1, 4), shape)
    return packed, scales[..., :rows, : columns // 16]


# fp4_128x64: the layout for the FP4 tensor cores of compute capability 10.x.
#
# Codes are in canonical order, padded with zeros to a multiple of 128 rows and 64 columns. Scales
# are in the tiles of swizzle_128x4. These tensor cores read scales as unsigned numbers, so the sign
# of a scale moves into its codes.


def _apply_fp4_swizzled(packed, scales):
    """Convert to fp4_128x64."""
    rows, blocks = _up(scales.shape[-2], 128), _up(scales.shape[-1], 4)
    packed = _pad(_without_signs(packed, scales), rows, 8 * blocks)
    return packed, _apply_swizzle(packed, scales & 0x7F)[1]


def _undo_fp4_swizzled(packed, scales, rows, columns):
    """Convert from fp4_128x64."""
    _, scales = _undo_swizzle(packed, scales, rows, columns)
    return packed[..., :rows, : columns // 2], scales


# mma_64x64: the layout for the matrix instructions of CUDA GPUs, with contiguous bytes per thread.
#
# A matrix is padded to whole tiles of 64 rows x 64 columns. The tiles are contiguous in memory, and
# the tiles of the same rows follow each other. A tile has 2048 bytes of codes and 256 bytes of
# scales. Thread t of 128 owns 16 bytes of codes; it is lane 4 g + q of warp w. The thread has two
# rows of the tile, lo = 16 w + g and hi = lo + 8. For the 16 columns from k = 16 j on (step j of
# four), a fragment has four registers. Each register is made of one canonical byte, which holds the
# codes of two columns:

_CODES = 0x81C081C0
_SHARED = 0x60306030  # the bits of a word that _CODES rotated left by 0, 4 and 26 does not use

# The axes of the bytes of a matrix in canonical order, and the position to which each axis moves.
# Codes have the axes row tile, w, lo or hi, g, column tile, j, k or k + 8, q. Scales have the same
# row axes and then column tile, pair of steps, odd step.
_PLAIN_CODES = (0, 4, 1, 3, 7, 5, 6, 2)
_PLAIN_SCALES = (0, 4, 1, 3, 5, 2, 6)
# For a matrix of two halves, the first axis selects the half, which is lo or hi.
_HALVES_CODES = (1, 4, 2, 3, 7, 5, 6, 0)
_HALVES_SCALES = (1, 4, 2, 3, 5, 0, 6)


def _row_axes(rows, halves):
    """Return the sizes of the axes into which the rows of a padded matrix are split."""
    return (2, rows // 64, 4, 8) if halves else (rows // 64, 4, 2, 8)


def _pad_tiles(array, columns, halves):
    """Pad the rows, or the rows of each half, and the columns with zeros to whole tiles."""
    if not halves:
        return _pad(array, _up(array.shape[-2], 64), columns)
    *lead, n, here = array.shape
    rows = _up(n // 2, 32)
    array = _pad(array.reshape(*lead, 2, n // 2, here), rows, columns)
    return array.reshape(*lead, 2 * rows, columns)


def _cut_tiles(array, rows, columns, halves):
    """Remove the padding of `_pad_tiles`."""
    if not halves:
        return array[..., :rows, :columns]
    *lead, n, here = array.shape
    array = array.reshape(*lead, 2, n // 2, here)[..., : rows // 2, :columns]
    return array.reshape(*lead, rows, columns)


def _apply_mma(packed, scales, halves=False):
    """Convert to mma_64x64, or with `halves` to mma_64x64_gated."""
    *lead, n, half_k = packed.shape
    blocks = _up(half_k // 8, 4)
    packed = _pad_tiles(_without_signs(packed, scales), 8 * blocks, halves)
    scales = _pad_tiles(_to_e5m3(scales), blocks, halves)
    n = packed.shape[-2]
    rows = _row_axes(n, halves)
    order = _HALVES_CODES if halves else _PLAIN_CODES
    packed = _permute(packed, (*rows, blocks // 4, 4, 2, 4), order, (n * blocks // 2, 16))
    order = _HALVES_SCALES if halves else _PLAIN_SCALES
    scales = _permute(scales, (*rows, blocks // 4, 2, 2), order, (n * blocks // 4, 4))
    packed = _as_bytes(_join_words(_as_words(packed))).reshape(*lead, n, 8 * blocks)
    return packed, _as_bytes(_rotate_left(_as_words(scales), 4)).reshape(*lead, n, blocks)


def _undo_mma(packed, scales, rows, columns, halves=False):
    """Convert from mma_64x64, or with `halves` from mma_64x64_gated."""
    *lead, n, blocks = scales.shape
    words = _split_words(_as_words(packed.reshape(*lead, n * blocks // 2, 16)))
    packed = _unpermute(
        _as_bytes(words),
        (*_row_axes(n, halves), blocks // 4, 4, 2, 4),
        _HALVES_CODES if halves else _PLAIN_CODES,
        (n, 8 * blocks),
    )
    words = _rotate_left(_as_words(scales.reshape(*lead, n * blocks // 4, 4)), 28)
    scales = _unpermute(
        _as_bytes(words),
        (*_row_axes(n, halves), blocks // 4, 2, 2),
        _HALVES_SCALES if halves else _PLAIN_SCALES,
        (n, blocks),
    )
    scales = _from_e5m3(_cut_tiles(scales, rows, columns // 16, halves))
    return _cut_tiles(packed, rows, columns // 2, halves), scales


def _unpermute(array, tiles, order, shape):
    """Undo a `_permute` that viewed an array as `tiles`, and reshape to `shape`."""
    inverse = sorted(range(len(order)), key=order.__getitem__)
    return _permute(array, [tiles[axis] for axis in order], inverse, shape)


def _without_signs(packed, scales):
    """Move the sign of each block scale into its codes, and clear the codes of zero scales."""
    blocks = packed.reshape(*scales.shape, 8)
    scales = scales[..., None]
    negated = jnp.where(scales >= 0x80, jnp.uint8(0x88), jnp.uint8(0))
    kept = jnp.where(scales & 0x7F == 0, jnp.uint8(0), jnp.uint8(0xFF))
    return ((blocks ^ negated) & kept).reshape(packed.shape)


# E5M3 has five bits of exponent with a bias of 10, and three bits of mantissa. Subnormal numbers of
# E4M3 are normal numbers in E5M3.


def _to_e5m3(scales):
    """Return the magnitude of E4M3 bytes as E5M3 bytes. NaN becomes 0xFF."""
    m = scales.astype(jnp.uint32) & 0x7F
    subnormal = (jnp.uint32(0xFEDCA840) >> (4 * (m & 7)) & 15) * 2  # 0 8 16 20 24 26 28 30
    e = jnp.where(m < 8, subnormal, m + 24)
    return jnp.where(m == 0x7F, 0xFF, e).astype(jnp.uint8)


def _from_e5m3(scales):
    """Undo `_to_e5m3`; the resulting E4M3 bytes are positive."""
    e = scales.astype(jnp.uint32)
    m = jnp.where(e < 32, (8 + e % 8) >> (4 - jnp.minimum(e // 8, 4)), e - 24)
    return jnp.where(e == 0xFF, 0x7F, m).astype(jnp.uint8)


def _rotate_left(words, bits):
    return words << jnp.uint32(bits) | words >> jnp.uint32(32 - bits)


def _register(word, index):
    """Return the register of byte `index` of `word`: its two codes at the bits of _CODES."""
    byte = word >> jnp.uint32(8 * index)
    return (byte & 7) << 6 | (byte & 8) << 12 | (byte & 0x70) << 18 | (byte & 0x80) << 24


def _byte(register, index):
    """Undo `_register`: return the byte at position `index`, with zeros in the other bytes.

    Only the bits of _CODES are read.
    """
    low = register >> 6 & 7 | register >> 12 & 8
    return (low | register >> 18 & 0x70 | register >> 24 & 0x80) << jnp.uint32(8 * index)


def _join_words(words):
    """Make two words from the bytes of two steps, for each pair of steps along the last axis."""
    even, odd = words[..., 0::2], words[..., 1::2]
    shared = _rotate_left(_register(even, 3), 8) | _register(odd, 3) >> 2
    first, second = (
        _register(w, 0) | _rotate_left(_register(w, 1), 4) | _register(w, 2) >> 6
        for w in (even, odd)
    )
    first |= shared & _SHARED
    second |= _rotate_left(shared & ~jnp.uint32(_SHARED), 30)
    return jnp.stack([first, second], axis=-1).reshape(words.shape)


def _split_words(words):
    """Undo `_join_words`.

    Kernels split words in the same way, but stop at the registers and do not build bytes.
    """
    first, second = words[..., 0::2], words[..., 1::2]
    shared = first & _SHARED | _rotate_left(second, 2) & ~jnp.uint32(_SHARED)
    even, odd = (
        _byte(w, 0) | _byte(_rotate_left(w, 28), 1) | _byte(w << 6, 2) for w in (first, second)
    )
    even |= _byte(_rotate_left(shared, 24), 3)
    odd |= _byte(shared << 2, 3)
    return jnp.stack([even, odd], axis=-1).reshape(words.shape)


# fp4_64x64: the layout for FP4 tensor cores that run m16n8k64 instructions with block scales.
#
# Tiles have 64 rows x 64 columns as in mma_64x64: 2048 bytes of codes and 256 bytes of scales.
# Thread t of 128, which is lane 4 g + q of warp w, owns 16 bytes of codes. These are the four
# registers of its fragment for the rows lo = 16 w + g and hi = lo + 8 of the tile. Nibbles have the
# canonical order:
#
#   register 0: row lo, columns 8 q to 8 q + 7    register 2: row lo, 32 columns further
#   register 1: row hi, the same columns          register 3: row hi, 32 columns further
#
# The scales of a row are one word, with a byte for each 16 columns. Rows are in the order of w,
# then lo before hi, then g. The tensor cores read scales without a sign (UE4M3), so the sign moves
# into the codes.
#
# fp4_64x64_gated: the variant for a matrix of two halves, with lo and hi chosen as in
# mma_64x64_gated. After the activation, 16 outputs share a scale. They come from the slabs 2 w and
# 2 w + 1, which one warp multiplies.

# Rows have the same axes as in mma_64x64. Codes then have column tile, half of the column tile, q,
# byte. Scales then have column tile, block.
_PLAIN_FP4_CODES = (0, 4, 1, 3, 6, 5, 2, 7)
_PLAIN_FP4_SCALES = (0, 4, 1, 2, 3, 5)
_HALVES_FP4_CODES = (1, 4, 2, 3, 6, 5, 0, 7)
_HALVES_FP4_SCALES = (1, 4, 2, 0, 3, 5)


def _apply_fp4(packed, scales, halves=False):
    """Convert to fp4_64x64, or with `halves` to fp4_64x64_gated."""
    blocks = _up(scales.shape[-1], 4)
    packed = _pad_tiles(_without_signs(packed, scales), 8 * blocks, halves)
    scales = _pad_tiles(scales & 0x7F, blocks, halves)
    n = packed.shape[-2]
    rows = _row_axes(n, halves)
    order = _HALVES_FP4_CODES if halves else _PLAIN_FP4_CODES
    packed = _permute(packed, (*rows, blocks // 4, 2, 4, 4), order, (n, 8 * blocks))
    order = _HALVES_FP4_SCALES if halves else _PLAIN_FP4_SCALES
    return packed, _permute(scales, (*rows, blocks // 4, 4), order, (n, blocks))


def _undo_fp4(packed, scales, rows, columns, halves=False):
    """Convert from fp4_64x64, or with `halves` from fp4_64x64_gated."""
    n, blocks = scales.shape[-2:]
    axes = _row_axes(n, halves)
    order = _HALVES_FP4_CODES if halves else _PLAIN_FP4_CODES
    packed = _unpermute(packed, (*axes, blocks // 4, 2, 4, 4), order, (n, 8 * blocks))
    order = _HALVES_FP4_SCALES if halves else _PLAIN_FP4_SCALES
    scales = _unpermute(scales, (*axes, blocks // 4, 4), order, (n, blocks))
    return (
        _cut_tiles(packed, rows, columns // 2, halves),
        _cut_tiles(scales, rows, columns // 16, halves),
    )


def _keep(packed, scales, rows=None, columns=None):
    """Return the arrays unchanged: the canonical order is its own layout."""
    del rows, columns
    return packed, scales


LAYOUTS = {
    layout.name: layout
    for layout in (
        Layout(CANONICAL, 1, _keep, _keep),
        Layout("cpu_16x16", 1, _apply_cpu, _undo_cpu),
        Layout("swizzle_128x4", 1, _apply_swizzle, _undo_swizzle),
        Layout("fp4_128x64", 1, _apply_fp4_swizzled, _undo_fp4_swizzled),
        Layout("mma_64x64", 1, _apply_mma, _undo_mma, of_halves="mma_64x64_gated"),
        Layout(
            "mma_64x64_gated",
            1,
            functools.partial(_apply_mma, halves=True),
            functools.partial(_undo_mma, halves=True),
        ),
        Layout("fp4_64x64", 1, _apply_fp4, _undo_fp4, of_halves="fp4_64x64_gated"),
        Layout(
            "fp4_64x64_gated",
            1,
            functools.partial(_apply_fp4, halves=True),
            functools.partial(_undo_fp4, halves=True),
        ),
    )
}


def find_layout(name: str) -> Layout:
    """Return the layout called `name`.

    Args:
      name: a key of `LAYOUTS`.

    Raises:
      ValueError: if there is no such layout; the message lists the known ones.
    """
    if name not in LAYOUTS:
        raise ValueError(f"layout: expected one of {sorted(LAYOUTS)}, got {name!r}")
    return LAYOUTS[name]


def name_of_bytes(name: str, rows: int | None, columns: int | None) -> str:
    """Return what the names of arrays in a layout end in; nothing for the canonical layout.

    Two arrays whose bytes have different meanings have different names.

    Args:
      name: name of the layout.
      rows: n before the layout padded it, or None.
      columns: k before the layout padded it, or None.

    Returns:
      For example "_mma_64x64", or "_mma_64x64_rows_48" if rows are padded. A version after the
      first is named too.
    """
    if name == CANONICAL:
        return ""
    version = LAYOUTS[name].version if name in LAYOUTS else 1
    parts = {"version": version if version > 1 else None, "rows": rows, "columns": columns}
    said = (f"_{part}_{value}" for part, value in parts.items() if value is not None)
    return f"_{name}{''.join(said)}"


@functools.partial(jax.jit, inline=True, static_argnames=("layout",))
def to_layout(packed, block_scale, layout: Layout):
    """Convert canonical arrays to `layout`.

    Args:
      packed: uint8 ``[..., n, k/2]`` in canonical order.
      block_scale: float8_e4m3fn ``[..., n, k/16]`` in canonical order.
      layout: the wanted byte order.

    Returns:
      A tuple ``(packed, block_scale)`` of the same dtypes; a layout may pad rows and columns.
    """
    packed, scales = layout.apply(packed, lax.bitcast_convert_type(block_scale, jnp.uint8))
    return packed, lax.bitcast_convert_type(scales, block_scale.dtype)


@functools.partial(jax.jit, inline=True, static_argnames=("layout", "rows", "columns"))
def from_layout(packed, block_scale, layout: Layout, rows: int, columns: int):
    """Convert arrays in `layout` to canonical order; the inverse of `to_layout`.

    Args:
      packed: uint8 codes in `layout`.
      block_scale: float8_e4m3fn block scales in `layout`.
      layout: the byte order of the arrays.
      rows: n, the number of rows before padding.
      columns: k, the number of columns before padding.

    Returns:
      A tuple ``(packed, block_scale)``: uint8 ``[..., n, k/2]`` and float8_e4m3fn
      ``[..., n, k/16]``.
    """
    scales = lax.bitcast_convert_type(block_scale, jnp.uint8)
    packed, scales = layout.undo(packed, scales, rows, columns)
    return packed, lax.bitcast_convert_type(scales, block_scale.dtype)
