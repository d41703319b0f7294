"""Fill planned buffers from the files, and check the values that headers cannot show."""

import concurrent.futures
import functools
import logging
from collections.abc import Callable
from typing import Any

import numpy as np

from jax_nvfp4_moe.checkpoint.byte_runs import index_shape
from jax_nvfp4_moe.checkpoint.errors import CheckpointError, quoted
from jax_nvfp4_moe.checkpoint.formats import TensorNames
from jax_nvfp4_moe.checkpoint.lazy_array import (
    LazyArray,
    first_axis,
    overlap,
    region_shape,
    whole,
)
from jax_nvfp4_moe.checkpoint.memory import aligned_empty
from jax_nvfp4_moe.checkpoint.plan import Buffer, FP8Matrices, Matrices, TensorSlice
from jax_nvfp4_moe.checkpoint.safetensors import STORED_TYPES, Tensors
from jax_nvfp4_moe.numerics.fp8 import FP8Tensor
from jax_nvfp4_moe.numerics.tensor import NVFP4Tensor

log = logging.getLogger("jax_nvfp4_moe")

_THREADS = 8  # that read at once, in the operating system and without Python's lock
_THREAD_BYTES = 1 << 20  # fewest for each, so that starting it does not count
Check = Callable[[np.ndarray], str | None]  # a part of an array -> what is wrong with it
_NAN_BITS = 0x7F  # E4M3 has no infinities, and NaN where all bits but the sign are set


class Reader:
    """Turns buffers into arrays that read what is asked for.

    Attributes:
      problems: what the values have wrong; the caller raises them.
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
          tensors: of the checkpoint.
          names: of the tensors of its quantized modules.
          advance: told how many bytes are read.
          where: the checkpoint, for messages.
        """
        self._tensors = tensors
        self._names = names
        self._advance = advance
        self._where = where
        self._pool = concurrent.futures.ThreadPoolExecutor(_THREADS)
        self.problems: list[str] = []

    def array(self, buffer: Buffer, check: Check | None = None) -> LazyArray:
        """Return an array that fills the parts of a buffer that are asked for.

        Args:
          buffer: 64-byte aligned in memory; elements that no slice covers are NaN.
          check: says what is wrong with a part, which becomes a problem; None for nothing.
        """
        read = functools.partial(self._read, buffer, self._in_order(buffer), check)
        return LazyArray(buffer.shape, buffer.dtype, read)

    def read(self, buffer: Buffer, check: Check | None = None) -> np.ndarray:
        """Return the filled buffer; as `array`, now."""
        return self._read(buffer, self._in_order(buffer), check, whole(buffer.shape))

    def _in_order(self, buffer):
        """Return first and last index of each slice, and the slice, in the order of the files.

        So a disk reads ahead, and what has other experts is passed over at little cost.
        """
        slices = sorted(buffer.slices, key=self._position)
        return [
            (*first_axis(tensor_slice.at, buffer.shape), tensor_slice) for tensor_slice in slices
        ]

    def _read(self, buffer, slices, check, region):
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
        """Read tensors' bytes into their places, neighbours in a file by the same thread."""
        threads = min(_THREADS, sum(place.nbytes for _, place, _ in reads) // _THREAD_BYTES)
        if threads < 2:
            self._copy_in_turn(reads)
            return
        chunks = [chunk for read in reads for chunk in _chunks(*read)]
        share = -(-len(chunks) // threads)
        parts = [chunks[first : first + share] for first in range(0, len(chunks), share)]
        futures = [self._pool.submit(self._copy_in_turn, part) for part in parts]
        concurrent.futures.wait(futures)  # after an error the caller closes the files
        for future in futures:
            future.result()

    def _copy_in_turn(self, reads):
        for read in reads:
            self._tensors.read_into(*read)

    def weight(self, matrices: Matrices) -> NVFP4Tensor:
        """Read one NVFP4 weight; NaN or infinite scales become problems."""
        stored = self.array(matrices.weight_global, self._bad_global)
        parts: dict[str, Any] = {
            "packed": self.array(matrices.packed),
            "block_scale": self.array(matrices.block_scale, _bad_block_scales),
            "global_scale": stored.map(self._names.to_scale),
            "global_divisor": stored if self._names.divides else None,
        }
        return NVFP4Tensor(**parts)

    def fp8(self, matrices: FP8Matrices) -> FP8Tensor:
        """Read one FP8 weight; NaN or infinite scales become problems."""
        scale: Any = self.array(matrices.scale, _bad_scales)
        values: Any = self.array(matrices.values)
        return FP8Tensor(values, scale)

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
        scales = self.read(matrices.input_global)  # a shard needs all: the largest is the layer's
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

    def _position(self, tensor_slice: TensorSlice):
        info = self._tensors.info(tensor_slice.name)
        return info.file, info.start

    def _fill(self, array, tensor_slice, common, shape):
        """Copy what `tensor_slice` has of a region into its `array`; `common` is of `overlap`.

        Returns:
          Arguments of `Tensors.read_into` for what is still to be read, as it lies in the file.
        """
        info = self._tensors.info(tensor_slice.name)
        inside, of_slice = common
        place = array[(*inside, ...)]
        stored_dtype = STORED_TYPES[info.dtype].numpy
        index = _stored_index(tensor_slice, info, of_slice, _held_shape(tensor_slice.at, shape))
        if index is None:  # a scale or a few, spread
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
        message = None if check is None else check(part)
        if message is not None:
            self._report(tensor_slice, message)

    def _bad_global(self, stored):
        finite = np.isfinite(stored) & np.isfinite(self._names.to_scale(stored))
        return None if finite.all() else f"global scale {stored[~finite].flat[0]} is not usable"

    def _report(self, tensor_slice, what):
        info = self._tensors.info(tensor_slice.name)
        self.problems.append(f"{quoted(info.name)} ({quoted(info.file)}): {what}")

    def cache_scale(self, prefix: str, name: str, buffer: Buffer) -> np.ndarray:
        """Read the scales ``[heads]`` of what `prefix` keeps as `name`, "k" or "v".

        A scale that is missing, or not a positive finite number, is 1.
        """
        scale = self.read(buffer)
        if not buffer.slices:
            scale[...] = 1
        valid = np.isfinite(scale) & (scale > 0)
        if not valid.all():
            log.warning("%s: a scale of %s is not a positive number and becomes 1", prefix, name)
        return np.where(valid, scale, np.float32(1))

    def raise_problems(self) -> None:
        """Raise what has been found since the last call.

        Raises:
          CheckpointError: something has.
        """
        if self.problems:
            problems, self.problems = self.problems, []
            raise CheckpointError(problems, self._where)


def _chunks(name, place, start):
    """Cut one read, so that several threads share a large tensor."""
    flat = place.reshape(-1).view(np.uint8)
    for first in range(0, max(1, flat.size), _THREAD_BYTES):
        yield name, flat[first : first + _THREAD_BYTES], start + first


def _bad_block_scales(part):
    part = part.view(np.uint8)
    count = np.count_nonzero((part & _NAN_BITS) == _NAN_BITS)
    return f"{count} of {part.size} block scales are NaN" if count else None


def _bad_scales(part):
    return None if np.isfinite(part).all() else "a scale of the weights is not finite"


def _stored_index(tensor_slice, info, of_slice, held):
    """Return the index into a stored tensor of the elements `of_slice` of a slice.

    None where the tensor takes another shape, or is repeated, to become what `tensor_slice` holds.
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
    """Return the shape of the part ``at`` of an array."""
    kept = [
        len(range(*one.indices(n)))
        for one, n in zip(at, shape, strict=False)
        if isinstance(one, slice)
    ]
    return (*kept, *shape[len(at) :])


def _covers(buffer):
    """Whether the first slice fills the whole buffer."""
    return bool(buffer.slices) and buffer.slices[0].at == ()
