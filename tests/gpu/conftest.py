"""The machine code of the CUDA extension, which takes seconds to disassemble."""

import importlib.util

import machine_code
import pytest


@pytest.fixture(scope="session")
def extension():
    return importlib.util.find_spec("jax_nvfp4_moe._nvfp4_cuda").origin


@pytest.fixture(scope="session")
def listing(extension):
    return machine_code.disassemble(extension)


@pytest.fixture(scope="session")
def code(listing):
    return machine_code.count(listing)
