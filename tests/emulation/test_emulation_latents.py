"""Run the suite of `prepare_latents` on its CUDA kernel, compiled for a CPU."""

import pytest
from support.emulation import attention_emulation
from support.kernels.axes import axis
from support.kernels.latents_suite import CASES, PAIRS, LatentsSuite

pytestmark = [pytest.mark.cuda_build, pytest.mark.slow]


class TestLatents(LatentsSuite):
    case = axis(*CASES)
    pair = axis(*PAIRS)

    @pytest.fixture
    def run(self, library):
        return lambda call: attention_emulation.prepare_latents(library, call)
