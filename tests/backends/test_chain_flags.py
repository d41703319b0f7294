"""Test how ``ffi/call_chain.h`` follows the flags of calls, without a GPU.

A program that is built from the header prints the order of forks, calls and joins.
"""

import subprocess

import jax
import pytest
from support.files.given import ROOT, TESTS


@pytest.fixture(scope="module")
def program(tmp_path_factory):
    program = tmp_path_factory.mktemp("forks") / "chain_forks"
    includes = [f"-I{ROOT / 'ffi'}", f"-I{jax.ffi.include_dir()}"]
    source = TESTS / "cpp" / "chain_forks.cc"
    subprocess.run(["g++", "-std=c++17", "-w", *includes, source, "-o", program], check=True)
    return program


def run(program, platform, flags):
    """Return what the program prints for calls with these flags."""
    command = [program, platform, *flags.split()]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


@pytest.mark.parametrize(
    ("flags", "printed"),
    [
        ("0 0", "main main done"),
        ("0 1 0 2 2 4", "main fork main main begin side side join main done"),
        # A fork before the first call, and a call that waits for one branch and begins a window.
        ("1 2 5 2 4", "fork main begin side join fork main begin side join main done"),
    ],
)
def test_calls_of_branches_run_on_the_side(program, flags, printed):
    assert run(program, "forks", flags) == printed


@pytest.mark.parametrize("platform", ["plain", "forks"])
@pytest.mark.parametrize(
    ("flags", "printed"),
    [
        ("0 8 0 0", "main both main main done"),
        ("8 0 8 0", "both(first) main both main done"),
        ("8% 0 0", "part rest main main done"),
        ("8% 0?", "part nvfp4 call chain: ignore does not do the work that is left to it"),
        ("0 8%", "main part nvfp4 call chain: no call does the work of the last one"),
        ("0 8? 0", "main main done"),  # the call has run by itself
        ("8 0?", "nvfp4 call chain: ignore does not do the work that is left to it"),
        ("0 8", "main nvfp4 call chain: no call does the work of the last one"),
        ("8 0!", "failed"),
    ],
)
def test_a_call_does_the_work_that_the_one_before_leaves(program, platform, flags, printed):
    assert run(program, platform, flags) == printed


def test_work_is_left_inside_of_branches(program):
    printed = "fork main begin both side side join main done"
    assert run(program, "forks", "1 10 2 2 4") == printed


def test_other_platforms_ignore_flags(program):
    assert run(program, "plain", "0 1 0 2 2 4") == "main main main main main main done"


@pytest.mark.parametrize(
    ("flags", "printed"),
    [
        ("1! 2 4", "fork failed"),
        ("1 2! 4", "fork main begin join failed"),
        ("1 2 4!", "fork main begin side join failed"),
        # Flags that make no sense.
        ("1 2 2", "fork main begin side side join nvfp4 call chain: no call waits"),
        ("1 2 0", "fork main begin side join nvfp4 call chain: a forked call without a fork, or"),
        ("2 4", "nvfp4 call chain: a forked call without a fork, or"),
        ("0 4", "main nvfp4 call chain: a call waits for a fork that"),
        ("1 2 1", "fork main begin side join nvfp4 call chain: a fork inside of a fork"),
        ("1 1 2 4", "fork main nvfp4 call chain: a fork inside of a fork"),
    ],
)
def test_a_branch_that_began_is_joined_after_an_error(program, flags, printed):
    assert run(program, "forks", flags).startswith(printed)
