"""Run the suite of the gated delta rule on the CUDA kernels, compiled for a CPU."""

import pytest
from support.emulation.cuda_emulation import on_device
from support.emulation.emulated_devices_suite import DevicesSuite
from support.kernels.axes import axis
from support.kernels.delta_rule_suite import RULE_CASES, ChannelDeltaRuleSuite, DeltaRuleSuite
from support.kernels.recurrence_suite import RowsAloneSuite

from jax_nvfp4_moe.ops import gated_delta_rule

pytestmark = [pytest.mark.cuda_build, pytest.mark.slow]


class RunsInEmulation:
    """The kernels of both forms of decays are one call."""

    @pytest.fixture
    def run(self, library):
        return on_device(library, gated_delta_rule, "delta_rule_cuda")


class TestDeltaRule(RunsInEmulation, DevicesSuite, RowsAloneSuite, DeltaRuleSuite):
    case = axis(*RULE_CASES)


class TestChannelDeltaRule(RunsInEmulation, DevicesSuite, RowsAloneSuite, ChannelDeltaRuleSuite):
    case = axis(*RULE_CASES)
