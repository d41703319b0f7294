"""Run a sample of the hostile cases: no traceback, no hang, no memory.

``config_sweep.py`` and ``folder_mutations.py`` run all cases, which takes long: hours of one core.
"""

import pathlib
import subprocess
import sys

import pytest

HERE = pathlib.Path(__file__).parent


@pytest.mark.slow
@pytest.mark.parametrize("program", ["config_sweep.py", "folder_mutations.py"])
def test_a_sample_has_no_fault(program):
    options = ["--workers", "2", "--seconds", "30", "--sample", "100000"]
    run = subprocess.run(
        [sys.executable, str(HERE / program), *options], capture_output=True, text=True
    )
    print(run.stdout)
    assert run.returncode == 0, run.stdout + run.stderr
    assert " 0 faults" in run.stdout


def test_the_programs_see_faults(tmp_path):
    """A case that raises, dies, or writes a control character is a fault, and others run on."""
    program = tmp_path / "program.py"
    program.write_text(_PROGRAM)
    results = tmp_path / "results"
    command = [sys.executable, str(program), "--workers", "1", "--results", str(results)]
    run = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert run.returncode == 1, run.stderr
    assert "8 cases in" in run.stdout
    assert "2 right, 1 refused, 5 faults of 5 kinds" in run.stdout, run.stdout
    for found in (
        "ZeroDivisionError",
        "control character",
        "status -9",
        "over 1 s",
        "over 256 MB",
    ):
        assert found in run.stdout
    assert len(results.read_text().splitlines()) == 8


_PROGRAM = f"""
import contextlib, os, signal, sys, time
sys.path.insert(0, {str(HERE)!r})
import hostile

def work():
    end = time.process_time() + 1.5
    while time.process_time() < end:
        pass

ACTIONS = {{
    "right": lambda: print("text"),
    "again": lambda: None,
    "refused": lambda: print("error: the file is wrong", file=sys.stderr) or sys.exit(2),
    "raises": lambda: 1 / 0,
    "control": lambda: print("\\x1b[2J"),
    "dies": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "slow": work,
    "large": lambda: bytes(1) * (300 << 20),
}}

@contextlib.contextmanager
def open_case(case):
    yield [("step", ACTIONS[case])]

hostile.SECONDS, hostile.MEGABYTES, hostile.warm_up = 1.0, 256, lambda: None
hostile.run_program(__file__, lambda: list(ACTIONS), open_case)
"""
