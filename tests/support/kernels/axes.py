"""Parameters of test classes that a subclass can replace."""

import pytest


def axis(*values):
    """Return a fixture that takes each of `values` in turn."""
    return pytest.fixture(params=values)(lambda self, request: request.param)
