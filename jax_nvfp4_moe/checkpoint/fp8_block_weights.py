"""Plan and read FP8 weights whose scales are those of blocks.

A module holds ``weight`` float8_e4m3fn ``[n, k]`` and its scales, one for each block, under one of
`plan.SCALE_NAMES`: ``[n / 128, k / 128]``, with axes of length 1 in between or not, or, for MXFP8,
``[n, k / 32]``. All of them multiply. Activations stay in the model's dtype.

* Linears with blocks of 128 x 128 stay in FP8: every row of a block gets the scale of the block.
* Experts, MXFP8, and matrices that modules keep in a float dtype are decoded as they are read.
"""

import dataclasses
import functools
from typing import Any

import ml_dtypes
import numpy as np

from jax_nvfp4_moe.checkpoint.dense_experts import DenseExpertPlan
from jax_nvfp4_moe.checkpoint.errors import quoted
from jax_nvfp4_moe.checkpoint.expert_names import ExpertSizes, Naming
from jax_nvfp4_moe.checkpoint.lazy_array import LazyArray, Region, overlap, region_shape
from jax_nvfp4_moe.checkpoint.memory import aligned_empty
from jax_nvfp4_moe.checkpoint.plan import (
    FLOATS,
    SCALE_NAMES,
    Buffer,
    FP8Matrices,
    Index,
    LinearPlan,
    Planner,
    TensorSlice,
)
from jax_nvfp4_moe.checkpoint.safetensors import STORED_TYPES
from jax_nvfp4_moe.numerics import fp8_blocks
from jax_nvfp4_moe.numerics.fp8_blocks import BlockFP8
from jax_nvfp4_moe.scheme import FP8ActivationScaling

_BLOCKS = {BlockFP8.SQUARE: fp8_blocks.SQUARE, BlockFP8.MX: fp8_blocks.MX}
_E4M3 = np.dtype(ml_dtypes.float8_e4m3fn)
_SCALE_TYPES = {BlockFP8.SQUARE: (*FLOATS, "F8_E8M0"), BlockFP8.MX: ("U8", "F8_E8M0")}


@dataclasses.dataclass(frozen=True)
class BlockMatrix:
    """One stored matrix ``[n, k]`` and its place in a buffer.

    Attributes:
      name: of its values; float8_e4m3fn.
      scale: name of its scales.
      at: index into the buffer.
      shape: n and k.
      block: rows and columns of a block.
    """

    name: str
    scale: str
    at: Index
    shape: tuple[int, int]
    block: fp8_blocks.Block


@dataclasses.dataclass
class BlockBuffer(Buffer):
    """A dense array to fill with decoded matrices; it has no slices of its own.

    Attributes:
      matrices: what fills it.
    """

    matrices: list[BlockMatrix] = dataclasses.field(default_factory=list)


@dataclasses.dataclass
class RowScaleBuffer(Buffer):
    """The scales of blocks for each row, float32 ``[n, ceil(k / 128)]``; it has no slices.

    Attributes:
      name: of the stored scales ``[ceil(n / 128), ceil(k / 128)]``.
    """

    name: str = ""


def find_block_scheme(planner: Planner, prefix: str) -> BlockFP8 | None:
    """Return the kind of blocks whose scales the weight of a linear has.

    Returns:
      None where the file declares another scheme, or stores floats in spite of it.
    """
    scheme = planner.checkpoint_scheme(prefix)
    return scheme if isinstance(scheme, BlockFP8) else None


def plan_block_linear(
    planner: Planner,
    prefix: str,
    n: int,
    k: int,
    bias: bool | None,
    dtype: np.dtype | None,
    *,
    decodes: bool = False,
) -> LinearPlan | None:
    """Plan one linear in FP8 with scales of blocks; arguments as for `Planner.linear`.

    Args:
      decodes: whether the weight is decoded to `dtype` in any case. By default, weights with blocks
        of 128 x 128 stay in FP8.

    Returns:
      None where the file declares another scheme, or stores floats in spite of it.
    """
    scheme = find_block_scheme(planner, prefix)
    if scheme is None:
        return None
    if decodes or scheme is not BlockFP8.SQUARE:
        plan = LinearPlan(None, dense=_empty((n, k), dtype))
        _take(planner, prefix, scheme, plan.dense, (), (n, k))
    else:
        values = Buffer((n, k), _E4M3, [TensorSlice(f"{prefix}.weight")])
        name = _take_stored(planner, prefix, scheme, (n, k))
        groups = fp8_blocks.grid_shape(n, k, fp8_blocks.SQUARE)[1]
        scales = RowScaleBuffer((n, groups), np.dtype(np.float32), name=name)
        matrices = FP8Matrices(prefix, values, scales)
        plan = LinearPlan(FP8ActivationScaling.WEIGHTS, fp8=matrices)
    name = f"{prefix}.bias"
    if bias or (bias is None and name in planner.tensors):
        plan.bias = planner.array(name, (n,), dtype)
    return plan


def plan_block_experts(
    planner: Planner,
    prefix: str,
    sizes: ExpertSizes,
    naming: Naming | None,
    scheme: BlockFP8,
    dtype: np.dtype | None,
) -> DenseExpertPlan:
    """Plan experts in FP8 with scales of blocks, one tensor an expert and projection."""
    e, h, i = sizes.num_experts, sizes.hidden, sizes.intermediate
    first, down = _empty((e, sizes.parts * i, h), dtype), _empty((e, h, i), dtype)
    plan = DenseExpertPlan(first, down, None, None)
    if naming is None or sizes.bias:
        found = "all experts in one tensor" if naming is None else "experts with biases"
        planner.problems.append(
            f"{quoted(prefix)}: {scheme} weights of {found} are not supported; expected one tensor "
            "for each expert, without biases"
        )
        planner.taken.update(planner.tensors.under(f"{prefix}."))
        return plan
    ups = [naming.gate, naming.up] if sizes.gated else [naming.up]
    for x in range(e):
        for part, name in enumerate(ups):
            at = (x, slice(part * i, (part + 1) * i))
            _take(planner, f"{prefix}.{x}.{name}", scheme, first, at, (i, h))
        _take(planner, f"{prefix}.{x}.{naming.down}", scheme, down, (x,), (h, i))
    return plan


def _empty(shape, dtype) -> BlockBuffer:
    return BlockBuffer(shape, np.dtype(dtype or np.float32))


def _take(planner, module, scheme, buffer, at, shape):
    """Plan the matrix `module` as the part `at` of a buffer."""
    scale = _take_stored(planner, module, scheme, shape)
    buffer.matrices.append(BlockMatrix(f"{module}.weight", scale, at, shape, _BLOCKS[scheme]))


def _take_stored(planner, module, scheme, shape):
    """Take the values and the scales of a matrix ``[n, k]``, and return the name of its scales."""
    names = [f"{module}.{name}" for name in SCALE_NAMES]
    scale = next((name for name in names if name in planner.tensors), names[0])
    n, k = shape
    rows, columns = fp8_blocks.grid_shape(n, k, _BLOCKS[scheme])
    planner.take(f"{module}.weight", ["F8_E4M3"], shape)
    planner.take(scale, _SCALE_TYPES[scheme], (rows, columns), (rows, 1, columns, 1))
    planner.ignore([f"{module}.{planner.names.input_global}"], f"input scales of {scheme} modules")
    return scale


def read_blocks(reader: Any, buffer: BlockBuffer) -> LazyArray:
    """Return an array that reads and decodes the parts that are asked for.

    Scales that are not finite become problems of `reader`, a `reading.Reader`.
    """
    parts = [(matrix, *_stored(reader, matrix)) for matrix in buffer.matrices]
    return LazyArray(buffer.shape, buffer.dtype, functools.partial(_read, buffer, parts))


def read_row_scales(reader: Any, buffer: RowScaleBuffer) -> LazyArray:
    """Return an array that reads scales of blocks, and repeats them for the rows of each block.

    Scales that are not finite become problems of `reader`, a `reading.Reader`.
    """
    stored = _stored_scales(reader, buffer.name)
    return LazyArray(buffer.shape, buffer.dtype, functools.partial(_repeat, stored))


def _repeat(stored: LazyArray, region: Region) -> np.ndarray:
    rows, groups = region
    size, _ = fp8_blocks.SQUARE
    first = rows.start // size
    found = _read_scales(stored, slice(first, -(-rows.stop // size)), groups)
    return found[np.arange(rows.start, rows.stop) // size - first]


def _stored(reader, matrix):
    """Return the values and the scales of a matrix, as they are stored."""
    values = Buffer(matrix.shape, _E4M3, [TensorSlice(matrix.name)])
    return reader.array(values), _stored_scales(reader, matrix.scale)


def _stored_scales(reader, name) -> LazyArray:
    info = reader.find(name)
    scales = Buffer(info.shape, STORED_TYPES[info.dtype].numpy, [TensorSlice(name)])
    return reader.array(scales, _bad_scales)


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


def _read(buffer: BlockBuffer, parts, region: Region) -> np.ndarray:
    array = aligned_empty(region_shape(region), buffer.dtype)
    for matrix, values, scales in parts:
        common = overlap(matrix.at, buffer.shape, region)
        if common is None:
            continue
        inside, wanted = common
        touched, start = [], []
        for bounds, size in zip(wanted, matrix.block, strict=True):
            touched.append(slice(bounds.start // size, -(-bounds.stop // size)))
            start.append(bounds.start % size)
        found = _read_scales(scales, *touched)
        array[(*inside, ...)] = fp8_blocks.dequantize(
            values[wanted], found, matrix.block, buffer.dtype, (start[0], start[1])
        )
    return array
