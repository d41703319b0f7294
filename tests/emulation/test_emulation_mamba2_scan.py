"""Run the suite of the recurrence of Mamba-2 on the CUDA kernels, compiled for a CPU."""

import pytest
from support.emulation.cuda_emulation import on_device
from support.emulation.emulated_devices_suite import DevicesSuite
from support.kernels.axes import axis
from support.kernels.mamba2_scan_suite import SCAN_CASES, Mamba2KernelSuite
from support.kernels.recurrence_suite import RowsAloneSuite

from jax_nvfp4_moe.ops import mamba2_scan

pytestmark = [pytest.mark.cuda_build, pytest.mark.slow]


class TestMamba2Scan(DevicesSuite, RowsAloneSuite, Mamba2KernelSuite):
    case = axis(*SCAN_CASES)

    @pytest.fixture
    def run(self, library):
        return on_device(library, mamba2_scan, "mamba2_scan_cuda")
