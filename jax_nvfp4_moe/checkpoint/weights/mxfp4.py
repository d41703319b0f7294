"""Find and read weights in MXFP4: they become NVFP4 on their way, without loss.

gpt-oss stacks all experts of a layer: ``PREFIX.gate_up_proj_blocks`` uint8 ``[e, 2i, h/32, 16]``
with alternating gate and up rows, and ``PREFIX.gate_up_proj_scales`` uint8 ``[e, 2i, h/32]``.
DeepSeek-V4 has one tensor for each expert and projection: ``PREFIX.E.w1.weight`` int8 ``[i, h/2]``
and ``PREFIX.E.w1.scale`` float8_e8m0fnu ``[i, h/32]``. compressed-tensors and ModelOpt store any
linear so: ``weight_packed`` or ``weight`` beside ``weight_scale`` uint8 ``[n, k/32]``.

Each matrix of an expert has a global scale of its own, the power of two that its exponents ask for
(`numerics.mxfp4`). Gate and up share one where it serves both, because some runtimes have one for
both. Reading a part of a matrix therefore reads the scales of the whole matrix first, once.
"""

import functools
import threading
from typing import Any

import ml_dtypes
import numpy as np

from jax_nvfp4_moe.checkpoint.errors import quoted
from jax_nvfp4_moe.checkpoint.names import SCALE_NAMES
from jax_nvfp4_moe.checkpoint.reading.lazy_array import LazyArray, Region
from jax_nvfp4_moe.checkpoint.reading.unread import Piece, Unread
from jax_nvfp4_moe.checkpoint.safetensors import STORED_TYPES
from jax_nvfp4_moe.checkpoint.weights.finder import Finder
from jax_nvfp4_moe.checkpoint.weights.projections import Product, Projection
from jax_nvfp4_moe.numerics import mxfp4
from jax_nvfp4_moe.numerics.nvfp4 import BLOCK as NVFP4_BLOCK
from jax_nvfp4_moe.numerics.tensor import NVFP4Tensor

_BYTES = mxfp4.BLOCK // 2  # of the codes of a block
_CODES, _SCALES = ("U8", "I8"), ("U8", "F8_E8M0")
_E4M3 = np.dtype(ml_dtypes.float8_e4m3fn)
_F32 = np.dtype(np.float32)
_UINT8 = np.dtype(np.uint8)


def is_mxfp4(finder: Finder, products: tuple[Product, Product]) -> bool:
    """Return whether the experts that these products name are stored in MXFP4."""
    names = [_names(finder, product.projections[0]) for product in products]
    down = products[1].projections[0]
    if down.experts is not None:
        return any(codes in finder.tensors for codes, _ in names)
    weight, scale = map(finder.find, names[1])
    if weight is None or scale is None or weight.dtype not in _CODES or scale.dtype not in _SCALES:
        return False
    # NVFP4 with scales of a wrong dtype has twice as many, and a message of its own.
    return scale.shape[-1:] == (weight.array_shape[-1] // _BYTES,)


def find_mxfp4(finder: Finder, product: Product) -> NVFP4Tensor:
    """Find the weight of a product in MXFP4, which is read as NVFP4.

    What is missing or wrong becomes a problem of `finder`. When the weight is read, so do scales
    that are NaN, and exponents too far apart for a cast without loss.
    """
    n, k = product.n, product.k
    single = not product.lead
    if single:  # the matrix of a linear is read as that of the only expert
        first = [one._replace(at=(0,)) for one in product.projections]
        product = product._replace(lead=(1,), projections=first)
    blocks = k // mxfp4.BLOCK
    shape, dtypes = product.shape(k // 2), (_UINT8, _UINT8)
    code_pieces: list[Piece] = []
    scale_pieces: list[Piece] = []
    for one in product.projections:
        name, scale = _names(finder, one)
        rows, stacked = (*one.lead, one.n), one.experts is not None
        info = finder.take(
            name,
            _CODES[:1] if stacked else _CODES,
            *([(*rows, blocks, _BYTES)] if stacked else []),
            (*rows, k // 2),
        )
        scales = finder.take(scale, _SCALES, (*rows, blocks))
        if info is not None and scales is not None:
            finder.nbytes += scales.nbytes  # read for the global scales, and for the block scales
            # The dtypes of the file: their bytes count, and a conversion would change them.
            dtypes = STORED_TYPES[info.dtype].numpy, STORED_TYPES[scales.dtype].numpy
            shape = info.shape if stacked else shape
        code_pieces += one.pieces(name)
        scale_pieces += one.pieces(scale)
    codes = Unread(shape, dtypes[0], code_pieces)
    stored = Unread(product.shape(blocks), dtypes[1], scale_pieces)

    @functools.lru_cache(maxsize=1)
    def cast(reader):
        return _Cast(reader, codes, stored, product.parts)

    def leaf(field: str, shape: tuple[int, ...], dtype: np.dtype) -> Any:
        def decode(reader):
            read = getattr(cast(reader), field)
            if single:
                return LazyArray(shape[1:], dtype, lambda region: read((slice(0, 1), *region))[0])
            return LazyArray(shape, dtype, read)

        return Unread(shape[1:] if single else shape, dtype, decode=decode)

    e, apart = product.lead, product.parts > 1
    return NVFP4Tensor(
        leaf("packed", (*e, n, k // 2), _UINT8),
        leaf("block_scale", (*e, n, k // NVFP4_BLOCK), _E4M3),
        leaf("global_scale", (*e, product.parts) if apart else e, _F32),
    )


def check_mxfp4(finder: Finder, prefix: str, **sizes: int) -> None:
    """Add a problem for each of `sizes` that is not a multiple of the block of MXFP4."""
    for name, size in sizes.items():
        if size % mxfp4.BLOCK:
            finder.problems.append(
                f"{quoted(prefix)}: {name} = {size}: expected a multiple of {mxfp4.BLOCK}, the "
                "block of MXFP4"
            )


def _names(finder, one: Projection) -> tuple[str, str]:
    """Return the names of the codes and of the scales of a matrix, or of those of all experts."""
    if one.experts is not None:
        return f"{one.stem}_blocks", f"{one.stem}_scales"
    names = [f"{one.stem}.{name}" for name in SCALE_NAMES]
    found = next((name for name in names if name in finder.tensors), names[-1])
    packed = f"{one.stem}.{finder.names.packed}"
    return packed if packed in finder.tensors else f"{one.stem}.weight", found


class _Cast:
    """Reads parts of the arrays of an `NVFP4Tensor` from those of MXFP4."""

    def __init__(self, reader: Any, codes: Unread, scales: Unread, parts: int):
        """Make a cast.

        Args:
          reader: a `reader.Reader`.
          codes: bytes, ``[e, n, k/2]`` or ``[e, n, k/32, 16]``.
          scales: E8M0 ``[e, n, k/32]``.
          parts: projections in a matrix, each with a global scale: 2 for gate and up, else 1.
        """
        self._reader, self._parts, self._pieces = reader, parts, scales.pieces
        self._codes, self._scales = reader.open(codes), reader.open(scales)
        e = scales.shape[0]
        self._exponents = np.zeros((e, parts), np.int16)  # of the global scales
        self._keeps_codes = np.ones(e, bool)
        self._known = np.zeros(e, bool)
        self._lock = threading.Lock()

    def packed(self, region: Region) -> np.ndarray:
        """Return the codes of a region."""
        experts, rows, columns = region
        self._find(experts)
        first, stop = columns.start // _BYTES, -(-columns.stop // _BYTES)
        codes = self._read_codes(experts, rows, slice(first, stop))
        if not self._keeps_codes[experts].all():
            scales = self._read_scales(experts, rows, slice(first, stop))
            codes = mxfp4.cast_codes(codes, scales, self._of_rows(experts, rows))
        return codes[..., columns.start - first * _BYTES : columns.stop - first * _BYTES]

    def block_scale(self, region: Region) -> np.ndarray:
        """Return the block scales of a region."""
        experts, rows, columns = region
        self._find(experts)
        repeats = mxfp4.BLOCK // NVFP4_BLOCK
        first, stop = columns.start // repeats, -(-columns.stop // repeats)
        scales = self._read_scales(experts, rows, slice(first, stop))
        cast = mxfp4.cast_scales(scales, self._of_rows(experts, rows))
        return cast[..., columns.start - first * repeats : columns.stop - first * repeats]

    def global_scale(self, region: Region) -> np.ndarray:
        """Return the global scales of a region."""
        self._find(region[0])
        found = np.ldexp(np.float32(1), self._exponents[region[0]].astype(np.int32))
        return found[:, region[1]] if len(region) > 1 else found[:, 0]

    def _read_codes(self, experts, rows, blocks) -> np.ndarray:
        """Return the bytes ``[..., k/2]`` of whole blocks."""
        if len(self._codes.shape) == 3:
            blocks = slice(blocks.start * _BYTES, blocks.stop * _BYTES)
        found = self._codes[experts, rows, blocks].view(np.uint8)
        return found.reshape(*found.shape[:2], -1)

    def _read_scales(self, experts, rows, blocks) -> np.ndarray:
        return self._scales[experts, rows, blocks].view(np.uint8)

    def _of_rows(self, experts, rows) -> np.ndarray:
        """Return the exponents of the global scales of rows: ``[e, n, 1]``."""
        height = self._scales.shape[1] // self._parts
        parts = np.arange(rows.start, rows.stop) // height
        return self._exponents[experts][:, parts, None]

    def _find(self, experts: slice):
        """Find the global scales of some experts, from the scales of their whole matrices."""
        with self._lock:
            for expert in range(experts.start, experts.stop):
                if not self._known[expert]:
                    self._find_one(expert)
                    self._known[expert] = True

    def _find_one(self, expert):
        n, blocks = self._scales.shape[1:]
        height, whole = n // self._parts, slice(0, blocks)
        here = slice(expert, expert + 1)
        scales = self._read_scales(here, slice(0, n), whole)[0]
        joint = mxfp4.stored_range(scales)
        if joint.fits:
            ranges: list[mxfp4.ExponentRange | None] = [joint] * self._parts
        else:
            self._keeps_codes[expert] = False
            codes = self._read_codes(here, slice(0, n), whole)[0]
            ranges = list(map(mxfp4.needed_range, self._split(codes), self._split(scales)))
            joint = mxfp4.join_ranges(ranges)
            if joint is None or joint.fits:
                ranges = [joint] * self._parts
        for part, (needed, own) in enumerate(zip(ranges, self._split(scales), strict=True)):
            self._exponents[expert, part] = mxfp4.find_global_exponent(needed)
            problem = mxfp4.find_problem(own, needed)
            if problem is not None:
                self._report(expert, slice(part * height, (part + 1) * height), problem)

    def _split(self, matrix):
        """Return the rows of gate and of up; all rows of another product."""
        return np.split(matrix, self._parts)

    def _report(self, expert, rows, problem):
        """Add a problem of some rows of an expert to those of the reader."""
        for piece in self._pieces:
            stacked = not piece.at or isinstance(piece.at[0], slice)
            if stacked or (piece.at[0] == expert and piece.at[1:] in ((), (rows,))):
                name = f"expert {expert}, rows from {rows.start} on: " if stacked else ""
                self._reader.report(piece, name + problem)
                return
