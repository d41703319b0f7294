"""The machine code of the CUDA extension."""

import importlib.util

import pytest
from support.extensions import machine_code


@pytest.fixture(scope="session")
def extension():
    return importlib.util.find_spec("jax_nvfp4_moe._nvfp4_cuda").origin


@pytest.fixture(scope="session")
def listing(extension, request):
    return machine_code.disassembled(extension, request.config.cache.mkdir("machine_code"))


@pytest.fixture(scope="session")
def code(listing):
    return machine_code.count(listing)
