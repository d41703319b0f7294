"""Run programs of `tests/programs` that compile for an absent GPU, and read their reports."""

import json
import os
import subprocess
import sys

from support.files.given import PROGRAMS, TESTS


def run_program(script, device, *arguments, flags=""):
    """Run a script of `tests/programs` that compiles for `device`; return its process."""
    environment = dict(
        os.environ,
        JAX_PLATFORMS="cpu",
        XLA_FLAGS=f"{os.environ.get('XLA_FLAGS', '')} --xla_gpu_autotune_level=0 {flags}",
        JAX_DISABLE_MOST_OPTIMIZATIONS="false",  # check the programs that users get
        JAX_ENABLE_COMPILATION_CACHE="false",
    )
    target = TESTS / "targets" / f"{device}.txtpb"
    command = [sys.executable, PROGRAMS / script, target, *map(str, arguments)]
    return subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=300, check=False
    )


def read_report(process):
    """Return the report of a process that must succeed."""
    assert process.returncode == 0, process.stderr[-3000:]
    return json.loads(process.stdout.splitlines()[-1])
