"""Test that the documentation of each op says the same of the arguments that all ops have."""

import inspect

import pytest

from jax_nvfp4_moe import ops
from jax_nvfp4_moe.ops.documentation import share_lines

TARGET = "target: the `Target` to lower for; None (default) for the current device."
BACKEND = "backend: name of a backend, or a sequence of names that are tried in that order."
WITH_BACKEND = [
    name for name in ops.__all__ if "backend" in inspect.signature(getattr(ops, name)).parameters
]


@pytest.mark.parametrize("name", WITH_BACKEND)
def test_target_and_backend_are_documented_once(name):
    text = " ".join(inspect.getdoc(getattr(ops, name)).split())
    assert [text.count(line) for line in (TARGET, BACKEND)] == [1, 1]
    assert text.count("the message lists every backend and its reason.") == 1
    assert "target, backend:" not in text


def test_a_docstring_without_the_lines_is_an_error():
    def op():
        """Compute nothing."""

    with pytest.raises(ValueError, match="op: expected the line 'target, backend"):
        share_lines(op)
