"""Find and read FP8 weights whose scales are those of blocks.

A module holds ``weight`` float8_e4m3fn ``[n, k]`` and its scales, one for each block, under one of
`names.SCALE_NAMES`: ``[n / 128, k / 128]``, with axes of length 1 in between or not, or
``[n, k / 32]`` for MXFP8. All of them multiply. Activations stay in the model's dtype.

* Linears with blocks of 128 x 128 stay in FP8: every row of a block gets the scale of the block.
* Experts, MXFP8, and matrices that modules keep in a float dtype are decoded as they are read.
"""

import functools
from collections.abc import Sequence
from typing import Any

import ml_dtypes
import numpy as np

from jax_nvfp4_moe.checkpoint.names import SCALE_NAMES
from jax_nvfp4_moe.checkpoint.reading.lazy_array import LazyArray, Region, overlap, region_shape
from jax_nvfp4_moe.checkpoint.reading.memory import aligned_empty
from jax_nvfp4_moe.checkpoint.reading.unread import Index, Piece, Shape, Unread
from jax_nvfp4_moe.checkpoint.safetensors import STORED_TYPES
from jax_nvfp4_moe.checkpoint.weights.finder import Finder
from jax_nvfp4_moe.checkpoint.weights.projections import Product, Projection
from jax_nvfp4_moe.checkpoint.weights.stored_forms import FLOATS
from jax_nvfp4_moe.numerics import fp8_blocks
from jax_nvfp4_moe.numerics.fp8 import FP8Tensor
from jax_nvfp4_moe.numerics.fp8_blocks import BlockFP8

_BLOCKS = {BlockFP8.SQUARE: fp8_blocks.SQUARE, BlockFP8.MX: fp8_blocks.MX}
_E4M3 = np.dtype(ml_dtypes.float8_e4m3fn)
_F32 = np.dtype(np.float32)
_SCALE_TYPES = {BlockFP8.SQUARE: (*FLOATS, "F8_E8M0"), BlockFP8.MX: ("U8", "F8_E8M0")}
# The place of a stored matrix, its values, and its scales.
_Stored = tuple[Index, Any, Any]


def find_blocks(finder: Finder, product: Product, scheme: BlockFP8, dtype: Any) -> Unread:
    """Find a weight that is decoded to a float dtype; arguments as for `by_format.find_weight`."""
    shape, dtype = product.shape(product.k), np.dtype(dtype or np.float32)
    stored = [(one.at, *_take(finder, one, scheme)) for one in product.projections]
    decode = functools.partial(_open_blocks, shape, dtype, _BLOCKS[scheme], stored)
    return Unread(shape, dtype, decode=decode)


def find_row_blocks(finder: Finder, product: Product) -> FP8Tensor:
    """Find the weight of a linear with blocks of 128 x 128, which stays in FP8.

    Every row of a block gets the scale of the block.
    """
    n, k = product.n, product.k
    values, stored = _take(finder, product.projections[0], BlockFP8.SQUARE)
    shape = n, fp8_blocks.grid_shape(n, k, fp8_blocks.SQUARE)[1]
    decode = functools.partial(_open_row_scales, shape, stored)
    return FP8Tensor(values, Unread(shape, _F32, decode=decode))  # type: ignore[arg-type]


def _take(finder, one: Projection, scheme: BlockFP8) -> tuple[Any, Any]:
    """Take the values and the scales of a matrix ``[n, k]``, and return both as they are stored."""
    names = [f"{one.stem}.{name}" for name in SCALE_NAMES]
    scale = next((name for name in names if name in finder.tensors), names[0])
    weight, shape = f"{one.stem}.weight", (one.n, one.k)
    rows, columns = fp8_blocks.grid_shape(one.n, one.k, _BLOCKS[scheme])
    finder.take(weight, ["F8_E4M3"], shape)
    info = finder.take(scale, _SCALE_TYPES[scheme], (rows, columns), (rows, 1, columns, 1))
    unused = [f"{one.stem}.{finder.names.input_global}"]
    finder.ignore(unused, f"input scales of {scheme} modules")
    grid, dtype = (info.shape, STORED_TYPES[info.dtype].numpy) if info else ((rows, columns), _F32)
    return Unread(shape, _E4M3, [Piece(weight)]), Unread(grid, dtype, [Piece(scale)], _bad_scales)


def _open_blocks(
    shape: Shape,
    dtype: np.dtype,
    block: fp8_blocks.Block,
    stored: Sequence[_Stored],
    reader: Any,
) -> LazyArray:
    """Return an array that reads and decodes the parts that are asked for.

    Scales that are not finite become problems of `reader`, a `reader.Reader`.
    """
    opened = [(at, reader.open(values), reader.open(scales)) for at, values, scales in stored]
    return LazyArray(shape, dtype, functools.partial(_read, shape, dtype, block, opened))


def _open_row_scales(shape: Shape, stored: Unread, reader: Any) -> LazyArray:
    """Return an array that reads scales of blocks, and repeats them for the rows of each block."""
    return LazyArray(shape, _F32, functools.partial(_repeat, reader.open(stored)))


def _repeat(stored: LazyArray, region: Region) -> np.ndarray:
    rows, groups = region
    size, _ = fp8_blocks.SQUARE
    first = rows.start // size
    found = _read_scales(stored, slice(first, -(-rows.stop // size)), groups)
    return found[np.arange(rows.start, rows.stop) // size - first]


def _read_scales(stored: LazyArray, rows: slice, columns: slice) -> np.ndarray:
    """Return the scales of these rows and columns of blocks in float32."""
    touched = (rows, columns)
    if len(stored.shape) > len(touched):  # [rows, 1, columns, 1]
        touched = (rows, slice(None), columns)
    found = fp8_blocks.decode_scales(stored[touched])
    return found.reshape(found.shape[0], -1)


def _bad_scales(part):
    finite = np.isfinite(fp8_blocks.decode_scales(part)).all()
    return None if finite else "a scale of the weights is not finite"


def _read(
    shape: Shape,
    dtype: np.dtype,
    block: fp8_blocks.Block,
    stored: Sequence[_Stored],
    region: Region,
) -> np.ndarray:
    array = aligned_empty(region_shape(region), dtype)
    for at, values, scales in stored:
        common = overlap(at, shape, region)
        if common is None:
            continue
        inside, wanted = common
        touched, start = [], []
        for bounds, size in zip(wanted, block, strict=True):
            touched.append(slice(bounds.start // size, -(-bounds.stop // size)))
            start.append(bounds.start % size)
        found = _read_scales(scales, *touched)
        array[(*inside, ...)] = fp8_blocks.dequantize(
            values[wanted], found, block, dtype, (start[0], start[1])
        )
    return array
