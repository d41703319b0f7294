"""Test the kernel for linear layers with few rows on a GPU, through the FFI targets."""

import cuda_calls
import pytest
from axes import axis
from gpu_suite import GpuProducts
from kernel_suite import bits
from linear_few_suite import LINEARS, LinearFewSuite, make_linear

pytestmark = pytest.mark.gpu


class TestLinearFew(GpuProducts, LinearFewSuite):
    suffix = axis(*cuda_calls.MOE_TARGETS)

    @pytest.mark.parametrize("case", LINEARS)
    def test_same_bits_twice(self, run, case, numbers):
        call = make_linear(case, numbers)
        assert bits(run, call) == bits(run, call)

    @pytest.mark.parametrize("sizes", [(1, 5120, 2048), (16, 2048, 4096), (64, 5120, 2048)])
    def test_linear_of_a_model_has_the_same_bits_every_time(self, run, sizes):
        call = make_linear(sizes, "bf16-none")
        first = bits(run, call)
        assert all(bits(run, call) == first for _ in range(20))
