"""Find the bytes of a stored array that hold a part of it, as runs that are read one by one.

A run is a range of consecutive bytes. A process that needs one shard of a tensor reads only the
runs of that shard instead of the whole tensor.
"""

import dataclasses
import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

# Indexes the first axes of an array. Axes that it does not mention are taken whole.
Index = Sequence[int | slice | range]

# Two runs that are at most this many bytes apart are read as one run. Reading the bytes between
# them costs about as much time as another system call.
_GAP = 1 << 16
# The most bytes in a run whose elements are picked or converted. A run of this size fits into the
# cache of a core, and malloc reuses its memory. The limit also bounds the memory that holds bytes
# which nobody asked for.
_LONGEST = 1 << 17


@dataclasses.dataclass(frozen=True)
class Run:
    """Consecutive bytes of a stored array, and the elements of the array that they hold.

    Attributes:
      start: the offset of the first byte from the first byte of the array.
      nbytes: the number of bytes.
      at: where the elements belong in the requested part, as an index into it.
      shape: the shape of the elements, without the leading axes of size 1.
      strides: the strides of the elements in bytes, counted from the first element.
      contiguous: True if the run holds exactly these elements, in order, and nothing between them.
    """

    start: int
    nbytes: int
    at: tuple[slice, ...]
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    contiguous: bool

    def pick(self, raw: np.ndarray, dtype: np.dtype) -> np.ndarray:
        """Return the elements of the run as a read-only view.

        Args:
          raw: uint8 ``[nbytes]``, the bytes of the run.
          dtype: the dtype of the elements.
        """
        flat = raw.view(dtype)
        return np.lib.stride_tricks.as_strided(flat, self.shape, self.strides, writeable=False)


def find_runs(
    shape: Sequence[int],
    itemsize: int,
    index: Index = (),
    *,
    gap: int = _GAP,
    longest: int = _LONGEST,
    bounded: bool = False,
) -> Iterator[Run]:
    """Yield the runs that hold ``array[index]`` of a row-major array.

    Args:
      shape: the shape of the array.
      itemsize: the bytes of one element.
      index: nonnegative integers, and slices or ranges with a positive step, for the first axes.
      gap: two runs that are at most this many bytes apart are read as one.
      longest: the most bytes in a run that is not contiguous.
      bounded: whether `longest` also limits contiguous runs. Set it if elements are converted on
        the way, because such a run needs a buffer of its own. A contiguous run that is read
        directly into its destination needs none.
    """
    start, axes = 0, []
    for axis, wanted in enumerate(_ranges(shape, index)):
        stride = itemsize * math.prod(shape[axis + 1 :])
        if isinstance(wanted, range):
            axes.append(_Axis(wanted, stride, 0))
        else:
            start += wanted * stride
    if all(len(axis.wanted) for axis in axes):
        yield from _cut(start, (), axes, itemsize, _Limits(gap, longest, bounded))


def index_shape(shape: Sequence[int], index: Index) -> tuple[int, ...]:
    """Return the shape of ``array[index]`` without reading anything."""
    return tuple(len(one) for one in _ranges(shape, index) if isinstance(one, range))


class _Limits(NamedTuple):
    """The limits on runs; `find_runs` describes them."""

    gap: int
    longest: int
    bounded: bool


class _Axis(NamedTuple):
    """The indices along one axis.

    Attributes:
      wanted: the indices into the stored array.
      stride: the bytes from one index of the stored array to the next.
      first: the position of the first index in the result.
    """

    wanted: range
    stride: int
    first: int

    def place(self) -> slice:
        """Return where the indices belong in the result."""
        return slice(self.first, self.first + len(self.wanted))

    def part(self, begin: int, count: int) -> "_Axis":
        """Return the axis reduced to `count` indices from number `begin` on."""
        return _Axis(self.wanted[begin : begin + count], self.stride, self.first + begin)


def _ranges(shape, index) -> list[int | range]:
    """Return for each axis the integer that selects one index, or the range of selected indices."""
    whole = [slice(None)] * (len(shape) - len(index))
    return [
        range(*one.indices(size)) if isinstance(one, slice) else one
        for one, size in zip([*index, *whole], shape, strict=True)
    ]


def _span(axes, itemsize) -> int:
    """Return the number of bytes from the first element to the end of the last one."""
    return itemsize + sum((len(axis.wanted) - 1) * axis.wanted.step * axis.stride for axis in axes)


def _cut(start, at, axes, itemsize, limits) -> Iterator[Run]:
    """Yield the runs of one block: a single run, or the runs of its parts along its first axis."""
    shape = tuple(len(axis.wanted) for axis in axes)
    nbytes = _span(axes, itemsize)
    contiguous = nbytes == itemsize * math.prod(shape)
    if not contiguous or (limits.bounded and nbytes > limits.longest):
        first, *rest = axes
        if len(first.wanted) == 1:
            inner = start + first.wanted[0] * first.stride
            yield from _cut(inner, (*at, first.place()), rest, itemsize, limits)
            return
        step = first.wanted.step * first.stride
        count = 1 if step - _span(rest, itemsize) > limits.gap else max(1, limits.longest // step)
        if len(first.wanted) > count:
            for begin in range(0, len(first.wanted), count):
                part = [first.part(begin, count), *rest]
                yield from _cut(start, at, part, itemsize, limits)
            return
    strides = tuple(axis.wanted.step * axis.stride for axis in axes)
    begin = start + sum(axis.wanted[0] * axis.stride for axis in axes)
    places = (*at, *(axis.place() for axis in axes))
    yield Run(begin, nbytes, places, shape, strides, contiguous)
