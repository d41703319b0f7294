"""Run the suite of the recurrence of Mamba-2 on the CUDA kernels, compiled for a CPU."""

import functools

import pytest
from support.emulation import recurrent_emulation
from support.emulation.emulated_devices_suite import DevicesSuite
from support.kernels.axes import axis
from support.kernels.mamba2_scan_suite import SCAN_CASES, Mamba2KernelSuite
from support.kernels.recurrence_suite import RowsAloneSuite

pytestmark = [pytest.mark.cuda_build, pytest.mark.slow]


class TestMamba2Scan(DevicesSuite, RowsAloneSuite, Mamba2KernelSuite):
    case = axis(*SCAN_CASES)

    @pytest.fixture
    def run(self, library):
        return functools.partial(recurrent_emulation.mamba2_scan, library)
