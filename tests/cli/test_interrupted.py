"""Test Ctrl-C during a command and during a call: both end cleanly, and a second try works."""

import json
import os
import subprocess
import sys

import pytest
from given import EXAMPLE, PROGRAMS
from unquantized import SMALL

SOURCE = SMALL / "source"


def start(*arguments):
    command = [sys.executable, PROGRAMS / "interrupted.py", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.fixture
def stages(tmp_path):
    """Return the arguments of the command and of the call for each stage."""
    generate = ["generate", EXAMPLE, "--max-new-tokens", "6", "--prompt", "def f("]
    return {
        "load": (generate, [EXAMPLE]),
        "generate": (generate, [EXAMPLE]),
        "quantize": (["quantize", SOURCE, tmp_path / "q"], [SOURCE, tmp_path / "q"]),
    }


@pytest.mark.parametrize("stage", ["load", "generate", "quantize"])
def test_a_command_ends_with_the_status_of_ctrl_c(stages, stage, tmp_path):
    """The status is 130, which is 128 plus the signal's number. No partial folder remains."""
    done = start(stage, "command", *stages[stage][0])
    assert done.returncode == 130, done.stderr
    assert "Traceback" not in done.stderr
    assert done.stdout.startswith("def f(") == (stage == "generate")
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("stage", ["load", "generate", "quantize"])
def test_a_call_can_be_made_again(stages, stage, tmp_path):
    """The same process repeats the call, as a user does in a notebook."""
    done = start(stage, "call", *stages[stage][1])
    assert done.returncode == 0, done.stderr
    first, second = done.stdout.splitlines()
    assert first == "interrupted"
    if stage == "quantize":
        assert second == str(sorted(os.listdir(tmp_path / "q")))
        assert json.loads((tmp_path / "q" / "config.json").read_text())["quantization_config"]
