"""Run the suite of attention on the CUDA kernels, compiled for a CPU."""

import functools

import numpy as np
import pytest
from support.emulation import attention_emulation, cuda_emulation
from support.kernels.attention_suite import CASES, AttentionSuite, assert_nan_stays
from support.kernels.axes import axis
from support.kernels.fp8_attention_suite import (
    FP8_CASES,
    KERNEL_CASES,
    Fp8KernelSuite,
    takes_kernel,
)

# Few queries with wide heads: a device with more memory has more warps, which sum in another order.
FEW_AND_WIDE = ("one query of the widest", "parts of the widest")
AMPERE_SHARED_BYTES = 163 << 10  # of a block on 8.0

pytestmark = [pytest.mark.cuda_build, pytest.mark.slow]


class TestAttention(AttentionSuite):
    case = axis(*CASES)

    @pytest.fixture
    def dtype(self, case):
        """Take turns: a GPU runs each case in both types."""
        return ("bfloat16", "float16")[list(CASES).index(case) % 2]

    @pytest.fixture
    def run(self, library):
        def call(q, k, *others, **options):
            operands = (q, k, *others)
            y = attention_emulation.attention(library, *operands, **options)
            rows = q.shape[1] * q.shape[2] // k.shape[1]
            if rows <= 16 and q.shape[3] > 192:  # TestFewAndWide
                return y
            # With more shared memory, kernels for few rows have more keys in flight.
            shared_bytes = cuda_emulation.HOPPER_SHARED_BYTES
            again = attention_emulation.attention(
                library, *operands, **options, shared_bytes=shared_bytes, older=True
            )
            np.testing.assert_array_equal(again.view(np.uint16), y.view(np.uint16))
            return y

        return call


def test_nan_among_divided_keys_stays(library):
    assert_nan_stays(functools.partial(attention_emulation.attention, library))


class TestFewAndWide(AttentionSuite):
    """The forms with four warps, in two stages and in three."""

    case, dtype = axis(*FEW_AND_WIDE), axis("bfloat16", "float16")

    @pytest.fixture(params=[AMPERE_SHARED_BYTES, cuda_emulation.HOPPER_SHARED_BYTES])
    def run(self, library, request):
        how = {"shared_bytes": request.param, "older": True}
        return functools.partial(attention_emulation.attention, library, **how)


class TestFp8(Fp8KernelSuite):
    """The forms in two stages and in three, whose results are the same."""

    case, dtype = axis(*KERNEL_CASES), axis("bfloat16", "float16")

    @pytest.fixture
    def run(self, library):
        def call(*operands, **options):
            run = functools.partial(attention_emulation.attention, library, *operands, **options)
            y, again = run(), run(shared_bytes=cuda_emulation.HOPPER_SHARED_BYTES, older=True)
            np.testing.assert_array_equal(again.view(np.uint16), y.view(np.uint16))
            return y

        return call

    def test_some_cases_take_no_kernel(self):
        assert {takes_kernel(case) for case in FP8_CASES.values()} == {True, False}
