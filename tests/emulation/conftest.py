"""Compile the kernels for the CPU, once for all tests of a worker."""

import cuda_emulation
import pytest


@pytest.fixture(scope="session")
def library(tmp_path_factory):
    return cuda_emulation.build(tmp_path_factory.mktemp("emulation"))
