"""Run the suite of the gated delta rule on the CUDA kernels, compiled for a CPU."""

import functools

import pytest
from support.emulation import recurrent_emulation
from support.emulation.emulated_devices_suite import DevicesSuite
from support.kernels.axes import axis
from support.kernels.delta_rule_suite import RULE_CASES, ChannelDeltaRuleSuite, DeltaRuleSuite
from support.kernels.recurrence_suite import RowsAloneSuite

pytestmark = [pytest.mark.cuda_build, pytest.mark.slow]


class RunsInEmulation:
    """The kernels of both forms of decays are one call."""

    @pytest.fixture
    def run(self, library):
        return functools.partial(recurrent_emulation.gated_delta_rule, library)


class TestDeltaRule(RunsInEmulation, DevicesSuite, RowsAloneSuite, DeltaRuleSuite):
    case = axis(*RULE_CASES)


class TestChannelDeltaRule(RunsInEmulation, DevicesSuite, RowsAloneSuite, ChannelDeltaRuleSuite):
    case = axis(*RULE_CASES)
