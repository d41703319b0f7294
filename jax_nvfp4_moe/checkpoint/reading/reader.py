"""Read arrays, and check the values that the headers do not show."""

import concurrent.futures
import copy
import functools
import math
import operator
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from jax_nvfp4_moe.checkpoint.errors import CheckpointError, quoted
from jax_nvfp4_moe.checkpoint.reading.byte_runs import index_shape
from jax_nvfp4_moe.checkpoint.reading.lazy_array import LazyArray, first_axis, overlap, region_shape
from jax_nvfp4_moe.checkpoint.reading.memory import ReusedPages
from jax_nvfp4_moe.checkpoint.reading.unread import Piece, Unread
from jax_nvfp4_moe.checkpoint.safetensors import STORED_TYPES, Tensors

_THREADS = 8  # the most threads that read at once; a read releases Python's lock
_THREAD_BYTES = 1 << 20  # the fewest bytes for a thread; for fewer, starting it costs too much
_CHECKED = 1 << 18  # the most values that are checked at once, so that they stay in a core's cache

# The dtype of an array -> the names of the stored types whose bytes it has.
_STORED_AS = {
    one.numpy: frozenset(name for name, other in STORED_TYPES.items() if other.numpy == one.numpy)
    for one in STORED_TYPES.values()
}
_Read = tuple[str, memoryview, int]  # the arguments of `Tensors.read_bytes`


class _Placed(NamedTuple):
    """A piece of an array, where its tensor is stored, and where it belongs.

    Attributes:
      file: the file of its tensor.
      start: the offset of the tensor's first byte from the start of the file.
      piece: the piece.
      as_stored: whether the bytes of the tensor fill the piece as they are, with nothing between.
      begin: the offset in the array of the piece's first byte, or of the first row that it touches.
      end: the offset of the end of the piece, or of the last row that it touches.
    """

    file: str
    start: int
    piece: Piece
    as_stored: bool
    begin: int
    end: int


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
        reused_bytes: int = 0,
    ):
        """Make a reader.

        Args:
          tensors: the tensors of the checkpoint.
          advance: called with the number of bytes of each read, for a progress bar.
          where: the checkpoint's folder, for messages.
          reused_bytes: memory of dropped arrays that is kept for the next ones. 0 by default.
        """
        self._tensors = tensors
        self._advance = advance
        self._where = where
        self._pool = concurrent.futures.ThreadPoolExecutor(_THREADS)
        self._pages = ReusedPages(reused_bytes)
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
        return LazyArray(
            leaf.shape, leaf.dtype, functools.partial(self._read, leaf, self._place(leaf))
        )

    def _place(self, leaf: Unread) -> list[_Placed]:
        """Return the pieces of a leaf in the order of the files.

        In this order the operating system can read ahead.
        """
        size = leaf.dtype.itemsize
        strides = [math.prod(leaf.shape[axis + 1 :]) * size for axis in range(leaf.ndim)] or [size]
        plain, placed = _STORED_AS.get(leaf.dtype, ()), []
        for piece in leaf.pieces:
            info = self._tensors.info(piece.name)
            begin = None
            if info.dtype in plain:
                begin = _find_place(piece, info, leaf.shape, strides)
            as_stored = begin is not None
            if begin is not None:
                end = begin + info.nbytes
            else:
                begin, end = (row * strides[0] for row in first_axis(piece.at, leaf.shape))
            placed.append(_Placed(info.file, info.start, piece, as_stored, begin, end))
        placed.sort(key=operator.itemgetter(0, 1))
        return placed

    def _read(self, leaf, placed, region):
        """Read one region of a leaf, whose pieces are `placed`."""
        array = self._pages.empty(region_shape(region), leaf.dtype)
        if leaf.dtype == np.float32 and not _covers(leaf):
            array.fill(np.nan)
        self._copy(self._find(array, leaf, placed, region))
        if leaf.check is not None and not _passes(leaf.check, array):
            self._report_parts(array, leaf, placed, region)
        return array

    def _find(self, array, leaf, placed, region) -> list[_Read]:
        """Return the reads that fill a region, after filling what needs more than a read."""
        start, stop = first_axis(region, leaf.shape)
        row = math.prod(leaf.shape[1:]) * leaf.dtype.itemsize
        begin, end = start * row, stop * row
        # A checkpoint may have tens of thousands of tensors, and the general way takes 0.1 ms for
        # each. Most of them are read whole, and as they are.
        all_behind = array.shape[1:] == tuple(leaf.shape[1:])
        view, reads, whole = _bytes_of(array), [], 0
        for one in placed:
            if one.begin >= end or one.end <= begin:
                continue
            if one.as_stored and all_behind and begin <= one.begin and one.end <= end:
                reads.append((one.piece.name, view[one.begin - begin : one.end - begin], 0))
                whole += one.end - one.begin
            elif (common := overlap(one.piece.at, leaf.shape, region)) is not None:
                reads += self._fill(array, one.piece, common, leaf.shape)
        self._advance(whole)
        return reads

    def _report_parts(self, array, leaf, placed, region):
        """Report each piece in a region whose values do not pass the check of the leaf."""
        for one in placed:
            common = overlap(one.piece.at, leaf.shape, region)
            problem = None if common is None else leaf.check(array[(*common[0], ...)])
            if problem is not None:
                self.report(one.piece, problem)

    def _copy(self, reads):
        """Read bytes of files into their places, with several threads if they are many.

        Each thread takes neighboring bytes of a file.
        """
        threads = min(_THREADS, sum(len(view) for _, view, _ in reads) // _THREAD_BYTES)
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
            self._tensors.read_bytes(*read)

    def _fill(self, array, piece, common, shape):
        """Copy the elements of a piece that need more than a read; return the reads that remain.

        Args:
          array: the array of the region to fill.
          piece: the piece.
          common: the elements that the piece and the region share, as `lazy_array.overlap` returns
            them.
          shape: the shape of the whole array.

        Returns:
          The reads of bytes that only need to be read into their places.
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
                reads.append((piece.name, _bytes_of(part), run.start))
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


def _bytes_of(array) -> memoryview:
    """Return the bytes of a C-contiguous array, to be written."""
    return array.reshape(-1).view(np.uint8).data


def _chunks(name, view, start):
    """Cut one read into chunks, so that several threads can share a large tensor."""
    for first in range(0, len(view), _THREAD_BYTES):
        yield name, view[first : first + _THREAD_BYTES], start + first


def _passes(check, array) -> bool:
    """Return whether all values of an array pass a check, a few of them at a time."""
    flat = array.reshape(-1)
    return all(
        check(flat[first : first + _CHECKED]) is None for first in range(0, flat.size, _CHECKED)
    )


def _find_place(piece: Piece, info, shape, strides) -> int | None:
    """Return the offset in bytes at which the bytes of a tensor fill its place in an array.

    Args:
      piece: a piece of the array, stored in the array's dtype.
      info: what the header says about its tensor.
      shape: the shape of the array.
      strides: the bytes from one index of the array to the next, along each axis.

    Returns:
      None if the bytes do not fill the place as they are: if the tensor is a part, transposed or
      broadcast, or if its place has other bytes between its own.
    """
    if piece.part or piece.swapped:
        return None
    begin, held, several = 0, [], False
    for one, size, stride in zip(piece.at, shape, strides, strict=False):
        first, count = one, 1
        if isinstance(one, slice):
            first, stop, step = one.indices(size)
            count = stop - first if step == 1 else -1
            held.append(count)
        if several and count != size:
            return None
        several = several or count != 1
        begin += first * stride
    place = (*held, *shape[len(piece.at) :])
    if piece.shape is None:
        return begin if info.array_shape == place else None
    fills = piece.shape == place and info.nbytes == math.prod(place) * strides[-1]
    return begin if fills else None


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
