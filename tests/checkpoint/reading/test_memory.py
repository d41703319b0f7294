"""Test the memory into which files are read."""

import pathlib

import jax
import ml_dtypes
import numpy as np
import pytest

from jax_nvfp4_moe.checkpoint.reading.memory import ReusedPages, aligned_empty

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


def fill(pages, number, size=1 << 20):
    """Return an array from `pages` that has one number everywhere."""
    array = pages.empty((size,), np.dtype(np.uint8))
    array[...] = number
    return array


@pytest.mark.parametrize("shape", [(), (0, 3), (5,), (1 << 18,), (3, 1 << 20), (7, 300_001)])
def test_reused_pages_make_arrays_of_every_shape(shape):
    pages = ReusedPages(1 << 26)
    for number in range(3):
        array = pages.empty(shape, np.dtype("float32"))
        assert (array.shape, array.dtype) == (shape, "float32")
        assert array.size == 0 or array.ctypes.data % 64 == 0
        array[...] = number
        assert (array == number).all()
        large = array.nbytes >= 1 << 18
        del array
        assert (pages.free_bytes > 0) == large


def test_a_dropped_array_leaves_its_pages_to_the_next_one():
    pages = ReusedPages(1 << 21)
    first, second = fill(pages, 1), fill(pages, 2)
    places = {first.ctypes.data, second.ctypes.data}
    assert len(places) == 2
    assert pages.free_bytes == 0
    del first, second
    assert pages.free_bytes == 1 << 21
    again = [fill(pages, 3), fill(pages, 4)]
    assert {one.ctypes.data for one in again} == places
    other = fill(pages, 5, 1 << 19)
    assert other.ctypes.data not in places, "another size has pages of its own"


def test_no_more_is_kept_than_asked_for():
    pages = ReusedPages(5 << 19)
    arrays = [fill(pages, number) for number in range(4)]
    del arrays
    assert pages.free_bytes == 2 << 20


@pytest.mark.parametrize(
    "refer",
    [
        lambda array: array[7:9],
        lambda array: array.reshape(2, -1).view(np.uint16).T,
        lambda array: memoryview(array)[:4],
        lambda array: np.asarray(memoryview(array)),
        lambda array: array.view(ml_dtypes.float8_e4m3fn)[::2],
        jax.device_put,  # on a CPU without a copy
    ],
)
def test_what_still_refers_to_an_array_keeps_its_pages(refer):
    pages = ReusedPages(1 << 26)
    array = fill(pages, 1)
    part = refer(array)
    expected = np.asarray(part).copy()
    del array
    later = [fill(pages, 2) for _ in range(3)]
    np.testing.assert_array_equal(np.asarray(part), expected)
    del later, part
    jax.device_put(0)  # JAX drops what it no longer needs in one of its next calls
    assert pages.free_bytes == 4 << 20


def test_arrays_outlive_what_made_them():
    pages = ReusedPages(1 << 26)
    array, dropped = fill(pages, 1), fill(pages, 2)
    del dropped, pages
    assert (array == 1).all()
    del array
