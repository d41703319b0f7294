"""Run the suite of the recurrence of Mamba-2 on the CUDA kernels, compiled for a CPU."""

import functools

import numpy as np
import pytest
import recurrent_emulation
from axes import axis
from cuda_emulation import _LEAST_SHARED_BYTES, HOPPER_SHARED_BYTES
from mamba2_scan_suite import (
    RAGGED,
    SCAN_CASES,
    Mamba2KernelSuite,
    make_lengths,
    make_scan,
    scan_in_float64,
    scan_in_tf32,
)

from jax_nvfp4_moe.testing import assert_as_accurate_as

pytestmark = [pytest.mark.cuda_build, pytest.mark.slow]


class TestMamba2Scan(Mamba2KernelSuite):
    case = axis(*SCAN_CASES)

    @pytest.fixture
    def run(self, library):
        return functools.partial(recurrent_emulation.mamba2_scan, library)


AMPERE_SHARED_BYTES = 163 << 10


# Small chunks with two stages and with one, and blocks of two warps that compute.
@pytest.mark.parametrize(
    ("multiprocessors", "shared_bytes"),
    [
        (1, AMPERE_SHARED_BYTES),
        (1, _LEAST_SHARED_BYTES),
        (132, HOPPER_SHARED_BYTES),
    ],
)
@pytest.mark.parametrize(
    "case",
    [
        "full widths, ragged rows",
        "more heads of a group than a block has",
        "rows of unequal length",
        "narrow rows of unequal length",
    ],
)
def test_other_devices(library, case, multiprocessors, shared_bytes, monkeypatch):
    operands, lengths = make_scan(case), make_lengths(case)
    run = functools.partial(recurrent_emulation.mamba2_scan, library, lengths=lengths)
    found = run(*operands, multiprocessors=multiprocessors, shared_bytes=shared_bytes)
    exact = scan_in_float64(*operands, lengths)
    plain = scan_in_tf32(operands, monkeypatch, lengths)
    for got, want, yardstick in zip(found, exact, plain, strict=True):
        assert_as_accurate_as(got, yardstick, want)
    if shared_bytes == HOPPER_SHARED_BYTES:  # how a device divides the heads changes no bit
        again = run(*operands)
        for one, other in zip(found, again, strict=True):
            np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("row", range(1, len(RAGGED.lengths)))
def test_a_row_is_the_same_bits_alone(library, row):
    """The other rows and their padding change nothing."""
    name = "rows of unequal length"
    operands, lengths = make_scan(name), make_lengths(name)
    run = functools.partial(recurrent_emulation.mamba2_scan, library)
    y, state = run(*operands, lengths=lengths)
    x, dt, a, B, C, D, before = operands
    own = slice(row, row + 1), slice(lengths[row])
    alone, last = run(x[own], dt[own], a, B[own], C[own], D, before[own[:1]])
    np.testing.assert_array_equal(y[row, : lengths[row]], alone[0])
    np.testing.assert_array_equal(state[row], last[0])
