"""Test the kernel for linear layers with few rows on a GPU, through the FFI targets."""

import pytest
from support.extensions import cuda_calls
from support.kernels.axes import axis
from support.kernels.gpu_suite import GpuProducts
from support.kernels.kernel_suite import assert_accurate, bits
from support.kernels.linear_few_suite import LINEARS, LinearFewSuite, make_linear

pytestmark = pytest.mark.gpu

# Sizes of models, for which a GPU takes each form of the kernels for few rows.
MODEL_SIZES = [
    *((rows, 5120, 2048) for rows in (1, 8, 16, 32, 64)),
    *((rows, 2048, 4096) for rows in (1, 4, 8, 16, 64)),
    *((rows, 12288, 2048) for rows in (2, 48)),
    *((rows, 28672, 4096) for rows in (1, 4, 16)),
    *((rows, 4096, 14336) for rows in (1, 4, 16)),
    *((rows, 65600, 2048) for rows in (1, 9)),
]


class TestLinearFew(GpuProducts, LinearFewSuite):
    suffix = axis(*cuda_calls.MOE_TARGETS)

    @pytest.mark.parametrize("case", LINEARS)
    def test_same_bits_twice(self, run, case, numbers):
        call = make_linear(case, numbers)
        assert bits(run, call) == bits(run, call)

    @pytest.mark.parametrize("sizes", MODEL_SIZES, ids=str)
    def test_linear_of_a_model_matches_float64(self, run, sizes, numbers):
        assert_accurate(run, make_linear(sizes, numbers))

    @pytest.mark.parametrize("sizes", MODEL_SIZES, ids=str)
    def test_linear_of_a_model_has_the_same_bits_every_time(self, run, sizes, numbers):
        call = make_linear(sizes, numbers)
        first = bits(run, call)
        assert all(bits(run, call) == first for _ in range(20))
