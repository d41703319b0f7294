"""The README's Python example runs as it stands."""

import pathlib
import re
import subprocess
import sys

README = (pathlib.Path(__file__).parents[1] / "README.md").read_text()


def blocks(language):
    return re.findall(rf"^```{language}\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)


def test_the_first_two_commands_install_generate_and_test():
    first, second = blocks("bash")[:2]
    assert "pip install ." in first
    assert "jax-nvfp4-moe generate" in first
    assert "pytest" in second


def test_the_python_example_runs(tmp_path):
    (example,) = blocks("python")
    assert len(example.strip().splitlines()) <= 25
    done = subprocess.run(
        [sys.executable, "-c", example], capture_output=True, text=True, cwd=tmp_path, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "scheme   w4a16" in done.stdout
