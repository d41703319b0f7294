"""Read arrays, and check the values that the headers do not show."""

import concurrent.futures
import copy
import functools
from collections.abc import Callable
from typing import Any

import numpy as np

from jax_nvfp4_moe.checkpoint.errors import CheckpointError, quoted
from jax_nvfp4_moe.checkpoint.reading.byte_runs import index_shape
from jax_nvfp4_moe.checkpoint.reading.lazy_array import LazyArray, first_axis, overlap, region_shape
from jax_nvfp4_moe.checkpoint.reading.memory import aligned_empty
from jax_nvfp4_moe.checkpoint.reading.unread import Piece, Unread
from jax_nvfp4_moe.checkpoint.safetensors import STORED_TYPES, Tensors

_THREADS = 8  # the most threads that read at once; a read releases Python's lock
_THREAD_BYTES = 1 << 20  # the fewest bytes for a thread; for fewer, starting it costs too much


class Reader:
    """Opens leaves as lazy arrays, which read the parts that are asked for.

    Attributes:
      problems: what is wrong with the values read so far. The caller raises them.
    """

    def __init__(
        self,
        tensors: Tensors,
        advance: Callable[[int], None],
        where: str = "",
    ):
        """Make a reader.

        Args:
          tensors: the tensors of the checkpoint.
          advance: called with the number of bytes of each read, for a progress bar.
          where: the checkpoint's folder, for messages.
        """
        self._tensors = tensors
        self._advance = advance
        self._where = where
        self._pool = concurrent.futures.ThreadPoolExecutor(_THREADS)
        self.problems: list[str] = []

    def fork(self) -> "Reader":
        """Return a reader of the same tensors that keeps its own problems."""
        other = copy.copy(self)
        other.problems = []
        return other

    def open(self, leaf: Unread) -> Any:
        """Return the array of a leaf, which is read part by part.

        Returns:
          A `LazyArray`, whose parts are 64-byte aligned in memory, a numpy array, or None; see
          `Unread`.
        """
        if leaf.decode is not None:
            return leaf.decode(self)
        read = functools.partial(self._read, leaf, self._in_order(leaf))
        return LazyArray(leaf.shape, leaf.dtype, read)

    def _in_order(self, leaf):
        """Return the pieces in the order of the files, each with its first and last index.

        In this order the operating system can read ahead. The indices show cheaply which pieces
        hold none of the experts that a shard asks for.
        """
        pieces = sorted(leaf.pieces, key=self._position)
        return [(*first_axis(piece.at, leaf.shape), piece) for piece in pieces]

    def _read(self, leaf, pieces, region):
        """Read one region of a leaf."""
        array = aligned_empty(region_shape(region), leaf.dtype)
        if leaf.dtype == np.float32 and not _covers(leaf):
            array.fill(np.nan)
        found = list(self._find(array, leaf, pieces, region))
        self._copy([read for _, _, reads in found for read in reads])
        for piece, place, _ in found if leaf.check else ():
            problem = leaf.check(place)
            if problem is not None:
                self.report(piece, problem)
        return array

    def _find(self, array, leaf, pieces, region):
        """Yield each piece in a region, the part of `array` that it fills, and its reads."""
        start, stop = first_axis(region, leaf.shape)
        # A checkpoint may have tens of thousands of tensors, and the general way takes 0.1 ms for
        # each. Most of them are read whole, and as they are.
        all_behind = array.shape[1:] == tuple(leaf.shape[1:])
        for first, end, piece in pieces:
            if first >= stop or end <= start:
                continue
            place = None
            if all_behind and start <= first and end <= stop:
                place = self._place_of_whole(array, piece, first - start, end - start)
            if place is not None:
                self._advance(place.nbytes)
                yield piece, place, [(piece.name, place, 0)]
            elif (common := overlap(piece.at, leaf.shape, region)) is not None:
                reads = self._fill(array, piece, common, leaf.shape)
                yield piece, array[(*common[0], ...)], reads

    def _place_of_whole(self, array, piece: Piece, first, end):
        """Return the part of an array that a piece fills if that is one read of its whole tensor.

        Args:
          array: the array, which has the whole piece.
          piece: the piece.
          first: the index of the piece along the first axis of `array`.
          end: the index behind it.

        Returns:
          A view. None if the tensor is a part, reshaped, or converted, or if its bytes have other
          bytes between them.
        """
        if piece.part or piece.shape is not None or piece.swapped:
            return None
        info = self._tensors.info(piece.name)
        if STORED_TYPES[info.dtype].numpy != array.dtype:
            return None
        one = piece.at[0] if piece.at else None
        where = slice(first, end) if one is None or isinstance(one, slice) else first
        place = array[(where, *piece.at[1:], ...)] if array.ndim else array
        return place if place.shape == info.array_shape and place.flags.c_contiguous else None

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

    def _position(self, piece: Piece):
        """Return the file of a piece's tensor, and the position of the tensor in it."""
        info = self._tensors.info(piece.name)
        return info.file, info.start

    def _fill(self, array, piece, common, shape):
        """Copy the elements of a piece that need more than a read; return the reads that remain.

        Args:
          array: the array of the region to fill.
          piece: the piece.
          common: the elements that the piece and the region share, as `lazy_array.overlap` returns
            them.
          shape: the shape of the whole array.

        Returns:
          The arguments of `Tensors.read_into` for bytes that only need to be read into their
          places.
        """
        info = self._tensors.info(piece.name)
        inside, of_piece = common
        place = array[(*inside, ...)]
        stored_dtype = STORED_TYPES[info.dtype].numpy
        index = _stored_index(piece, info, of_piece, _held_shape(piece.at, shape))
        if index is None:  # the tensor is reshaped or broadcast: one scale, or a few
            stored = self._tensors.read(piece.name, piece.part)
            stored = stored if piece.shape is None else stored.reshape(piece.shape)
            self._advance(min(stored.nbytes, place.nbytes))
            held = _held_shape(piece.at, shape)
            place[...] = np.broadcast_to(stored, held)[(*of_piece, ...)]
            return []
        self._advance(place.size * stored_dtype.itemsize)
        place = np.swapaxes(place, -1, -2) if piece.swapped else place
        as_stored = stored_dtype == array.dtype and not piece.swapped
        reads = []
        for run in self._tensors.runs(piece.name, index, bounded=not as_stored):
            part = place[(*run.at, ...)]
            if as_stored and run.contiguous and part.flags.c_contiguous:
                reads.append((piece.name, part, run.start))
            else:
                part[...] = self._tensors.read_run(piece.name, run)
        return reads

    def report(self, piece: Piece, what: str) -> None:
        """Add a problem with the tensor of a piece."""
        info = self._tensors.info(piece.name)
        self.problems.append(f"{quoted(info.name)} ({quoted(info.file)}): {what}")

    def raise_problems(self) -> None:
        """Raise the problems found since the last call, if there are any.

        Raises:
          CheckpointError: lists the problems.
        """
        if self.problems:
            problems, self.problems = self.problems, []
            raise CheckpointError(problems, self._where)


def _chunks(name, place, start):
    """Cut one read into chunks, so that several threads can share a large tensor."""
    if place.nbytes <= _THREAD_BYTES:
        yield name, place, start
        return
    flat = place.reshape(-1).view(np.uint8)
    for first in range(0, max(1, flat.size), _THREAD_BYTES):
        yield name, flat[first : first + _THREAD_BYTES], start + first


def _stored_index(piece, info, of_piece, held):
    """Return the index into the stored tensor of the elements `of_piece` of a piece.

    Returns:
      None if the tensor is reshaped or broadcast to fill the piece. It then has no single index.
    """
    shape = index_shape(info.array_shape, piece.part)
    given = (*shape[:-2], shape[-1], shape[-2]) if piece.swapped else shape
    if piece.shape is not None or given != held:
        return None
    wanted = list(of_piece)
    if piece.swapped:
        wanted[-2:] = wanted[-1], wanted[-2]
    index = []
    rest = [slice(None)] * (len(info.array_shape) - len(piece.part))
    for one, size in zip([*piece.part, *rest], info.array_shape, strict=True):
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


def _covers(leaf):
    """Return whether the first piece fills the whole array."""
    return bool(leaf.pieces) and leaf.pieces[0].at == ()
