"""Test that the faults of `find_faults.py` are faults of today's package and tests."""

import find_faults
import pytest

from jax_nvfp4_moe.ops.records import REFERENCE

pytestmark = pytest.mark.every_case  # each line is another fault

LINES = [fault for fault in find_faults.FAULTS if isinstance(fault, find_faults.Fault)]


@pytest.mark.parametrize("fault", LINES, ids=lambda fault: fault.name)
def test_the_line_and_the_test_exist(fault):
    _, definition = find_faults.find_definition(fault.place, fault.right)
    assert fault.wrong not in definition
    file, name = fault.test.split("[")[0].split("::")
    assert f"def {name}(" in (find_faults.TESTS / file).read_text()


def test_each_reference_has_a_fault():
    assert find_faults.TESTS_OF_OPS.keys() == REFERENCE.lower.keys()
