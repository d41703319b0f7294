"""Test the memory into which files are read."""

import pathlib

import numpy as np
import pytest

from jax_nvfp4_moe.checkpoint.reading.memory import aligned_empty

HUGE_PAGES = pathlib.Path("/sys/kernel/mm/transparent_hugepage/enabled")


@pytest.mark.parametrize("shape", [(), (0, 3), (5,), (1 << 18,), (3, 1 << 20), (7, 300_001)])
@pytest.mark.parametrize("dtype", ["uint8", "float32"])
def test_arrays_are_aligned_and_writable(shape, dtype):
    array = aligned_empty(shape, np.dtype(dtype))
    assert (array.shape, array.dtype) == (shape, dtype)
    assert array.size == 0 or array.ctypes.data % 64 == 0
    array[...] = 3
    assert (array == 3).all()


def test_large_arrays_ask_for_huge_pages():
    """A kernel with huge pages marks the memory of a large array with the flag "hg"."""
    array = aligned_empty((1 << 22,), np.dtype(np.uint8))
    at, flags = array.ctypes.data, None
    for line in pathlib.Path("/proc/self/smaps").read_text().splitlines():
        name, *rest = line.split()
        if "-" in name and not name.endswith(":"):
            first, last = (int(one, 16) for one in name.split("-"))
            inside = first <= at < last
        elif name == "VmFlags:" and inside:
            flags = rest
    assert flags is not None
    assert ("hg" in flags) == HUGE_PAGES.exists()
