"""Test the engine for FP4 tensor cores on a CPU, which emulates the FP4 instruction.

The tests cannot show what the instruction itself does, or how fast it is.
"""

import pytest
from support.emulation.emulation_suite import EmulatedLayers, EmulatedProducts, run_layer
from support.kernels.axes import axis
from support.kernels.float64_layer import Options
from support.kernels.fp4_suite import FusedQuantizationSuite
from support.kernels.kernel_cases import F16, constant, make_layer, uniform
from support.kernels.kernel_suite import LayerSuite, ProductSuite, assert_accurate

pytestmark = [pytest.mark.cuda_build, pytest.mark.slow]

LARGER = {
    "sorted_by_two_blocks": (2100, 1, 5, 32, 16, uniform(2100, 1, 5)),
    "odd_steps": (30, 2, 3, 208, 336, uniform(30, 2, 3)),
    "rows_of_every_tile": (430, 1, 1, 64, 32, constant(430, 1, 0)),
}


class TestLayer(EmulatedLayers, LayerSuite, FusedQuantizationSuite):
    engine = axis("sm120")
    numbers = axis("bf16-static", "f16-token")
    case_numbers = axis("bf16-static", "f16-token")
    activation_numbers = axis("f16-static", "f16-token")

    @pytest.fixture
    def sixteen_bits(self, library):
        return lambda call: run_layer(library, "sm80", call)

    @pytest.mark.parametrize("case", LARGER)
    def test_larger_layer_matches_float64(self, run, case):
        assert_accurate(run, make_layer(LARGER[case], F16, Options(activation_scale="static")))


class TestProduct(EmulatedProducts, ProductSuite):
    engine = axis("sm120")
    numbers = axis("bf16-static", "bf16-token")
    case_numbers = axis("bf16-static", "bf16-token")
    exact_dtype = axis("bf16", "f16")
