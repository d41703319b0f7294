"""Allocate the arrays that files are read into."""

import contextlib
import math
import mmap
import weakref

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
        return _shape(np.frombuffer(_map_pages(nbytes), np.uint8), shape, dtype)
    return _shape(np.empty(nbytes + _ALIGNMENT, np.uint8), shape, dtype)


class ReusedPages:
    """Allocates as `aligned_empty`, and keeps the pages of dropped arrays for new ones.

    The system fills new pages with zeros, which can take longer than to read a file into them. A
    checkpoint has many arrays of the same few sizes, one after the other.

    The pages of an array are free when nothing refers to the array, to its parts or to its views: a
    transfer to a device keeps what it still reads.
    """

    def __init__(self, most: int):
        """Keep at most `most` bytes that no array uses."""
        self._most = most
        # Size -> pages. Threads only append and pop, which are single steps of the interpreter. A
        # lock does not help: the thread that holds it may drop an array, and would wait for itself.
        self._free: dict[int, list[mmap.mmap]] = {}

    def empty(self, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
        """Return an array with unspecified values whose first byte lies at a multiple of 64."""
        nbytes = math.prod(shape) * dtype.itemsize
        if nbytes < _OWN_PAGES:
            return aligned_empty(shape, dtype)
        try:
            pages = self._free[nbytes].pop()
        except (KeyError, IndexError):
            pages = _map_pages(nbytes)
        raw = np.frombuffer(pages, np.uint8)  # the base of all its views
        weakref.finalize(raw, _leave, weakref.ref(self), pages).atexit = False
        return _shape(raw, shape, dtype)

    @property
    def free_bytes(self) -> int:
        """Number of bytes that are kept and that no array uses."""
        return sum(size * len(pages) for size, pages in list(self._free.items()))

    def keep(self, pages: mmap.mmap) -> None:
        """Keep pages that no array uses any more, unless they would be too many."""
        if self.free_bytes + len(pages) <= self._most:
            self._free.setdefault(len(pages), []).append(pages)


def _leave(owner, pages):
    """Give pages back to their `ReusedPages`, if it still exists."""
    reused = owner()
    if reused is not None:
        reused.keep(pages)


def _map_pages(nbytes) -> mmap.mmap:
    """Return new memory pages."""
    pages = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if nbytes >= _HUGE_PAGE and hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # the kernel may be built without them
            pages.madvise(mmap.MADV_HUGEPAGE)
    return pages


def _shape(raw, shape, dtype):
    """Return the aligned part of some bytes as an array."""
    start = -raw.ctypes.data % _ALIGNMENT
    nbytes = math.prod(shape) * dtype.itemsize
    return raw[start : start + nbytes].view(dtype).reshape(shape)
