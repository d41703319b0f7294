"""Test the options that this repository adds to pytest."""

import re
import subprocess
import sys

import numpy as np
import pytest
from support.files.given import ROOT

# A quick property test that asks for 30 examples.
PROPERTY = "tests/parallel/test_placement.py::test_physical_ids_are_copies_in_turn"


@pytest.mark.slow
@pytest.mark.parametrize(("option", "examples"), [([], 30), (["--more-examples"], 300)])
def test_more_examples_are_more(option, examples):
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:xdist", PROPERTY]
    command += ["--hypothesis-show-statistics", *option]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    phases = re.findall(r"(\d+) passing,", done.stdout)
    assert sum(map(int, phases)) == examples


# Two modules, and a test of theirs that keeps all of its cases.
CASES = "tests/test_wide_numbers.py", "tests/models/test_default_dtype.py"
WHOLE = "tests/models/test_default_dtype.py::test_logits"


def collected(*options):
    """Return the names of the tests of CASES that pytest would run with `options`."""
    command = [sys.executable, "-m", "pytest", "-q", "--collect-only", "-p", "no:xdist", *CASES]
    done = subprocess.run(
        [*command, *options], capture_output=True, text=True, cwd=ROOT, check=True
    )
    return [line for line in done.stdout.splitlines() if "::" in line]


@pytest.mark.slow
def test_some_cases_are_spread_over_all():
    every, some = collected(), collected("--cases=3")
    for test in dict.fromkeys(name.partition("[")[0] for name in every):
        cases = [name for name in every if name.partition("[")[0] == test]
        found = [cases.index(name) for name in some if name.partition("[")[0] == test]
        if test == WHOLE or len(cases) <= 3:
            assert found == list(range(len(cases)))
            continue
        assert len(found) == 3
        steps = np.diff([*found, found[0] + len(cases)])  # around all cases, from any of them
        assert steps.max() - steps.min() <= 1
    assert len(some) < len(every)


def test_long_modules_are_modules(request):
    """conftest.py orders modules by their names, and a name that no module has orders nothing."""
    plugins = request.config.pluginmanager.get_plugins()
    (names,) = (plugin.LONG_MODULES for plugin in plugins if hasattr(plugin, "LONG_MODULES"))
    there = {path.name for path in (ROOT / "tests").rglob("test_*.py")}
    assert set(names) - there == set()


def own_numbers(source):
    """Return the numbers of examples that --more-examples does not multiply."""
    return re.findall(r"max_examples=(\d+)", source)


def test_tests_ask_for_examples_of_the_profile():
    tests = (ROOT / "tests").rglob("test_*.py")
    found = {path.name: own for path in tests if (own := own_numbers(path.read_text("utf-8")))}
    found.pop("test_options.py")
    assert found == {}


def test_a_number_beside_the_profile_is_caught():
    assert own_numbers("@settings(max_examples=30)\n") == ["30"]
