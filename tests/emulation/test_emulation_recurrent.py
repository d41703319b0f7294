"""Run the suites of recurrent mixers on the CUDA kernels, compiled for a CPU."""

import functools

import pytest
import recurrent_emulation
from axes import axis
from recurrent_suite import (
    DELTA_CASES,
    KIMI_CASES,
    MAMBA_CASES,
    DeltaStepSuite,
    KimiStepSuite,
    Mamba2StepSuite,
)

pytestmark = [pytest.mark.cuda_build, pytest.mark.slow]


class TestDeltaStep(DeltaStepSuite):
    case = axis(*DELTA_CASES)
    dtype = axis("bfloat16", "float16", "float32")

    @pytest.fixture
    def run(self, library):
        return functools.partial(recurrent_emulation.gated_delta_step, library)


class TestKimiStep(KimiStepSuite):
    case = axis(*KIMI_CASES)
    dtype = axis("bfloat16", "float16", "float32")

    @pytest.fixture
    def run(self, library):
        return functools.partial(recurrent_emulation.kimi_delta_step, library)


class TestMamba2Step(Mamba2StepSuite):
    case = axis(*MAMBA_CASES)
    dtype = axis("bfloat16", "float16", "float32")

    @pytest.fixture
    def run(self, library):
        return functools.partial(recurrent_emulation.mamba2_step, library)
