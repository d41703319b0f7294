"""Run the suites of recurrent mixers on the CUDA kernels, compiled for a CPU."""

import pytest
from support.emulation.cuda_emulation import on_device
from support.kernels.axes import axis
from support.kernels.recurrent_suite import (
    DELTA_CASES,
    KIMI_CASES,
    MAMBA_CASES,
    DeltaStepSuite,
    KimiStepSuite,
    Mamba2StepSuite,
)

from jax_nvfp4_moe import ops

pytestmark = [pytest.mark.cuda_build, pytest.mark.slow]


# A large device, which has room for all blocks of a step, in a chain.
EARLY = {"multiprocessors": 132, "unchanged": True}


class TestDeltaStep(DeltaStepSuite):
    case = axis(*DELTA_CASES)
    dtype = axis("bfloat16", "float16", "float32")

    @pytest.fixture
    def run(self, library):
        return on_device(library, ops.gated_delta_step, "recurrent_cuda")


class TestEarlyDeltaStep(DeltaStepSuite):
    """The kernel that loads the state, and computes once, before it waits for the token."""

    case = axis(*(name for name in DELTA_CASES if name.startswith("full widths")))
    dtype = axis("bfloat16", "float16", "float32")

    @pytest.fixture
    def run(self, library):
        return on_device(library, ops.gated_delta_step, "recurrent_cuda", **EARLY)


class TestKimiStep(KimiStepSuite):
    case = axis(*KIMI_CASES)
    dtype = axis("bfloat16", "float16", "float32")

    @pytest.fixture
    def run(self, library):
        return on_device(library, ops.kimi_delta_step, "recurrent_cuda")


class TestEarlyKimiStep(KimiStepSuite):
    case = axis(*(name for name in KIMI_CASES if name.startswith("full widths")))
    dtype = axis("bfloat16", "float16", "float32")

    @pytest.fixture
    def run(self, library):
        return on_device(library, ops.kimi_delta_step, "recurrent_cuda", **EARLY)


class TestMamba2Step(Mamba2StepSuite):
    case = axis(*MAMBA_CASES)
    dtype = axis("bfloat16", "float16", "float32")

    @pytest.fixture
    def run(self, library):
        return on_device(library, ops.mamba2_step, "recurrent_cuda")


class TestEarlyMamba2Step(Mamba2StepSuite):
    case = axis(*(name for name in MAMBA_CASES if name.startswith("usual sizes")))
    dtype = axis("bfloat16", "float16", "float32")

    @pytest.fixture
    def run(self, library):
        return on_device(library, ops.mamba2_step, "recurrent_cuda", **EARLY)
