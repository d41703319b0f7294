"""Which bytes of a stored array hold a part of it: runs of the file, to be read one by one."""

import dataclasses
import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

Index = Sequence[int | slice | range]  # for the first axes; the rest is taken whole

# Bytes between two runs below which they are read as one: a system call costs as much.
_GAP = 1 << 16
# Most bytes of a run from which elements are picked or converted: a core's cache holds them and
# malloc reuses them. It bounds the memory of bytes that are dropped, too.
_LONGEST = 1 << 17


@dataclasses.dataclass(frozen=True)
class Run:
    """Consecutive bytes of a stored array, and the elements in them.

    Attributes:
      start: first byte, counted from the first of the array.
      nbytes: how many there are.
      at: index of the elements in the part that was asked for.
      shape: of the elements, without leading axes of size 1.
      strides: in bytes, from the first element on.
      contiguous: whether the run holds these elements in their order, and nothing else.
    """

    start: int
    nbytes: int
    at: tuple[slice, ...]
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    contiguous: bool

    def pick(self, raw: np.ndarray, dtype: np.dtype) -> np.ndarray:
        """Return the elements, a view of the run's bytes `raw`."""
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
      shape: of the array.
      itemsize: bytes of an element.
      index: numbers of 0 and more, and slices or ranges of positive step, for the first axes.
      gap: runs that are at most this many bytes apart are read as one.
      longest: most bytes of a run that is not contiguous.
      bounded: whether `longest` counts for contiguous runs too: where elements are converted on
        their way, and not read into their place.
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
    """Return the shape of ``array[index]``; nothing is read."""
    return tuple(len(one) for one in _ranges(shape, index) if isinstance(one, range))


class _Limits(NamedTuple):
    gap: int
    longest: int
    bounded: bool


class _Axis(NamedTuple):
    """Indices along one axis, its stride in bytes, and where they begin in the result."""

    wanted: range
    stride: int
    first: int

    def place(self) -> slice:
        return slice(self.first, self.first + len(self.wanted))

    def part(self, begin: int, count: int) -> "_Axis":
        return _Axis(self.wanted[begin : begin + count], self.stride, self.first + begin)


def _ranges(shape, index) -> list[int | range]:
    """Return what each axis gives: the number that picks one index, or a range of them."""
    whole = [slice(None)] * (len(shape) - len(index))
    return [
        range(*one.indices(size)) if isinstance(one, slice) else one
        for one, size in zip([*index, *whole], shape, strict=True)
    ]


def _span(axes, itemsize) -> int:
    """Return the bytes from the first element to the end of the last."""
    return itemsize + sum((len(axis.wanted) - 1) * axis.wanted.step * axis.stride for axis in axes)


def _cut(start, at, axes, itemsize, limits) -> Iterator[Run]:
    """Yield the runs of one block: one run, or those of its parts along its first axis."""
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
