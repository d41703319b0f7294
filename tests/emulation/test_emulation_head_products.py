"""Run the suite of the products of heads on their CUDA kernels, compiled for a CPU."""

import pytest
from support.emulation.cuda_emulation import on_device
from support.kernels.axes import axis
from support.kernels.head_product_suite import CASES, HeadProductSuite

from jax_nvfp4_moe.ops.head_products import absorb_queries, expand_values

pytestmark = [pytest.mark.cuda_build, pytest.mark.slow]


class TestHeadProducts(HeadProductSuite):
    case = axis(*CASES)
    dtype = axis("bfloat16", "float16")

    @pytest.fixture
    def run(self, library):
        def call(call):
            operands = call.q, call.keys, call.positions
            queries = on_device(library, absorb_queries)(*operands, **call.options)
            return queries, on_device(library, expand_values)(call.x, call.values)

        return call
