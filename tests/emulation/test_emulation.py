"""Run the suites of all kernels on a CPU: the engines' CUDA kernels, the router, the quantizer.

The tests need g++ and CUDA's headers, but no GPU. They cannot show what the real instructions do,
or how fast they are.
"""

import pytest
from support.emulation import cuda_emulation
from support.emulation.emulation_suite import EmulatedLayers, EmulatedProducts, run_product
from support.kernels.axes import axis
from support.kernels.float64_layer import Options
from support.kernels.kernel_cases import BF16, F16, make_layer, uniform
from support.kernels.kernel_suite import (
    ChunkedProductSuite,
    LayerSuite,
    ProductSuite,
    RoundingSuite,
    UnroundedSuite,
    assert_accurate,
    combinations,
)
from support.kernels.quantizer_suite import QuantizerSuite
from support.kernels.router_suite import RouterSuite

from jax_nvfp4_moe.backends.launch_facts import facts

pytestmark = [pytest.mark.cuda_build, pytest.mark.slow]

# The rows of 32 slots take 90624 bytes in the second GEMM, besides weights and sums.
WIDE_FEW_SLOTS = (16, 2, 4, 64, 1408, uniform(16, 2, 4))
LARGER = {
    "sorted_by_two_blocks": (2100, 2, 5, 32, 16, uniform(2100, 2, 5)),
    "more_experts_than_threads": (1400, 3, 600, 16, 16, uniform(1400, 3, 600)),
    "odd_steps": (30, 2, 3, 208, 336, uniform(30, 2, 3)),
}


class TestLayer(EmulatedLayers, LayerSuite, RoundingSuite, UnroundedSuite):
    engine = axis(*cuda_emulation.ENGINES)
    numbers = axis(*combinations(("bf16",)))
    case_numbers = axis(*combinations(("bf16",)))
    unrounded_numbers = axis("bf16-none")
    activation_numbers = axis("f16-none", "f16-static")
    block_numbers = axis("bf16-none")

    @pytest.mark.parametrize("case", LARGER)
    def test_larger_layer_matches_float64(self, run, case):
        assert_accurate(run, make_layer(LARGER[case], F16, Options()))


class TestProduct(EmulatedProducts, ProductSuite):
    engine = axis(*cuda_emulation.ENGINES)
    numbers = axis("bf16-none", "f16-static", "f16-token")
    case_numbers = axis("bf16-none", "f16-static", "f16-token")
    block_numbers = axis("bf16-none")
    planned_case = axis("one_group", "many_rows_of_one_group", "no_rows_of_one_group")
    exact_dtype = axis("bf16", "f16")


class TestChunkedProduct(ChunkedProductSuite):
    """Use one engine: the chunks are the same for all engines, and so many rows are slow here."""

    numbers = axis("bf16-none")

    @pytest.fixture
    def run(self, library):
        return lambda call: run_product(library, "sm80", call)


@pytest.mark.parametrize("mode", ["none", "static"])
def test_few_slots_take_no_more_shared_memory_than_the_device_has(library, mode):
    """On 8.6 and 8.9, the rows of these 32 slots fit only without the other data of a block."""
    call = make_layer(WIDE_FEW_SLOTS, BF16, Options(activation_scale=mode))
    slots, width = call.ids.size, call.layer.down_packed.shape[2] * 2
    sizes = call.ids.shape[1], call.x.shape[1], width
    needed = facts().few_slots_shared_bytes(slots, *sizes)  # of the second GEMM, which has all rows
    dynamic = needed - facts().COMBINED_STATIC_BYTES
    assert slots * (2 * width + 16) < 99 << 10
    for device, few in ((cuda_emulation.HOPPER_SHARED_BYTES, True), (99 << 10, False)):
        assert (needed <= device) == few

        def run(call, device=device):
            return cuda_emulation.moe(library, "sm80", *call.operands, 3, shared_bytes=device)

        assert_accurate(run, call)
        assert (library.largest_dynamic_bytes() == dynamic) == few


class TestRouter(RouterSuite):
    experts = axis(1, 60, 250, 512)
    top_k = axis(8)

    @pytest.fixture
    def run(self, library):
        return lambda *operands: cuda_emulation.route(library, *operands)


class TestQuantizer(QuantizerSuite):
    random_rows = 100

    @pytest.fixture
    def run(self, library):
        return lambda *operands: cuda_emulation.quantize(library, *operands)
