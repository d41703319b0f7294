"""Allocate the arrays that files are read into."""

import contextlib
import math
import mmap

import numpy as np

_ALIGNMENT = 64  # bytes; XLA's CPU client uses an array with this alignment without a copy
_OWN_PAGES = 1 << 18  # bytes from which on an array gets memory pages of its own
_HUGE_PAGE = 1 << 21  # bytes of a huge page on x86-64


def aligned_empty(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """Return an array with unspecified values whose first byte lies at a multiple of 64.

    A large array gets memory pages of its own, which return to the system when the array is
    dropped. With `malloc`, the process would keep the memory of dropped arrays, up to 64 MB in each
    thread. The pages are huge where the system has them, because a read into pages of 4 KB spends
    most of its time on page faults.
    """
    nbytes = math.prod(shape) * dtype.itemsize
    if nbytes >= _OWN_PAGES:
        pages = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if nbytes >= _HUGE_PAGE and hasattr(mmap, "MADV_HUGEPAGE"):
            with contextlib.suppress(OSError):  # the kernel may be built without them
                pages.madvise(mmap.MADV_HUGEPAGE)
        raw = np.frombuffer(pages, np.uint8)
    else:
        raw = np.empty(nbytes + _ALIGNMENT, np.uint8)
    start = -raw.ctypes.data % _ALIGNMENT
    return raw[start : start + nbytes].view(dtype).reshape(shape)
