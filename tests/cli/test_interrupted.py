"""Test signals during a command and during a call: both end cleanly, and a second try works."""

import json
import os
import subprocess
import sys

import pytest
from support.files.given import EXAMPLE, PROGRAMS
from support.files.unquantized import SMALL

SOURCE = SMALL / "source"


def start(*arguments):
    command = [sys.executable, PROGRAMS / "interrupted.py", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.mark.parametrize(
    "stage",
    # Each starts a process, so that one of them runs by default.
    ["generate", *(pytest.param(name, marks=pytest.mark.slow) for name in ("load", "quantize"))],
)
def test_a_command_ends_with_the_status_of_ctrl_c(stage, tmp_path):
    """The status is 130, which is 128 plus the signal's number. No partial folder remains."""
    command = ["generate", EXAMPLE, "--max-new-tokens", "6", "--prompt", "def f("]
    done = start(stage, *(["quantize", SOURCE, tmp_path / "q"] if stage == "quantize" else command))
    assert done.returncode == 130, done.stderr
    assert "Traceback" not in done.stderr
    assert done.stdout.startswith("def f(") == (stage == "generate")
    assert os.listdir(tmp_path) == []


def test_a_command_that_the_system_ends_leaves_nothing(tmp_path):
    """SIGTERM is what a batch system or a shutdown sends. The status is 128 plus its number."""
    done = start("terminate", "quantize", SOURCE, tmp_path / "q")
    assert done.returncode == 143, done.stderr
    assert "Traceback" not in done.stderr
    assert os.listdir(tmp_path) == []


@pytest.mark.slow  # starts a process that runs each stage twice
def test_calls_can_be_made_again(tmp_path):
    """The same process repeats the call of each stage, as a user does in a notebook."""
    done = start("calls", EXAMPLE, SOURCE, tmp_path / "q")
    assert done.returncode == 0, done.stderr
    stages, first, second = zip(*map(json.loads, done.stdout.splitlines()), strict=True)
    assert stages == ("load", "generate", "quantize")
    assert set(first) == {"interrupted"}
    assert len(second[1]) == 6
    assert second[2] == sorted(os.listdir(tmp_path / "q"))
    assert json.loads((tmp_path / "q" / "config.json").read_text())["quantization_config"]
