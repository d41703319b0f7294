"""Read tensors into planned buffers, and check the values that the headers do not show."""

import concurrent.futures
import functools
import logging
from collections.abc import Callable
from typing import Any

import numpy as np

from jax_nvfp4_moe.checkpoint.byte_runs import index_shape
from jax_nvfp4_moe.checkpoint.errors import CheckpointError, quoted
from jax_nvfp4_moe.checkpoint.formats import TensorNames
from jax_nvfp4_moe.checkpoint.fp8_block_weights import (
    BlockBuffer,
    RowScaleBuffer,
    read_blocks,
    read_row_scales,
)
from jax_nvfp4_moe.checkpoint.lazy_array import (
    LazyArray,
    first_axis,
    overlap,
    region_shape,
    whole,
)
from jax_nvfp4_moe.checkpoint.memory import aligned_empty
from jax_nvfp4_moe.checkpoint.mxfp4_experts import MXFP4Matrices, read_mxfp4
from jax_nvfp4_moe.checkpoint.plan import Buffer, FP8Matrices, Matrices, TensorSlice
from jax_nvfp4_moe.checkpoint.safetensors import STORED_TYPES, TensorInfo, Tensors
from jax_nvfp4_moe.numerics.fp8 import FP8Tensor
from jax_nvfp4_moe.numerics.tensor import NVFP4Tensor

log = logging.getLogger("jax_nvfp4_moe")

_THREADS = 8  # the most threads that read at once; a read releases Python's lock
_THREAD_BYTES = 1 << 20  # the fewest bytes for a thread; for fewer, starting it costs too much
Check = Callable[[np.ndarray], str | None]  # takes a part of an array, returns what is wrong
_NAN_BITS = 0x7F  # an E4M3 value is NaN if all bits but the sign are set; it has no infinities


class Reader:
    """Turns buffers into lazy arrays, which read the parts that are asked for.

    Attributes:
      problems: what is wrong with the values read so far. The caller raises them.
    """

    def __init__(
        self,
        tensors: Tensors,
        names: TensorNames,
        advance: Callable[[int], None],
        where: str = "",
    ):
        """Make a reader.

        Args:
          tensors: the tensors of the checkpoint.
          names: the names of the tensors of its quantized modules.
          advance: called with the number of bytes of each read, for a progress bar.
          where: the checkpoint's folder, for messages.
        """
        self._tensors = tensors
        self._names = names
        self._advance = advance
        self._where = where
        self._pool = concurrent.futures.ThreadPoolExecutor(_THREADS)
        self.problems: list[str] = []

    def array(self, buffer: Buffer, check: Check | None = None) -> LazyArray:
        """Return a lazy array that fills a buffer, part by part.

        Args:
          buffer: the buffer. Its parts are 64-byte aligned in memory. In a float32 array, elements
            without a slice are NaN.
          check: takes a part and returns what is wrong with it, which is added to the problems, or
            None. Without a function, nothing is checked.
        """
        if isinstance(buffer, BlockBuffer):
            return read_blocks(self, buffer)
        if isinstance(buffer, RowScaleBuffer):
            return read_row_scales(self, buffer)
        read = functools.partial(self._read, buffer, self._in_order(buffer), check)
        return LazyArray(buffer.shape, buffer.dtype, read)

    def find(self, name: str) -> TensorInfo:
        """Return what the header says of the tensor `name`."""
        return self._tensors.info(name)

    def read(self, buffer: Buffer, check: Check | None = None) -> np.ndarray:
        """Read a whole buffer now; otherwise as `array`."""
        return self._read(buffer, self._in_order(buffer), check, whole(buffer.shape))

    def _in_order(self, buffer):
        """Return the slices in the order of the files, each with its first and last index.

        In this order the operating system can read ahead. The indices show cheaply which slices
        hold none of the experts that a shard asks for.
        """
        slices = sorted(buffer.slices, key=self._position)
        return [
            (*first_axis(tensor_slice.at, buffer.shape), tensor_slice) for tensor_slice in slices
        ]

    def _read(self, buffer, slices, check, region):
        """Read one region of a buffer."""
        array = aligned_empty(region_shape(region), buffer.dtype)
        if buffer.dtype == np.float32 and not _covers(buffer):
            array.fill(np.nan)
        start, stop = first_axis(region, buffer.shape)
        found = [
            (tensor_slice, common)
            for first, end, tensor_slice in slices
            if first < stop
            and start < end
            and (common := overlap(tensor_slice.at, buffer.shape, region)) is not None
        ]
        self._copy([read for each in found for read in self._fill(array, *each, buffer.shape)])
        for tensor_slice, common in found:
            self._check(tensor_slice, array[(*common[0], ...)], check)
        return array

    def _copy(self, reads):
        """Read the bytes of tensors into their places, with several threads if they are many.

        Each thread takes neighboring bytes of a file.
        """
        threads = min(_THREADS, sum(place.nbytes for _, place, _ in reads) // _THREAD_BYTES)
        if threads < 2:
            self._copy_in_turn(reads)
            return
        chunks = [chunk for read in reads for chunk in _chunks(*read)]
        share = -(-len(chunks) // threads)
        parts = [chunks[first : first + share] for first in range(0, len(chunks), share)]
        futures = [self._pool.submit(self._copy_in_turn, part) for part in parts]
        # After an error the caller closes the files, so no thread may still be reading then.
        concurrent.futures.wait(futures)
        for future in futures:
            future.result()

    def _copy_in_turn(self, reads):
        for read in reads:
            self._tensors.read_into(*read)

    def weight(self, matrices: Matrices | MXFP4Matrices) -> NVFP4Tensor:
        """Return one NVFP4 weight, or the cast of one in MXFP4.

        Reading a NaN or infinite scale, or exponents that no cast can keep, adds a problem.
        """
        if isinstance(matrices, MXFP4Matrices):
            return read_mxfp4(self, matrices)
        stored = self.array(matrices.weight_global, self._bad_global)
        parts: dict[str, Any] = {
            "packed": self.array(matrices.packed),
            "block_scale": self.array(matrices.block_scale, _bad_block_scales),
            "global_scale": stored.map(self._names.to_scale),
            "global_divisor": stored if self._names.divides else None,
        }
        return NVFP4Tensor(**parts)

    def fp8(self, matrices: FP8Matrices) -> FP8Tensor:
        """Return one FP8 weight. Reading a NaN or infinite scale adds a problem."""
        scale: Any = self.array(matrices.scale, _bad_scales)
        values: Any = self.array(matrices.values)
        return FP8Tensor(values, scale)

    def input_scale(
        self, matrices: Matrices | FP8Matrices | MXFP4Matrices, required: bool
    ) -> np.ndarray | None:
        """Read the input scales of one product.

        A scale that is missing, or not a positive finite number, is replaced by the largest scale
        of the layer. So is one that is denormal, or whose reciprocal is: kernels take it for 0, and
        the expert would return zeros. Gate and up read the same activations: if their scales
        differ, the larger one is used.

        Args:
          matrices: the buffers of the product. Their `input_global` is ``[e, parts]``, or None.
          required: whether it is a problem if no scale is valid.

        Returns:
          float32 ``[e]``. None if there is no buffer, or if no scale is valid.
        """
        if matrices.input_global is None:
            return None
        # Every shard reads the scales of all experts, because an invalid scale is replaced by the
        # largest of the whole layer.
        scales = self.read(matrices.input_global)
        if isinstance(matrices, Matrices):
            scales = self._names.to_scale(scales)
        valid = _are_usable(scales)
        label = quoted(matrices.label)
        if not valid.any():
            message = f"{label}: none of {scales.size} input scales is a positive finite number"
            if required:
                self.problems.append(message)
            else:
                log.warning("%s, so that activations cannot be rounded with them", message)
            return None
        largest = scales[valid].max()
        if not valid.all():
            log.warning(
                "%s: %d of %d input scales are missing, zero or not finite, or denormal; they are "
                "replaced by the layer's largest input scale, %.6g",
                label,
                np.count_nonzero(~valid),
                scales.size,
                largest,
            )
            scales = np.where(valid, scales, largest)
        widest = scales.max(axis=-1)
        differ = np.count_nonzero(scales.min(axis=-1) != widest)
        if differ:
            log.info(
                "%s: the input scales of gate and up differ in %d experts; the larger one is used",
                label,
                differ,
            )
        return widest

    def _position(self, tensor_slice: TensorSlice):
        """Return the file of a slice's tensor, and the position of the tensor in it."""
        info = self._tensors.info(tensor_slice.name)
        return info.file, info.start

    def _fill(self, array, tensor_slice, common, shape):
        """Copy the elements of a slice that need more than a read; return the reads that remain.

        Args:
          array: the array of the region to fill.
          tensor_slice: the slice.
          common: the elements that the slice and the region share, as `lazy_array.overlap` returns
            them.
          shape: the shape of the whole buffer.

        Returns:
          The arguments of `Tensors.read_into` for bytes that only need to be read into their
          places.
        """
        info = self._tensors.info(tensor_slice.name)
        inside, of_slice = common
        place = array[(*inside, ...)]
        stored_dtype = STORED_TYPES[info.dtype].numpy
        index = _stored_index(tensor_slice, info, of_slice, _held_shape(tensor_slice.at, shape))
        if index is None:  # the tensor is reshaped or broadcast: one scale, or a few
            stored = self._tensors.read(tensor_slice.name, tensor_slice.part)
            stored = stored if tensor_slice.shape is None else stored.reshape(tensor_slice.shape)
            self._advance(min(stored.nbytes, place.nbytes))
            held = _held_shape(tensor_slice.at, shape)
            place[...] = np.broadcast_to(stored, held)[(*of_slice, ...)]
            return []
        self._advance(place.size * stored_dtype.itemsize)
        place = np.swapaxes(place, -1, -2) if tensor_slice.swapped else place
        as_stored = stored_dtype == array.dtype and not tensor_slice.swapped
        reads = []
        for run in self._tensors.runs(tensor_slice.name, index, bounded=not as_stored):
            part = place[run.at]
            if as_stored and run.contiguous and part.flags.c_contiguous:
                reads.append((tensor_slice.name, part, run.start))
            else:
                part[...] = self._tensors.read_run(tensor_slice.name, run)
        return reads

    def _check(self, tensor_slice, part, check):
        """Add a problem if `check` finds something wrong with a part."""
        message = None if check is None else check(part)
        if message is not None:
            self.report(tensor_slice, message)

    def _bad_global(self, stored):
        """Return what is wrong with global scales.

        The scales must be finite. If the format divides by them, their reciprocals must be finite
        too.
        """
        finite = np.isfinite(stored) & np.isfinite(self._names.to_scale(stored))
        if finite.all():
            return None
        expected = "finite and not zero" if self._names.divides else "finite"
        return f"expected a global scale that is {expected}, got {stored[~finite].flat[0]}"

    def report(self, tensor_slice: TensorSlice, what: str) -> None:
        """Add a problem with the tensor of a slice."""
        info = self._tensors.info(tensor_slice.name)
        self.problems.append(f"{quoted(info.name)} ({quoted(info.file)}): {what}")

    def cache_scale(self, prefix: str, name: str, buffer: Buffer) -> np.ndarray:
        """Read the scales with which an attention module stores its keys or values in FP8.

        A scale that is missing, or not a positive finite number of normal size, becomes 1. Numbers
        below the smallest normal float32 are 0 on many devices.

        Args:
          prefix: the attention module, for messages.
          name: "k" or "v".
          buffer: float32 ``[heads]``. It has no slice if the file has no scale.
        """
        scale = self.read(buffer)
        if not buffer.slices:
            scale[...] = 1
        valid = np.isfinite(scale) & (scale >= np.finfo(np.float32).tiny)
        if not valid.all():
            log.warning(
                "%s: a scale of the KV cache (%s) is not a positive finite number of normal size "
                "and becomes 1",
                prefix,
                name,
            )
        return np.where(valid, scale, np.float32(1))

    def raise_problems(self) -> None:
        """Raise the problems found since the last call, if there are any.

        Raises:
          CheckpointError: lists the problems.
        """
        if self.problems:
            problems, self.problems = self.problems, []
            raise CheckpointError(problems, self._where)


def _are_usable(scales):
    """Return which input scales are positive normal numbers with normal reciprocals."""
    smallest = np.finfo(np.float32).tiny
    usable = np.isfinite(scales) & (scales >= smallest)
    return usable & (np.float32(1) / np.where(usable, scales, np.float32(1)) >= smallest)


def _chunks(name, place, start):
    """Cut one read into chunks, so that several threads can share a large tensor."""
    flat = place.reshape(-1).view(np.uint8)
    for first in range(0, max(1, flat.size), _THREAD_BYTES):
        yield name, flat[first : first + _THREAD_BYTES], start + first


def _bad_block_scales(part):
    """Return what is wrong with E4M3 block scales: none may be NaN."""
    part = part.view(np.uint8)
    count = np.count_nonzero((part & _NAN_BITS) == _NAN_BITS)
    return f"{count} of {part.size} block scales are NaN" if count else None


def _bad_scales(part):
    return None if np.isfinite(part).all() else "expected finite scales, got NaN or infinity"


def bad_channel_scales(part: np.ndarray) -> str | None:
    """Return what is wrong with scales of input channels: a tool divides the weights by them."""
    part = part.astype(np.float32)
    sound = np.isfinite(part) & (part > 0)
    count = np.count_nonzero(~sound)
    return f"{count} of {part.size} channel scales are not positive and finite" if count else None


def _stored_index(tensor_slice, info, of_slice, held):
    """Return the index into the stored tensor of the elements `of_slice` of a slice.

    Returns:
      None if the tensor is reshaped or broadcast to fill the slice. It then has no single index.
    """
    shape = index_shape(info.array_shape, tensor_slice.part)
    given = (*shape[:-2], shape[-1], shape[-2]) if tensor_slice.swapped else shape
    if tensor_slice.shape is not None or given != held:
        return None
    wanted = list(of_slice)
    if tensor_slice.swapped:
        wanted[-2:] = wanted[-1], wanted[-2]
    index = []
    rest = [slice(None)] * (len(info.array_shape) - len(tensor_slice.part))
    for one, size in zip([*tensor_slice.part, *rest], info.array_shape, strict=True):
        if isinstance(one, slice):
            index.append(range(*one.indices(size))[wanted.pop(0)])
        else:
            index.append(one)
    return index


def _held_shape(at, shape):
    """Return the shape of the part ``at`` of an array of this shape."""
    kept = [
        len(range(*one.indices(n)))
        for one, n in zip(at, shape, strict=False)
        if isinstance(one, slice)
    ]
    return (*kept, *shape[len(at) :])


def _covers(buffer):
    """Return whether the first slice fills the whole buffer."""
    return bool(buffer.slices) and buffer.slices[0].at == ()
