"""Run the suite of the gated delta rule on the CUDA kernels, compiled for a CPU."""

import functools

import pytest
import recurrent_emulation
from axes import axis
from delta_rule_suite import RULE_CASES, DeltaRuleSuite
from emulated_devices_suite import DevicesSuite
from recurrence_suite import RowsAloneSuite

pytestmark = [pytest.mark.cuda_build, pytest.mark.slow]


class TestDeltaRule(DevicesSuite, RowsAloneSuite, DeltaRuleSuite):
    case = axis(*RULE_CASES)

    @pytest.fixture
    def run(self, library):
        return functools.partial(recurrent_emulation.gated_delta_rule, library)
