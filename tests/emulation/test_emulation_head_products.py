"""Run the suite of the products of heads on their CUDA kernels, compiled for a CPU."""

import pytest
from support.emulation import attention_emulation
from support.kernels.axes import axis
from support.kernels.head_product_suite import CASES, HeadProductSuite

pytestmark = [pytest.mark.cuda_build, pytest.mark.slow]


class TestHeadProducts(HeadProductSuite):
    case = axis(*CASES)
    dtype = axis("bfloat16", "float16")

    @pytest.fixture
    def run(self, library):
        def call(call):
            operands = call.q, call.keys, call.positions
            queries = attention_emulation.absorb_queries(library, *operands, **call.options)
            return queries, attention_emulation.expand_values(library, call.x, call.values)

        return call
