"""Pytest plugin that makes the reference of an op a tenth too large, wherever it is called."""

import functools
import sys

import jax
import jax.numpy as jnp

import jax_nvfp4_moe.ops  # noqa: F401, so that all modules that name a reference are there
from jax_nvfp4_moe.ops.records import REFERENCE


def pytest_addoption(parser):
    parser.addoption("--wrong-reference", help="name of the op")


def pytest_configure(config):
    """Put the wrong function in place of the right one, before tests import either."""
    op = config.getoption("--wrong-reference")
    right = REFERENCE.lower[op]

    @functools.wraps(right)
    def wrong(*operands, **options):
        return jax.tree.map(_larger, right(*operands, **options))

    REFERENCE.lower[op] = wrong
    for name, module in list(sys.modules.items()):
        if name.startswith("jax_nvfp4_moe"):
            names = [key for key, value in vars(module).items() if value is right]
            vars(module).update(dict.fromkeys(names, wrong))


def _larger(result):
    """Return a result times 1.1; integers, and codes of 8 bits, are left alone."""
    if jnp.issubdtype(result.dtype, jnp.floating) and result.dtype.itemsize > 1:
        return result * jnp.asarray(1.1, result.dtype)
    return result
