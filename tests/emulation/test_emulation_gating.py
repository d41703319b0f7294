"""Run the suite of gated operations on their CUDA kernels, compiled for a CPU."""

import pytest
from support.emulation.cuda_emulation import on_device
from support.kernels.gating_suite import GatingSuite

from jax_nvfp4_moe import ops

pytestmark = [pytest.mark.cuda_build, pytest.mark.slow]


class TestGating(GatingSuite):
    @pytest.fixture
    def run_activate(self, library):
        run = on_device(library, ops.activate, "gating_cuda")
        return lambda gate_up, name: run(gate_up, activation=name)

    @pytest.fixture
    def run_add(self, library):
        return on_device(library, ops.add_gated, "gating_cuda")

    @pytest.fixture
    def run_linear(self, library):
        return on_device(library, ops.add_linear_gated, "gating_cuda")

    @pytest.fixture
    def run_gates(self, library):
        return on_device(library, ops.gate_heads, "gating_cuda")
