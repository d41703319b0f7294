"""Deferred: an array of a checkpoint of which only the parts that someone asks for are read."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np

Region = tuple[slice, ...]  # one slice of step 1 for each axis, within it


class LazyArray:
    """Stands for an array until a part of it is read: ``deferred[index]`` is a numpy array.

    Attributes:
      shape, dtype: of the array.
    """

    def __init__(
        self, shape: tuple[int, ...], dtype: np.dtype, read: Callable[[Region], np.ndarray]
    ):
        """Make one whose part in a `Region` is ``read(region)``."""
        self.shape, self.dtype = tuple(shape), np.dtype(dtype)
        self._read = read

    @property
    def ndim(self) -> int:
        """Number of axes."""
        return len(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of the whole array."""
        return math.prod(self.shape) * self.dtype.itemsize

    def __getitem__(self, index: Any) -> np.ndarray:
        """Read a part: `index` has slices of step 1, or numbers, for its first axes."""
        index = index if isinstance(index, tuple) else (index,)
        index += (slice(None),) * (self.ndim - len(index))
        region = tuple(map(_bounds, index, self.shape))
        picked = tuple(slice(None) if isinstance(one, slice) else 0 for one in index)
        return self._read(region)[picked]

    def map(self, function: Callable[[np.ndarray], Any]) -> "LazyArray":
        """Return the array whose parts are ``function(part)``, of the same shape and dtype."""
        return LazyArray(self.shape, self.dtype, lambda region: function(self._read(region)))


def whole(shape: tuple[int, ...]) -> Region:
    """Return the region of all elements."""
    return tuple(slice(0, n) for n in shape)


def region_shape(region: Region) -> tuple[int, ...]:
    """Return the shape of the elements of `region`."""
    return tuple(bounds.stop - bounds.start for bounds in region)


def _bounds(one: Any, size: int) -> slice:
    if isinstance(one, slice):
        start, stop, step = one.indices(size)
        if step != 1:
            raise ValueError(f"index: expected slices of step 1, got {one}")
        return slice(start, max(start, stop))
    return slice(int(one), int(one) + 1)


def first_axis(at: tuple[Any, ...], shape: tuple[int, ...]) -> tuple[int, int]:
    """Return where the part ``at`` of an array begins and ends along its first axis."""
    if not shape:
        return 0, 1
    bounds = _bounds(at[0] if at else slice(None), shape[0])
    return bounds.start, bounds.stop


def overlap(at: tuple[Any, ...], shape: tuple[int, ...], region: Region):
    """Find what the part ``at`` of an array and a region of it have in common.

    Args:
      at: index of the part: numbers, and slices of step 1, for the first axes.
      shape: of the array.
      region: of it.

    Returns:
      Indices of the common elements in the region's array and in the part's; None where there are
      none.
    """
    inside: list[Any] = []
    of_part: list[slice] = []
    at = (*at, *(slice(None),) * (len(shape) - len(at)))
    for one, size, wanted in zip(at, shape, region, strict=True):
        held = _bounds(one, size)
        start, stop = max(held.start, wanted.start), min(held.stop, wanted.stop)
        if start >= stop:
            return None
        if isinstance(one, slice):
            inside.append(slice(start - wanted.start, stop - wanted.start))
            of_part.append(slice(start - held.start, stop - held.start))
        else:
            inside.append(start - wanted.start)
    return tuple(inside), tuple(of_part)
