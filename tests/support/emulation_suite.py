"""The suites of every kernel, with the CUDA kernels on a CPU as the contestant."""

import cuda_emulation
import pytest
from axes import axis
from kernel_cases import PRODUCTS, make_product
from kernel_suite import assert_accurate, assert_zeros, split

# Blocks of threads: one computes all output tiles; few have several each; many split each tile.
_FEW, _OTHERS = 3, (1, 20)
multiprocessors = pytest.mark.parametrize("count", _OTHERS)
# Sizes that other numbers of blocks divide in another way: many tiles, few, long sums, none.
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
)


def run_layer(library, engine, call, count=_FEW):
    """Run a `kernel_cases.LayerCall`."""
    return cuda_emulation.moe(library, engine, *call.operands, count)


def run_product(library, engine, call, count=_FEW):
    """Run a `kernel_cases.ProductCall`."""
    return cuda_emulation.grouped_gemm(library, engine, call.operands, call.mode, count)


class EmulatedLayers:
    """Runs layers by the engines `engine`; those of `block_numbers` by other numbers of blocks."""

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
    """Runs products by the engines `engine`, as `EmulatedLayers` does."""

    block_numbers = axis("bf16-static", "bf16-token")

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
