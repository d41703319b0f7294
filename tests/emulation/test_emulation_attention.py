"""Run the suite of attention on the CUDA kernels, compiled for a CPU."""

import numpy as np
import pytest
from support.emulation.cuda_emulation import HOPPER_SHARED_BYTES, LEAST_SHARED_BYTES, on_device
from support.kernels.attention_suite import CASES, AttentionSuite, assert_nan_stays
from support.kernels.axes import axis
from support.kernels.fp8_attention_suite import (
    FP8_CASES,
    KERNEL_CASES,
    Fp8KernelSuite,
    takes_kernel,
)

from jax_nvfp4_moe.ops import attention

# Few queries with wide heads: a device with more memory has more warps, which sum in another order.
FEW_AND_WIDE = ("one query of the widest", "parts of the widest")
AMPERE_SHARED_BYTES = 163 << 10  # of a block on 8.0

pytestmark = [pytest.mark.cuda_build, pytest.mark.slow]


def attention_on(library, shared_bytes=LEAST_SHARED_BYTES, **device):
    return on_device(library, attention, "attention_cuda", shared_bytes=shared_bytes, **device)


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
            y = attention_on(library)(*operands, **options)
            rows = q.shape[1] * q.shape[2] // k.shape[1]
            if rows <= 16 and q.shape[3] > 192:  # TestFewAndWide
                return y
            # With more shared memory, kernels for few rows have more keys in flight.
            run = attention_on(library, HOPPER_SHARED_BYTES, unchanged=True)
            again = run(*operands, **options)
            np.testing.assert_array_equal(again.view(np.uint16), y.view(np.uint16))
            return y

        return call


def test_nan_among_divided_keys_stays(library):
    assert_nan_stays(attention_on(library))


class TestFewAndWide(AttentionSuite):
    """The forms with four warps, in two stages and in three."""

    case, dtype = axis(*FEW_AND_WIDE), axis("bfloat16", "float16")

    @pytest.fixture(params=[AMPERE_SHARED_BYTES, HOPPER_SHARED_BYTES])
    def run(self, library, request):
        return attention_on(library, request.param, unchanged=True)


class TestFp8(Fp8KernelSuite):
    """The forms in two stages and in three, whose results are the same."""

    case, dtype = axis(*KERNEL_CASES), axis("bfloat16", "float16")

    @pytest.fixture
    def run(self, library):
        def call(*operands, **options):
            larger = attention_on(library, HOPPER_SHARED_BYTES, unchanged=True)
            y, again = (run(*operands, **options) for run in (attention_on(library), larger))
            np.testing.assert_array_equal(again.view(np.uint16), y.view(np.uint16))
            return y

        return call

    def test_some_cases_take_no_kernel(self):
        assert {takes_kernel(case) for case in FP8_CASES.values()} == {True, False}
