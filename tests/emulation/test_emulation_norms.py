"""Run the suite of `add_rms_norm` on the CUDA kernels, compiled for a CPU."""

import pytest
from support.emulation import cuda_emulation
from support.kernels.axes import axis
from support.kernels.norm_suite import CASES, MIXED_PAIRS, PAIRS, NormSuite

pytestmark = [pytest.mark.cuda_build, pytest.mark.slow]


class TestNorm(NormSuite):
    case = axis(*CASES)
    pair = axis(*PAIRS, *MIXED_PAIRS)

    @pytest.fixture
    def run(self, library):
        def call(*operands, eps):
            return cuda_emulation.add_rms_norm(library, *operands, eps=eps)

        return call
