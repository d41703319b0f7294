"""The kernels for the CPU, compiled once for all workers and for later runs of the same sources."""

import pytest
from support.emulation import cuda_emulation


@pytest.fixture(scope="session")
def library(request):
    return cuda_emulation.load(request.config.cache.mkdir("emulation"))
