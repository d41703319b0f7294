"""Fill planned buffers from the files, and check the values that headers cannot show."""

import logging
import math
from collections.abc import Callable
from typing import Any

import numpy as np

from jax_nvfp4_moe.checkpoint.errors import CheckpointError, quoted
from jax_nvfp4_moe.checkpoint.forms import TensorNames
from jax_nvfp4_moe.checkpoint.plan import Buffer, FP8Matrices, Matrices, Piece
from jax_nvfp4_moe.checkpoint.safetensors import STORED_TYPES, Tensors
from jax_nvfp4_moe.float8 import FP8Tensor
from jax_nvfp4_moe.tensor import NVFP4Tensor

log = logging.getLogger("jax_nvfp4_moe")

_ALIGNMENT = 64  # bytes; XLA's CPU client then takes the array without a copy
_NAN_BITS = 0x7F  # E4M3 has no infinities, and NaN where all bits but the sign are set


class Reader:
    """Turns buffers into numpy arrays.

    Attributes:
      problems: what the values have wrong; the caller raises them.
    """

    def __init__(self, tensors: Tensors, names: TensorNames, advance: Callable[[int], None]):
        self._tensors = tensors
        self._names = names
        self._advance = advance
        self.problems: list[str] = []

    def array(self, buffer: Buffer) -> Any:
        """Return the filled buffer, 64-byte aligned; elements that no piece covers are NaN."""
        array = aligned_empty(buffer.shape, buffer.dtype)
        if buffer.dtype == np.float32 and not _covers(buffer):
            array.fill(np.nan)
        # In the order of the files, so that a disk reads ahead.
        for piece in sorted(buffer.pieces, key=self._position):
            self._fill(array, piece)
        return array

    def weight(self, matrices: Matrices) -> NVFP4Tensor:
        """Read one NVFP4 weight; NaN or infinite scales become problems."""
        block_scale = self.array(matrices.block_scale)
        self._check_block_scale(matrices.block_scale, block_scale)
        stored = self.array(matrices.weight_global)
        self._check_global(matrices.weight_global)
        return NVFP4Tensor(
            packed=self.array(matrices.packed),
            block_scale=block_scale,
            global_scale=self._names.to_scale(stored),
            global_divisor=stored if self._names.divides else None,
        )

    def fp8(self, matrices: FP8Matrices) -> FP8Tensor:
        """Read one FP8 weight; NaN or infinite scales become problems."""
        scale = self.array(matrices.scale)
        for piece in matrices.scale.pieces:
            if not np.isfinite(scale[(*piece.at, ...)]).all():
                self._report(piece, "a scale of the weights is not finite")
        return FP8Tensor(self.array(matrices.values), scale)

    def input_scale(self, matrices: Matrices | FP8Matrices, required: bool) -> np.ndarray | None:
        """Read the input scales ``[e]`` of one product.

        A scale that is missing or not a positive finite number takes the largest of the layer.
        Gate and up read the same activations: where theirs differ, the larger counts.

        Args:
          matrices: with a buffer ``[e, parts]``, or None for no scales.
          required: whether it is a problem that there is no valid one; None is returned then.
        """
        if matrices.input_global is None:
            return None
        scales = self.array(matrices.input_global)
        if isinstance(matrices, Matrices):
            scales = self._names.to_scale(scales)
        valid = np.isfinite(scales) & (scales > 0)
        label = quoted(matrices.label)
        if not valid.any():
            message = f"{label}: none of {scales.size} input scales is a positive finite number"
            if required:
                self.problems.append(message)
            else:
                log.warning("%s; activations cannot be rounded with them", message)
            return None
        largest = scales[valid].max()
        if not valid.all():
            log.warning(
                "%s: %d of %d input scales are missing, zero or not finite and take the layer's "
                "largest, %.6g",
                label,
                np.count_nonzero(~valid),
                scales.size,
                largest,
            )
            scales = np.where(valid, scales, largest)
        widest = scales.max(axis=-1)
        differ = np.count_nonzero(scales.min(axis=-1) != widest)
        if differ:
            log.info("%s: %d experts' input scales differ; the larger counts", label, differ)
        return widest

    def _position(self, piece: Piece):
        info = self._tensors.info(piece.name)
        return info.file, info.start

    def _fill(self, array, piece):
        info = self._tensors.info(piece.name)
        place = array[(*piece.at, ...)]
        same_type = STORED_TYPES[info.dtype].numpy == array.dtype
        whole = not piece.part and not piece.swapped
        if whole and same_type and place.nbytes == info.nbytes and place.flags.c_contiguous:
            self._tensors.read_into(piece.name, place)
            self._advance(info.nbytes)
            return
        stored = self._tensors.read(piece.name)[(*piece.part, ...)]
        self._advance(stored.nbytes)
        if piece.swapped:
            stored = np.swapaxes(stored, -1, -2)
        place[...] = stored if piece.shape is None else stored.reshape(piece.shape)

    def _check_block_scale(self, buffer, array):
        for piece in buffer.pieces:
            part = array[(*piece.at, ...)].view(np.uint8)
            count = np.count_nonzero((part & _NAN_BITS) == _NAN_BITS)
            if count:
                self._report(piece, f"{count} of {part.size} block scales are NaN")

    def _check_global(self, buffer):
        for piece in buffer.pieces:
            stored = self._tensors.read(piece.name)
            finite = np.isfinite(stored) & np.isfinite(self._names.to_scale(stored))
            if not finite.all():
                self._report(piece, f"global scale {stored[~finite].flat[0]} is not usable")

    def _report(self, piece, what):
        info = self._tensors.info(piece.name)
        self.problems.append(f"{quoted(info.name)} ({quoted(info.file)}): {what}")

    def raise_problems(self, where: str) -> None:
        """Raise what has been found since the last call.

        Raises:
          CheckpointError: something has.
        """
        if self.problems:
            problems, self.problems = self.problems, []
            raise CheckpointError(problems, where)


def aligned_empty(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """Return an array of unspecified values whose first byte is at a multiple of 64."""
    nbytes = math.prod(shape) * dtype.itemsize
    raw = np.empty(nbytes + _ALIGNMENT, np.uint8)
    start = -raw.ctypes.data % _ALIGNMENT
    return raw[start : start + nbytes].view(dtype).reshape(shape)


def _covers(buffer):
    """Whether the first piece fills the whole buffer."""
    return bool(buffer.pieces) and buffer.pieces[0].at == ()
