"""Run the suites of `prepare_heads` on its CUDA kernel."""

import cuda_calls
import pytest
from axes import axis
from head_suite import CASES, PAIRS, HeadCallSuite, HeadSuite, jitted

pytestmark = pytest.mark.gpu


class TestHeads(HeadSuite):
    case = axis(*CASES)
    pair = axis(*PAIRS)

    @pytest.fixture
    def run(self):
        return lambda call: jitted(call, backend="heads_cuda")


class TestCalls(HeadCallSuite):
    backend = "heads_cuda"
    ffi_target = "nvfp4_prepare_heads_cuda"

    @pytest.fixture(autouse=True)
    def register(self):
        cuda_calls.register()
