"""FP8 (E4M3) with one scale for each block of a matrix, in numpy for the reader of files.

``w[n, k] = value[n, k] * scale[n // rows, k // columns]``. The scales are floats, or E8M0 bytes
that stand for ``2 ** (byte - 127)``.
"""

import enum

import ml_dtypes
import numpy as np

Block = tuple[int, int]  # rows and columns of a block
SQUARE: Block = (128, 128)  # DeepSeek's, and ModelOpt's FP8_PB_WO
MX: Block = (1, 32)  # OCP Microscaling Formats v1.0, section 5.2
_CHUNK = 128  # rows
_E8M0 = np.dtype(ml_dtypes.float8_e8m0fnu)


class BlockFP8(enum.StrEnum):
    """Weights in FP8 (E4M3) with one scale for each block, as files declare them.

    Linears with square blocks become `FP8Linear` with the scheme "fp8_weights". Loaders decode
    other such weights to a float dtype. No module has this scheme. Activations are not rounded.

    Attributes:
      SQUARE: blocks of 128 x 128 weights.
      MX: blocks of 32 weights of a row, whose scale is a power of two.
    """

    SQUARE = "fp8_blocks"
    MX = "mxfp8"


def grid_shape(n: int, k: int, block: Block) -> tuple[int, int]:
    """Return how many scales a matrix ``[n, k]`` has along each axis; edge blocks count."""
    return -(-n // block[0]), -(-k // block[1])


def decode_scales(stored: np.ndarray) -> np.ndarray:
    """Return scales as float32; bytes and E8M0 are exponents, of which 255 is NaN."""
    if stored.dtype == np.uint8:
        stored = stored.view(_E8M0)
    return stored.astype(np.float32)


def dequantize(
    values: np.ndarray, scales: np.ndarray, block: Block, dtype, start: tuple[int, int] = (0, 0)
) -> np.ndarray:
    """Return ``value * scale``, computed in float32 and rounded once to `dtype`.

    Args:
      values: float8_e4m3fn ``[n, k]``, a part of a matrix.
      scales: float32 of the blocks that the part touches.
      block: rows and columns of a block.
      dtype: of the result.
      start: row and column of the part's first element, counted from the first of its first block.
    """
    made = np.empty(values.shape, dtype)
    rows = (np.arange(values.shape[0]) + start[0]) // block[0]
    for first in range(0, len(values), _CHUNK):  # float32 of a few rows, not of the matrix
        part = slice(first, first + _CHUNK)
        spread = np.repeat(scales[rows[part]], block[1], axis=1)
        spread = spread[:, start[1] : start[1] + values.shape[1]]
        with np.errstate(over="ignore"):
            made[part] = values[part].astype(np.float32) * spread
    return made
