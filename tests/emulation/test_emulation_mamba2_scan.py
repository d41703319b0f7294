"""Run the suite of the recurrence of Mamba-2 on the CUDA kernels, compiled for a CPU."""

import pytest
from axes import axis
from cuda_emulation import on_device
from emulated_devices_suite import DevicesSuite
from mamba2_scan_suite import SCAN_CASES, Mamba2KernelSuite
from recurrence_suite import RowsAloneSuite

from jax_nvfp4_moe.ops import mamba2_scan

pytestmark = [pytest.mark.cuda_build, pytest.mark.slow]


class TestMamba2Scan(DevicesSuite, RowsAloneSuite, Mamba2KernelSuite):
    case = axis(*SCAN_CASES)

    @pytest.fixture
    def run(self, library):
        return on_device(library, mamba2_scan, "mamba2_scan_cuda")
