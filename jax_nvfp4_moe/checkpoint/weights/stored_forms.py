"""Find the form in which a file stores the weight of a module, from the headers of its tensors."""

import enum
import math
from collections.abc import Mapping
from typing import NamedTuple

from jax_nvfp4_moe.checkpoint.safetensors import TensorInfo
from jax_nvfp4_moe.numerics import fp8_blocks, mxfp4
from jax_nvfp4_moe.numerics.fp8_blocks import BlockFP8
from jax_nvfp4_moe.scheme import CheckpointScheme, FP8ActivationScaling, Scheme

FLOATS = ("BF16", "F16", "F32", "F64")
_CODES = ("U8", "I8", "F4")
_POWERS = ("U8", "F8_E8M0")
_OF_BLOCKS = ".weight_scale_inv"  # the end of a name that only scales of blocks have


class StoredForm(enum.StrEnum):
    """What a file stores for a weight; its value is text for a message."""

    DENSE = "floats"
    NVFP4 = "NVFP4 codes"
    GROUPS = "NVFP4 codes in groups of 32"
    MXFP4 = "MXFP4 codes"
    FP8 = "FP8 values"
    BLOCKS = "FP8 values with scales of blocks"
    MXFP8 = "FP8 values in MXFP8"


# The forms that become NVFP4 on their way. Activations beside them have groups of 32 too, which no
# kernel here rounds, so that their modules are W4A16.
OF_WEIGHTS = (StoredForm.GROUPS, StoredForm.MXFP4)


class Weight(NamedTuple):
    """The tensors of a weight that show its form.

    Attributes:
      values: the codes or the values; None if there are none.
      scale: the scales of blocks, rows or the whole matrix; None if there are none.
    """

    values: TensorInfo | None
    scale: TensorInfo | None


_FORMS: Mapping[type | CheckpointScheme, StoredForm] = {
    Scheme: StoredForm.NVFP4,
    FP8ActivationScaling: StoredForm.FP8,
    BlockFP8.SQUARE: StoredForm.BLOCKS,
    BlockFP8.MX: StoredForm.MXFP8,
}


def form_of(scheme: CheckpointScheme) -> StoredForm:
    """Return the form in which modules of a scheme are stored."""
    if scheme is None:
        return StoredForm.DENSE
    return _FORMS[scheme] if isinstance(scheme, BlockFP8) else _FORMS[type(scheme)]


def find_forms(weight: Weight) -> tuple[StoredForm, ...]:
    """Return the forms that a stored weight may have, the likeliest first.

    Scales of an FP8 weight with at most 128 rows and columns fit two forms. A name that only block
    scales have then puts that form first. The result is empty if a tensor is missing, or if its
    dtype or shape fits no form.
    """
    values, scale = weight
    if values is None:
        return ()
    if values.dtype in FLOATS:
        return (StoredForm.DENSE,) if scale is None else ()
    if scale is None:
        return ()
    if values.dtype in _CODES:
        return _fp4_forms(values, scale)
    return _fp8_forms(values, scale) if values.dtype == "F8_E4M3" else ()


def _fp4_forms(values, scale) -> tuple[StoredForm, ...]:
    """Return the form of 4-bit codes: the dtype of their scales tells, and how many there are."""
    in_groups = values.nbytes == mxfp4.BLOCK // 2 * math.prod(scale.shape)
    if scale.dtype == "F8_E4M3":
        return (StoredForm.GROUPS if in_groups else StoredForm.NVFP4,)
    return (StoredForm.MXFP4,) if in_groups and scale.dtype in _POWERS else ()


def _fp8_forms(values, scale) -> tuple[StoredForm, ...]:
    """Return the forms that FP8 values and their scales may have, by the shape of the scales."""
    e, n, k = (1, 1, 1, *values.shape)[-3:]
    found = []
    if scale.dtype in FLOATS and (
        math.prod(scale.shape) in (1, n) or (e > 1 and math.prod(scale.shape) in (e, e * n, e * k))
    ):
        found.append(StoredForm.FP8)
    grid = fp8_blocks.grid_shape(n, k, fp8_blocks.SQUARE)
    rows = tuple(size for size in scale.shape if size > 1)
    if rows == tuple(size for size in grid if size > 1) and scale.dtype != "U8":
        found.insert(0 if scale.name.endswith(_OF_BLOCKS) else len(found), StoredForm.BLOCKS)
    if scale.dtype in _POWERS and scale.shape == fp8_blocks.grid_shape(n, k, fp8_blocks.MX):
        found.append(StoredForm.MXFP8)
    return tuple(found)
