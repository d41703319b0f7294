"""Run the suite of `add_rms_norm` on the CUDA kernels, compiled for a CPU."""

import pytest
from support.emulation.cuda_emulation import on_device
from support.kernels.axes import axis
from support.kernels.norm_suite import CASES, MIXED_PAIRS, PAIRS, NormSuite

from jax_nvfp4_moe.ops import add_rms_norm

pytestmark = [pytest.mark.cuda_build, pytest.mark.slow]


class TestNorm(NormSuite):
    case = axis(*CASES)
    pair = axis(*PAIRS, *MIXED_PAIRS)

    @pytest.fixture
    def run(self, library):
        return on_device(library, add_rms_norm, "norm_cuda")
