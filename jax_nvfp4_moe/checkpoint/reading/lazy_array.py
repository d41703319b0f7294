"""An array of a checkpoint that reads only the parts that are asked for."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np

Region = tuple[slice, ...]  # one slice with step 1 for each axis, inside the axis' bounds


class LazyArray:
    """An array that is not read yet: ``lazy[index]`` reads a part and returns a numpy array.

    Attributes:
      shape: the shape of the array.
      dtype: the dtype of the array.
    """

    def __init__(
        self, shape: tuple[int, ...], dtype: np.dtype, read: Callable[[Region], np.ndarray]
    ):
        """Make an array whose part at a `Region` is ``read(region)``."""
        self.shape, self.dtype = tuple(shape), np.dtype(dtype)
        self._read = read

    @property
    def ndim(self) -> int:
        """The number of axes."""
        return len(self.shape)

    @property
    def nbytes(self) -> int:
        """The number of bytes of the whole array."""
        return math.prod(self.shape) * self.dtype.itemsize

    def __getitem__(self, index: Any) -> np.ndarray:
        """Read a part of the array.

        Args:
          index: integers, and slices with step 1, for the first axes.
        """
        index = index if isinstance(index, tuple) else (index,)
        index += (slice(None),) * (self.ndim - len(index))
        region = tuple(map(_bounds, index, self.shape))
        picked = tuple(slice(None) if isinstance(one, slice) else 0 for one in index)
        return self._read(region)[picked]

    def map(self, function: Callable[[np.ndarray], Any]) -> "LazyArray":
        """Return a lazy array whose parts are ``function(part)``.

        The function must keep the shape and the dtype of its part.
        """
        return LazyArray(self.shape, self.dtype, lambda region: function(self._read(region)))


def whole(shape: tuple[int, ...]) -> Region:
    """Return the region that holds all elements of an array of this shape."""
    return tuple(slice(0, n) for n in shape)


def region_shape(region: Region) -> tuple[int, ...]:
    """Return the shape of the elements in `region`."""
    return tuple(bounds.stop - bounds.start for bounds in region)


def _bounds(one: Any, size: int) -> slice:
    """Return the slice of an axis that an integer or a slice selects."""
    if isinstance(one, slice):
        start, stop, step = one.indices(size)
        if step != 1:
            raise ValueError(f"index: expected slices with step 1, got {one}")
        return slice(start, max(start, stop))
    return slice(int(one), int(one) + 1)


def first_axis(at: tuple[Any, ...], shape: tuple[int, ...]) -> tuple[int, int]:
    """Return where the part ``at`` of an array begins and ends along the array's first axis."""
    if not shape:
        return 0, 1
    bounds = _bounds(at[0] if at else slice(None), shape[0])
    return bounds.start, bounds.stop


def overlap(at: tuple[Any, ...], shape: tuple[int, ...], region: Region):
    """Find the elements that a part of an array and a region of the array have in common.

    Args:
      at: the index of the part: integers, and slices with step 1, for the first axes.
      shape: the shape of the array.
      region: the region of the array.

    Returns:
      Two indices of the common elements: one into the array of the region, one into the array of
      the part. None if there are no common elements.
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
