"""Run the suites of all kernels on the CUDA kernels that are compiled for the CPU."""

import pytest
from support.emulation import cuda_emulation
from support.kernels.axes import axis
from support.kernels.kernel_cases import ONE_GROUP, PRODUCTS, make_product
from support.kernels.kernel_suite import assert_accurate, assert_zeros, split

# Numbers of thread blocks. One block computes all output tiles, three blocks compute several each,
# and 20 blocks split each output tile.
_FEW, _OTHERS = 3, (1, 20)
multiprocessors = pytest.mark.parametrize("count", _OTHERS)
# Sizes that other numbers of blocks divide differently: many output tiles, few output tiles, long
# sums, and no work.
_DIVIDED_LAYERS = (
    "several_tiles",
    "one_takes_all",
    "long_rows",
    "many_experts",
    "odd_sizes",
    "none_routed",
)
_DIVIDED_PRODUCTS = (
    "linear",
    "groups",
    "empty_groups",
    "padding_rows",
    "full_tiles",
    "all_padding",
    "one_group",
)


def run_layer(library, engine, call, count=_FEW, **device):
    """Run a `kernel_cases.LayerCall` on a `cuda_emulation.Device`."""
    return cuda_emulation.moe(library, engine, *call.operands, count, **device)


def run_product(library, engine, call, count=_FEW, **device):
    """Run a `kernel_cases.ProductCall` on a `cuda_emulation.Device`."""
    return cuda_emulation.grouped_gemm(library, engine, call.operands, call.mode, count, **device)


class EmulatedLayers:
    """Run layers on the engines `engine`, and `block_numbers` also with other numbers of blocks."""

    block_numbers = axis("bf16-static")

    @pytest.fixture
    def run(self, library, engine):
        return lambda call: run_layer(library, engine, call)

    @multiprocessors
    @pytest.mark.parametrize("case", _DIVIDED_LAYERS)
    def test_layer_by_one_and_by_many_blocks(self, library, engine, case, count, block_numbers):
        call = self.call(case, block_numbers, bias=True)
        assert_accurate(lambda call: run_layer(library, engine, call, count), call)


class EmulatedProducts:
    """Run grouped GEMMs on the engines `engine`, as `EmulatedLayers` runs layers."""

    block_numbers = axis("bf16-static", "bf16-token")
    planned_case = axis(*ONE_GROUP)  # what an engine runs, and not the kernel for few rows

    @pytest.fixture
    def run(self, library, engine):
        return lambda call: run_product(library, engine, call)

    @multiprocessors
    @pytest.mark.parametrize("case", _DIVIDED_PRODUCTS)
    def test_product_by_one_and_by_many_blocks(self, library, engine, case, count, block_numbers):
        parts = 1 if PRODUCTS[case][1] % 2 else 2
        call = make_product(case, *split(block_numbers), parts=parts, bias=True)
        y = assert_accurate(lambda call: run_product(library, engine, call, count), call)
        assert_zeros(y[call.rows :])

    @pytest.mark.parametrize("count", [1, _FEW, 20])
    def test_the_host_plans_one_group_as_a_kernel_does(
        self, library, engine, planned_case, count, block_numbers
    ):
        """The bits are equal, because the same blocks add the same partial sums."""
        call = make_product(planned_case, *split(block_numbers), parts=2)
        found, planned = (
            run_product(library, engine, one, count) for one in (call, call.with_sizes())
        )
        assert found.tobytes() == planned.tobytes()
