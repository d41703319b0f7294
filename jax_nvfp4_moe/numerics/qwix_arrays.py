"""Quantized arrays of Qwix, which are recognized by their fields: Qwix need not be installed."""

from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jax import lax
from jax.core import Tracer

from jax_nvfp4_moe.numerics.nvfp4 import BLOCK, pack

# The name by which Qwix calls its own NVFP4, whose float scales it has rounded to E4M3.
QTYPE = "nvfp4"


@runtime_checkable
class QArrayLike(Protocol):
    """The fields of a `qwix.QArray`, whose value is ``qvalue * scale``.

    The shape of `scale` divides that of `qvalue`. Each number of `scale` belongs to a tile of
    `qvalue`.
    """

    @property
    def qvalue(self) -> Any:
        """The codes, with the shape of the array."""

    @property
    def scale(self) -> Any:
        """The scales of the tiles, in the dtype of the dequantized values."""

    @property
    def zero_point(self) -> Any:
        """The code of the value 0, or None."""

    @property
    def qtype(self) -> Any:
        """The dtype of the codes, or the name of a format."""


def read_qarray(array: QArrayLike, axis: int) -> tuple[jax.Array, jax.Array]:
    """Return the codes and the block scales of an array of Qwix; `from_qarray` describes them.

    Args:
      array: a `qwix.QArray`.
      axis: the axis of the blocks, -1 or -2. It becomes the last axis.

    Returns:
      uint8 ``[..., n, k/2]`` and float8_e4m3fn ``[..., n, k/16]``.

    Raises:
      ValueError: if NVFP4 cannot hold the values exactly, or nobody can tell; the message says why.
    """
    values, scale = jnp.asarray(array.qvalue), array.scale
    _check_values(array, axis)
    shape = list(values.shape)
    shape[axis] //= BLOCK
    if scale.ndim != len(shape) or not all(map(_divides, scale.shape, shape)):
        raise ValueError(
            f"array: expected one scale for each {BLOCK} values along axis {axis}, or for a "
            f"multiple of them: a scale whose shape divides {tuple(shape)}; got {scale.shape}"
        )
    block_scale = _round_scale(array)
    for where, (part, size) in enumerate(zip(scale.shape, shape, strict=True)):
        if part != size:
            block_scale = jnp.repeat(block_scale, size // part, axis=where)
    codes = lax.bitcast_convert_type(values, jnp.uint4).astype(jnp.uint8)
    if axis == -2:
        codes, block_scale = codes.mT, block_scale.mT
    return pack(codes), block_scale


def make_qarray(codes: jax.Array, scale: jax.Array, global_scale: jax.Array, axis: int):
    """Return a `qwix.QArray`; `NVFP4Tensor.to_qarray` describes it.

    Args:
      codes: float4_e2m1fn ``[..., n, k]``.
      scale: float32 ``[..., n, k/16]``.
      global_scale: by which `scale` was multiplied.
      axis: axis of the blocks in the result, -1 or -2.
    """
    import qwix  # an optional package

    _check_axis(axis)
    if axis == -2:
        codes, scale = codes.mT, scale.mT
    known = not isinstance(global_scale, Tracer) and bool((np.asarray(global_scale) == 1).all())
    return qwix.QArray(codes, scale, None, QTYPE if known else jnp.float4_e2m1fn)


def _check_axis(axis):
    """Check that an axis is one of the last two."""
    if axis not in (-1, -2):
        raise ValueError(f"axis: expected -1 or -2, one of the last two axes; got {axis}")


def _divides(part, size):
    """Return whether an axis of scales divides one of blocks, which may be empty."""
    return part == size or (part > 0 and size % part == 0)


def _check_values(array, axis):
    """Check the dtype and the axes of the values of an array of Qwix."""
    values = array.qvalue
    if values.dtype != jnp.float4_e2m1fn or array.zero_point is not None:
        point = "no zero point" if array.zero_point is None else "a zero point"
        raise ValueError(
            "array: expected a qwix.QArray of float4_e2m1fn values without a zero point; got "
            f"{values.dtype.name} and {point}"
        )
    _check_axis(axis)
    if values.ndim < 2 or values.shape[axis] % BLOCK:
        raise ValueError(
            f"array: expected at least two axes, and a multiple of {BLOCK} values along axis "
            f"{axis}; got shape {values.shape}"
        )


def _round_scale(array):
    """Return the scales as float8_e4m3fn, if that keeps their values.

    Qwix stores the scales of its "nvfp4" in the dtype of the dequantized values, rounded to E4M3.
    Values that this process has are compared. In a trace there are none: the name must suffice.
    """
    scale = array.scale
    if isinstance(scale, Tracer) or not getattr(scale, "is_fully_addressable", True):
        exact = scale.dtype == jnp.float8_e4m3fn or array.qtype == QTYPE
        wrong = f"unknown scales of {scale.dtype.name} and qtype {array.qtype!r}"
    else:
        given = np.asarray(scale).astype(np.float32)
        rounded = given.astype(ml_dtypes.float8_e4m3fn).astype(np.float32)
        exact = np.array_equal(rounded, given, equal_nan=True)
        wrong = f"scales of {scale.dtype.name} with other values"
    if not exact:
        raise ValueError(
            f"array: expected scales that are E4M3 numbers, as those of Qwix' {QTYPE!r}; got "
            f"{wrong}. Quantize with qtype={QTYPE!r}"
        )
    return jnp.asarray(scale).astype(jnp.float8_e4m3fn)
