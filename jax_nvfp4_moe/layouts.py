"""Byte orders of packed weights for kernels, each a pair of inverse pure functions.

A `Layout` permutes the bytes of ``packed [..., n, k/2]`` and ``block_scale [..., n, k/16]`` without
changing their values: undoing it gives the same bytes back. It may pad with zeros, which the
inverse cuts off again.
"""

import dataclasses
from collections.abc import Callable

import jax.numpy as jnp
from jax import lax

CANONICAL = "canonical"


@dataclasses.dataclass(frozen=True)
class Layout:
    """A named byte order: what a kernel reads, and how to get there and back.

    Attributes:
      name: the static tag that a tensor in this layout carries.
      version: raised when the bytes change, so that a saved tensor is not misread.
      apply: ``(packed, scales) -> (packed, scales)`` from the canonical order; both uint8.
      undo: ``(packed, scales, rows) -> (packed, scales)``, its inverse; `rows` is n before padding.
    """

    name: str
    version: int
    apply: Callable
    undo: Callable


def _pad(array, rows, columns):
    """Pad the last two axes with zeros to `rows` and `columns`."""
    missing = [(0, rows - array.shape[-2]), (0, columns - array.shape[-1])]
    return jnp.pad(array, [(0, 0)] * (array.ndim - 2) + missing)


def _up(n, multiple):
    return -(-n // multiple) * multiple


def _permute(array, tiles, order, shape):
    """View the last two axes as `tiles`, permute those by `order`, view the result as `shape`."""
    lead = array.shape[:-2]
    axes = (*range(len(lead)), *(len(lead) + axis for axis in order))
    return array.reshape(*lead, *tiles).transpose(axes).reshape(*lead, *shape)


# cpu_16x16: 16 rows side by side in a vector register.
#
# One tile is 16 rows x 16 columns: 128 bytes of codes, two 64-byte vectors z. The 16-bit word
# 2 * row + p of vector z holds, in nibble j, column 8 z + 2 j + p. So four shifts of a vector give
# bfloat16 pairs (k, k + 1) of 16 rows, in the order that dot-product instructions take.


# Four bytes of a row, eight codes, become the two words of a row: all even codes, then all odd
# ones. That is a permutation of the nibbles of 32 bits, by two exchanges that undo themselves.


def _exchange(words, shift, mask):
    """Exchange the bits of `mask` with those `shift` places above them."""
    moved = (words ^ (words >> jnp.uint32(shift))) & jnp.uint32(mask)
    return words ^ moved ^ (moved << jnp.uint32(shift))


def _apply_cpu(packed, scales):
    n, half_k = _up(packed.shape[-2], 16), packed.shape[-1]
    words = _as_words(_pad(packed, n, half_k))
    words = _exchange(_exchange(words, 4, 0x00F000F0), 8, 0x0000FF00)
    words = _permute(words, (n // 16, 16, half_k // 4), (0, 2, 1), (n, half_k // 4))
    blocks = scales.shape[-1]
    scales = _permute(_pad(scales, n, blocks), (n // 16, 16, blocks), (0, 2, 1), (n, blocks))
    return _as_bytes(words), scales


def _undo_cpu(packed, scales, rows):
    n, half_k = packed.shape[-2:]
    words = _permute(_as_words(packed), (n // 16, half_k // 4, 16), (0, 2, 1), (n, half_k // 4))
    words = _exchange(_exchange(words, 8, 0x0000FF00), 4, 0x00F000F0)
    blocks = scales.shape[-1]
    scales = _permute(scales, (n // 16, blocks, 16), (0, 2, 1), (n, blocks))
    return _as_bytes(words)[..., :rows, :], scales[..., :rows, :]


def _as_words(packed):
    return lax.bitcast_convert_type(packed.reshape(*packed.shape[:-1], -1, 4), jnp.uint32)


def _as_bytes(words):
    return lax.bitcast_convert_type(words, jnp.uint8).reshape(*words.shape[:-1], -1)


# swizzle_128x4: codes as they are, scales in tiles of 128 rows x 4 blocks.
#
# The scale of row m and block b lands at ((m // 128) * ceil(K / 4) + b // 4) * 512 + (m % 32) * 16
# + (m % 128) // 32 * 4 + b % 4, K blocks in a row: the order that Blackwell's block-scaled matrix
# units read (cuBLAS documentation, "1D block scaling factors layout").


def _apply_swizzle(packed, scales):
    rows, blocks = _up(scales.shape[-2], 128), _up(scales.shape[-1], 4)
    tiles = (rows // 128, 4, 32, blocks // 4, 4)
    return packed, _permute(_pad(scales, rows, blocks), tiles, (0, 3, 2, 1, 4), (rows, blocks))


def _undo_swizzle(packed, scales, rows):
    shape = scales.shape[-2:]
    tiles = (shape[0] // 128, shape[1] // 4, 32, 4, 4)
    scales = _permute(scales, tiles, (0, 3, 2, 1, 4), shape)
    return packed, scales[..., :rows, : packed.shape[-1] // 8]


LAYOUTS = {
    layout.name: layout
    for layout in (
        Layout(CANONICAL, 1, lambda p, s: (p, s), lambda p, s, rows: (p, s)),
        Layout("cpu_16x16", 1, _apply_cpu, _undo_cpu),
        Layout("swizzle_128x4", 1, _apply_swizzle, _undo_swizzle),
    )
}


def find_layout(name: str) -> Layout:
    """Return the layout called `name`.

    Raises:
      ValueError: there is none; the message lists those that there are.
    """
    if name not in LAYOUTS:
        raise ValueError(f"layout: expected one of {sorted(LAYOUTS)}, got {name!r}")
    return LAYOUTS[name]


def to_layout(packed, block_scale, layout: Layout):
    """Put canonical ``packed [..., n, k/2]`` and ``block_scale [..., n, k/16]`` into `layout`."""
    packed, scales = layout.apply(packed, lax.bitcast_convert_type(block_scale, jnp.uint8))
    return packed, lax.bitcast_convert_type(scales, block_scale.dtype)


def from_layout(packed, block_scale, layout: Layout, rows: int):
    """Undo `to_layout`; `rows` is n before padding."""
    scales = lax.bitcast_convert_type(block_scale, jnp.uint8)
    packed, scales = layout.undo(packed, scales, rows)
    return packed, lax.bitcast_convert_type(scales, block_scale.dtype)
