"""Run the suite of gated operations on their CUDA kernels, compiled for a CPU."""

import functools

import pytest
from support.emulation import gating_emulation
from support.kernels.gating_suite import GatingSuite, options_of

pytestmark = [pytest.mark.cuda_build, pytest.mark.slow]


class TestGating(GatingSuite):
    @pytest.fixture
    def run_activate(self, library):
        return lambda gate_up, name: gating_emulation.activate(library, gate_up, options_of(name))

    @pytest.fixture
    def run_add(self, library):
        return functools.partial(gating_emulation.add_gated, library)

    @pytest.fixture
    def run_linear(self, library):
        return functools.partial(gating_emulation.add_linear_gated, library)

    @pytest.fixture
    def run_gates(self, library):
        return functools.partial(gating_emulation.gate_heads, library)
