"""Run the suites of recurrent mixers on the CUDA kernels, compiled for a CPU."""

import functools

import pytest
from support.emulation import recurrent_emulation
from support.kernels.axes import axis
from support.kernels.recurrent_suite import (
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


class TestEarlyDeltaStep(DeltaStepSuite):
    """The kernel that loads the state, and computes once, before it waits for the token."""

    case = axis(*(name for name in DELTA_CASES if name.startswith("full widths")))
    dtype = axis("bfloat16", "float16", "float32")

    @pytest.fixture
    def run(self, library):
        return functools.partial(recurrent_emulation.gated_delta_step, library, older=True)


class TestKimiStep(KimiStepSuite):
    case = axis(*KIMI_CASES)
    dtype = axis("bfloat16", "float16", "float32")

    @pytest.fixture
    def run(self, library):
        return functools.partial(recurrent_emulation.kimi_delta_step, library)


class TestEarlyKimiStep(KimiStepSuite):
    case = axis(*(name for name in KIMI_CASES if name.startswith("full widths")))
    dtype = axis("bfloat16", "float16", "float32")

    @pytest.fixture
    def run(self, library):
        return functools.partial(recurrent_emulation.kimi_delta_step, library, older=True)


class TestMamba2Step(Mamba2StepSuite):
    case = axis(*MAMBA_CASES)
    dtype = axis("bfloat16", "float16", "float32")

    @pytest.fixture
    def run(self, library):
        return functools.partial(recurrent_emulation.mamba2_step, library)


class TestEarlyMamba2Step(Mamba2StepSuite):
    case = axis(*(name for name in MAMBA_CASES if name.startswith("usual sizes")))
    dtype = axis("bfloat16", "float16", "float32")

    @pytest.fixture
    def run(self, library):
        return functools.partial(recurrent_emulation.mamba2_step, library, older=True)
