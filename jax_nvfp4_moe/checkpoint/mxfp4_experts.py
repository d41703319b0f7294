"""Plan and read experts in MXFP4: they become NVFP4 on their way, without loss.

gpt-oss stacks all experts of a layer: ``PREFIX.gate_up_proj_blocks`` uint8 ``[e, 2i, h/32, 16]``
with alternating gate and up rows, and ``PREFIX.gate_up_proj_scales`` uint8 ``[e, 2i, h/32]``.
DeepSeek-V4 has one tensor for each expert and projection: ``PREFIX.E.w1.weight`` int8 ``[i, h/2]``
and ``PREFIX.E.w1.scale`` float8_e8m0fnu ``[i, h/32]``.

Each matrix of an expert has a global scale of its own, the power of two that its exponents ask for
(`numerics.mxfp4`). Gate and up share one where it serves both, because some runtimes have one for
both. Reading a part of a matrix therefore reads the scales of the whole matrix first, once.
"""

import dataclasses
import functools
import threading
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np

from jax_nvfp4_moe.checkpoint.errors import quoted
from jax_nvfp4_moe.checkpoint.expert_names import (
    ExpertSizes,
    Naming,
    first_projection,
    plan_stacked_bias,
    stack,
)
from jax_nvfp4_moe.checkpoint.lazy_array import LazyArray, Region
from jax_nvfp4_moe.checkpoint.plan import FLOATS, Buffer, Planner, TensorSlice
from jax_nvfp4_moe.checkpoint.safetensors import STORED_TYPES
from jax_nvfp4_moe.numerics import mxfp4
from jax_nvfp4_moe.numerics.nvfp4 import BLOCK as NVFP4_BLOCK
from jax_nvfp4_moe.numerics.tensor import NVFP4Tensor

_BYTES = mxfp4.BLOCK // 2  # of the codes of a block
_CODES, _SCALES = ("U8", "I8"), ("U8", "F8_E8M0")
# What follows the name of one expert's projection, where its scales are.
_SCALE_NAMES = ("weight_scale_inv", "weight_scale", "scale")
_E4M3 = np.dtype(ml_dtypes.float8_e4m3fn)
_F32 = np.dtype(np.float32)
_UINT8 = np.dtype(np.uint8)


@dataclasses.dataclass
class MXFP4Matrices:
    """Buffers of one product's matrices ``[e, n, k]`` in MXFP4.

    Attributes:
      label: the module, for messages.
      shape: e, n and k.
      parts: projections in a matrix, each with a global scale: 2 for gate and up, else 1.
      packed: codes as bytes, ``[e, n, k/2]`` or ``[e, n, k/32, 16]``.
      scales: E8M0 ``[e, n, k/32]``.
      bias: float32 ``[e, n]`` or None.
      input_global: None: activations are not rounded.
    """

    label: str
    shape: tuple[int, int, int]
    parts: int
    packed: Buffer
    scales: Buffer
    bias: Buffer | None = None
    input_global: None = None

    @property
    def global_shape(self) -> tuple[int, ...]:
        """Shape of the global scales: ``[e]``, or ``[e, parts]``."""
        return (self.shape[0], self.parts) if self.parts > 1 else self.shape[:1]

    def map_arrays(self, make: Callable[[str, tuple[int, ...], np.dtype], Any]) -> NVFP4Tensor:
        """Return a tensor of ``make(name, shape, dtype)`` for each of its arrays."""
        e, n, k = self.shape
        return NVFP4Tensor(
            packed=make("packed", (e, n, k // 2), _UINT8),
            block_scale=make("block_scale", (e, n, k // NVFP4_BLOCK), _E4M3),
            global_scale=make("global_scale", self.global_shape, _F32),
        )


def is_mxfp4(planner: Planner, prefix: str, sizes: ExpertSizes, naming: Naming | None) -> bool:
    """Whether the experts under `prefix` are stored in MXFP4; `naming` as in `find_naming`."""
    if naming is None:
        stems = first_projection(prefix, sizes), f"{prefix}.down_proj"
        return any(f"{stem}_blocks" in planner.tensors for stem in stems)
    module = f"{prefix}.0.{naming.down}"
    weight, scale = planner.find(f"{module}.weight"), planner.find(_scale_name(planner, module))
    if weight is None or scale is None or weight.dtype not in _CODES or scale.dtype not in _SCALES:
        return False
    # NVFP4 with scales of a wrong dtype has twice as many, and a message of its own.
    return scale.shape[-1:] == (weight.array_shape[-1] // _BYTES,)


def plan_mxfp4_experts(
    planner: Planner, prefix: str, sizes: ExpertSizes, naming: Naming | None
) -> tuple[MXFP4Matrices, MXFP4Matrices]:
    """Plan gate and up, and down, of the experts under `prefix`; arguments as for `is_mxfp4`.

    What is missing or wrong goes to ``planner.problems``.
    """
    for name, size in (("hidden", sizes.hidden), ("intermediate", sizes.intermediate)):
        if size % mxfp4.BLOCK:
            planner.problems.append(
                f"{quoted(prefix)}: {name} = {size}: expected a multiple of {mxfp4.BLOCK}, the "
                "block of MXFP4"
            )
    plan = functools.partial(_plan_stack if naming is None else _plan_each, planner, prefix, sizes)
    return plan(naming, True), plan(naming, False)


def _empty_matrices(prefix, sizes, first) -> MXFP4Matrices:
    """Return buffers without slices, of gate and up where `first`, else of down."""
    e, h, i = sizes.num_experts, sizes.hidden, sizes.intermediate
    parts = sizes.parts if first else 1
    n, k = (parts * i, h) if first else (h, i)
    return MXFP4Matrices(
        f"{prefix} {'gate and up' if first else 'down'}",
        (e, n, k),
        parts,
        Buffer((e, n, k // 2), _UINT8),
        Buffer((e, n, k // mxfp4.BLOCK), _UINT8),
        Buffer((e, n), _F32) if sizes.bias else None,
    )


def _plan_stack(planner, prefix, sizes, naming, first) -> MXFP4Matrices:
    """Plan ``PREFIX.PROJECTION_blocks`` and what goes with it, all experts in one tensor."""
    del naming
    matrices = _empty_matrices(prefix, sizes, first)
    stem = first_projection(prefix, sizes) if first else f"{prefix}.down_proj"
    alternate = sizes.intermediate if first and sizes.interleaved and sizes.gated else None
    e, n, k = matrices.shape
    blocks, scales = f"{stem}_blocks", f"{stem}_scales"
    shape = (e, n, k // mxfp4.BLOCK, _BYTES)
    info = planner.take(blocks, _CODES[:1], shape, (e, n, k // 2))
    matrices.packed.shape = info.shape if info else shape
    _take_scales(planner, scales, (e, n, k // mxfp4.BLOCK), matrices)
    matrices.packed.slices += stack(blocks, e, False, alternate)
    matrices.scales.slices += stack(scales, e, False, alternate)
    plan_stacked_bias(planner, stem, matrices.bias, alternate)
    return matrices


def _plan_each(planner, prefix, sizes, naming, first) -> MXFP4Matrices:
    """Plan ``PREFIX.E.PROJECTION.weight`` and what goes with it, one tensor a projection."""
    matrices = _empty_matrices(prefix, sizes, first)
    e, n, k = matrices.shape
    rows = n // matrices.parts
    names = (([naming.gate] if sizes.gated else []) + [naming.up]) if first else [naming.down]
    for x in range(e):
        for part, name in enumerate(names):
            module, at = f"{prefix}.{x}.{name}", (x, slice(part * rows, (part + 1) * rows))
            scales = _scale_name(planner, module)
            info = planner.take(f"{module}.weight", _CODES, (rows, k // 2))
            _keep_dtype(matrices.packed, info)
            _take_scales(planner, scales, (rows, k // mxfp4.BLOCK), matrices)
            matrices.packed.slices.append(TensorSlice(f"{module}.weight", at))
            matrices.scales.slices.append(TensorSlice(scales, at))
            if matrices.bias is not None:
                planner.take(f"{module}.bias", FLOATS, (rows,))
                matrices.bias.slices.append(TensorSlice(f"{module}.bias", at))
    return matrices


def _take_scales(planner, name, shape, matrices):
    info = planner.take(name, _SCALES, shape)
    _keep_dtype(matrices.scales, info)
    if info is not None:
        planner.nbytes += info.nbytes  # read for the global scales, and again for the block scales


def _keep_dtype(buffer, info):
    """Let `buffer` have the dtype of the file: its bytes count, and a conversion changes them."""
    if info is not None:
        buffer.dtype = STORED_TYPES[info.dtype].numpy


def _scale_name(planner, module) -> str:
    names = [f"{module}.{name}" for name in _SCALE_NAMES]
    return next((name for name in names if name in planner.tensors), names[-1])


def read_mxfp4(reader: Any, matrices: MXFP4Matrices) -> NVFP4Tensor:
    """Return the matrices in NVFP4, which are read and cast where someone asks for them.

    Scales that are NaN, and exponents too far apart for a cast without loss, become problems of
    `reader`, a `reading.Reader`.
    """
    cast = _Cast(reader, matrices)
    return matrices.map_arrays(
        lambda name, shape, dtype: LazyArray(shape, dtype, getattr(cast, name))
    )


class _Cast:
    """Reads parts of the arrays of an `NVFP4Tensor` from those of MXFP4."""

    def __init__(self, reader: Any, matrices: MXFP4Matrices):
        self._reader, self._matrices = reader, matrices
        self._codes, self._scales = (
            reader.array(buffer) for buffer in (matrices.packed, matrices.scales)
        )
        e, parts = matrices.shape[0], matrices.parts
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
        height = self._matrices.shape[1] // self._matrices.parts
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
        _, n, k = self._matrices.shape
        height, whole = n // self._matrices.parts, slice(0, k // mxfp4.BLOCK)
        here = slice(expert, expert + 1)
        scales = self._read_scales(here, slice(0, n), whole)[0]
        joint = mxfp4.stored_range(scales)
        if joint.fits:
            ranges: list[mxfp4.ExponentRange | None] = [joint] * self._matrices.parts
        else:
            self._keeps_codes[expert] = False
            codes = self._read_codes(here, slice(0, n), whole)[0]
            ranges = list(map(mxfp4.needed_range, self._split(codes), self._split(scales)))
            joint = mxfp4.join_ranges(ranges)
            if joint is None or joint.fits:
                ranges = [joint] * self._matrices.parts
        for part, (needed, own) in enumerate(zip(ranges, self._split(scales), strict=True)):
            self._exponents[expert, part] = mxfp4.find_global_exponent(needed)
            problem = mxfp4.find_problem(own, needed)
            if problem is not None:
                self._report(expert, slice(part * height, (part + 1) * height), problem)

    def _split(self, matrix):
        """Return the rows of gate and of up; all rows of another product."""
        return np.split(matrix, self._matrices.parts)

    def _report(self, expert, rows, problem):
        """Add a problem of some rows of an expert to those of the reader."""
        for tensor_slice in self._matrices.scales.slices:
            stacked = not tensor_slice.at or isinstance(tensor_slice.at[0], slice)
            if stacked or tensor_slice.at == (expert, rows):
                name = f"expert {expert}, rows from {rows.start} on: " if stacked else ""
                self._reader.report(tensor_slice, name + problem)
                return
