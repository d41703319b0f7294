"""Run the suites of `prepare_heads` on its CUDA kernel."""

import pytest
from support.extensions import cuda_calls
from support.kernels.axes import axis
from support.kernels.fp8_head_suite import FP8_HEAD_CASES, Fp8HeadSuite
from support.kernels.head_call_suite import HeadCallSuite
from support.kernels.head_suite import CASES, PAIRS, HeadSuite, jitted

pytestmark = pytest.mark.gpu


class TestHeads(HeadSuite):
    case = axis(*CASES)
    pair = axis(*PAIRS)

    @pytest.fixture
    def run(self):
        return lambda call: jitted(call, backend="heads_cuda")


class TestFp8(Fp8HeadSuite):
    case = axis(*FP8_HEAD_CASES)
    pair = axis(*PAIRS)

    @pytest.fixture
    def run(self):
        return lambda call: jitted(call, backend="heads_cuda")


class TestCalls(HeadCallSuite):
    backend = "heads_cuda"
    ffi_target = "nvfp4_prepare_heads_cuda"
    fp8_target = "nvfp4_prepare_heads_fp8_cuda"

    @pytest.fixture(autouse=True)
    def register(self):
        cuda_calls.register()
