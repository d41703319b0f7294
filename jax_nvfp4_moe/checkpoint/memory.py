"""Arrays in memory that files are read into."""

import math
import mmap

import numpy as np

_ALIGNMENT = 64  # bytes; XLA's CPU client then takes the array without a copy
_OWN_PAGES = 1 << 18  # bytes


def aligned_empty(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """Return an array of unspecified values whose first byte is at a multiple of 64.

    A large one has pages of its own, which the system gets back with the array: malloc would keep
    those of arrays that come and go, up to 64 MB of every thread.
    """
    nbytes = math.prod(shape) * dtype.itemsize
    if nbytes >= _OWN_PAGES:
        pages = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        raw = np.frombuffer(pages, np.uint8)
    else:
        raw = np.empty(nbytes + _ALIGNMENT, np.uint8)
    start = -raw.ctypes.data % _ALIGNMENT
    return raw[start : start + nbytes].view(dtype).reshape(shape)
