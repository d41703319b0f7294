"""Test that the faults of `find_faults.py` are faults of today's package and tests."""

import re

import find_faults
import pytest


@pytest.mark.parametrize("fault", find_faults.FAULTS, ids=lambda fault: fault.name)
def test_the_line_and_the_test_exist(fault):
    text = (find_faults.PACKAGE / fault.module).read_text()
    assert fault.right in text
    assert fault.wrong not in text
    file, name = re.match(r"(.+)::(\w+)", fault.test).groups()
    assert f"def {name}(" in (find_faults.TESTS / file).read_text()
