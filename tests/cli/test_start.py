"""Test how the command begins and ends: versions, numbers, devices, streams and interrupts."""

import inspect
import os
import re
import signal
import subprocess
import sys
import typing

import jax
import pytest
from support.files.given import EXAMPLE

import jax_nvfp4_moe
from jax_nvfp4_moe import interrupts
from jax_nvfp4_moe.cli import app as cli

MODULE = [sys.executable, "-m", "jax_nvfp4_moe"]


def test_the_version(run):
    assert run("--version") == (0, f"jax-nvfp4-moe {jax_nvfp4_moe.__version__}\n", "")


def test_the_command_runs_after_standard_input_was_read():
    """A program that calls `main` may have read lines from it."""
    code = "import sys; input(); from jax_nvfp4_moe.cli import app; app.main(['--version'])"
    done = subprocess.run(
        [sys.executable, "-c", code], input="a\nb\n", capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("jax-nvfp4-moe ")


def test_a_wrong_command_line_is_one_line(run):
    status, out, err = run("generate", "--max-new-tokenz", "3")
    assert (status, out) == (2, "")
    assert re.fullmatch(r"error: No such option: --max-new-tokenz.*; see .+ generate --help\n", err)


HUGE = ("-1", str(2**63), "9" * 23, "9" * 5000, "nan")
NUMBERS = [
    ("generate", "--seed", (*HUGE, str(2**32))),
    ("generate", "--max-new-tokens", ("0", str(2**31), *HUGE)),
    ("generate", "--temperature", ("-1", "nan", "inf", "-inf", "1e39")),
    ("generate", "--top-k", ("0", *HUGE)),
    ("generate", "--top-p", ("0", "-0.1", "1.1", "nan", "inf")),
    ("generate", "--processes", ("0", *HUGE)),
    ("generate", "--process-id", HUGE),
    ("generate", "--peer-timeout", ("4", *HUGE)),
    ("generate", "--start-timeout", ("0", *HUGE)),
    ("chat", "--context", ("0", *HUGE)),
    ("chat", "--max-new-tokens", ("0", *HUGE)),
    ("chat", "--seed", HUGE),
    ("eval", "--window", ("0", *HUGE)),
    ("eval", "--skip-tokens", HUGE),
    ("eval", "--max-windows", ("0", *HUGE)),
    ("lm-eval", "--max-length", ("0", *HUGE)),
    ("inspect", "--tokens", ("0", *HUGE)),
    ("quantize", "--calibration-tokens", ("0", *HUGE)),
    ("quantize", "--window", ("0", *HUGE)),
    ("quantize", "--shard-gb", ("0", "-1", "nan", "inf")),
    ("bench", "--tokens", ("0", "1,", "²", *HUGE)),
    ("bench", "--experts", ("0", *HUGE)),
    ("bench", "--hidden", ("0", *HUGE)),
    ("bench", "--intermediate", ("0", *HUGE)),
    ("bench", "--top-k", ("0", *HUGE)),
]
PATHS = {"quantize": ["a", "b"], "bench": []}


@pytest.mark.parametrize(("command", "option", "values"), NUMBERS, ids=lambda v: str(v)[:20])
def test_numbers_out_of_range_name_their_option(run, command, option, values):
    """They are refused before anything is read: the folder does not exist."""
    text = ["--text", "/nowhere"] if command == "eval" else []
    for value in values:
        status, out, err = run(command, *PATHS.get(command, ["/nowhere"]), *text, option, value)
        assert (status, out) == (2, ""), value[:30]
        (line,) = err.splitlines()
        assert line.startswith("error: "), value[:30]
        assert option in line, line


@pytest.mark.parametrize(
    "sizes",
    [
        ("--tokens", str(2**31 - 1), "--experts", "4", "--hidden", "64", "--intermediate", "32"),
        ("--hidden", str(2**31 - 16)),
        ("--intermediate", str(2**31 - 16), "--experts", "512"),
    ],
    ids=lambda sizes: sizes[0],
)
def test_a_layer_that_no_memory_holds(run, sizes):
    """XLA would end the process, or allocate until the system does."""
    status, out, err = run("bench", *sizes)
    assert (status, out) == (2, "")
    assert re.fullmatch(r"error: --tokens, --experts, .+ needs more than \S+ GiB, and .+\n", err)


@pytest.mark.parametrize(
    "message", ["RESOURCE_EXHAUSTED: x", "INTERNAL: dispatching: Out of memory allocating 9 bytes."]
)
def test_memory_that_runs_out_is_the_users_error(run, monkeypatch, message):
    def fail(*_, **__):
        raise jax.errors.JaxRuntimeError(message)

    monkeypatch.setattr("jax_nvfp4_moe.cli.generate.load_model", fail)
    status, out, err = run("generate", EXAMPLE)
    assert (status, out) == (2, "")
    assert err.startswith("error: out of memory on ")


def test_a_mesh_of_any_numbers_is_the_users_error(run):
    for size in ("0", "9" * 9, "9" * 23, "9" * 5000):
        status, _, err = run("generate", EXAMPLE, "--mesh", f"expert={size}")
        assert (status, err.startswith("error: mesh: expected")) == (2, True)


@pytest.mark.parametrize("name", cli.COMMANDS)
def test_all_options_that_take_numbers_have_a_range(name):
    for option in inspect.signature(cli.COMMANDS[name]).parameters.values():
        kind, *info = typing.get_args(option.annotation) or [option.annotation]
        if kind in (int, float, int | None, float | None) and not info[0].hidden:
            assert info[0].callback is not None, option.name


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (RuntimeError("Unable to initialize backend 'x': \n no x."), "backend 'x': no x."),
        (AssertionError(), "none of the platforms in JAX_PLATFORMS="),
    ],
)
def test_no_device_is_one_sentence(run, monkeypatch, error, message):
    def fail(*_):
        raise error

    monkeypatch.setattr(jax, "devices", fail)
    monkeypatch.setattr("jax_nvfp4_moe.cli.generate.load_model", lambda *_, **__: jax.devices())
    status, out, err = run("generate", EXAMPLE)
    assert (status, out) == (2, "")
    (line,) = err.splitlines()
    assert line.startswith("error: JAX has no device: ")
    assert message in line


def test_a_failed_assertion_is_a_fault(monkeypatch):
    def fail(*_, **__):
        raise AssertionError

    monkeypatch.setattr("jax_nvfp4_moe.cli.generate.load_model", fail)
    with pytest.raises(AssertionError):
        cli.main(["generate", str(EXAMPLE)])


@pytest.mark.parametrize(
    ("line", "is_command"),
    [
        (["python", "-m", "jax_nvfp4_moe", "env"], True),
        (["python", "-I", "-m", "jax_nvfp4_moe"], True),
        (["python", "/usr/bin/jax-nvfp4-moe", "env"], True),
        (["python", "train.py", "jax_nvfp4_moe"], False),
        (["python", "-m", "pytest", "jax-nvfp4-moe"], False),
        (["python", "-c", "import jax_nvfp4_moe"], False),
        (["python"], False),
    ],
)
def test_only_the_command_ends_without_a_word(line, is_command):
    assert interrupts._is_command(line) == is_command


def test_ctrl_c_while_the_command_imports(tmp_path):
    """A package that the command imports sends the signal."""
    (tmp_path / "flax").mkdir()
    program = "import os, signal\nos.kill(os.getpid(), signal.SIGINT)\nwhile True: pass\n"
    (tmp_path / "flax" / "__init__.py").write_text(program)
    start = "import signal, os, sys; signal.signal(signal.SIGINT, signal.default_int_handler); "
    start += f"os.execv(sys.executable, {[*MODULE, 'env']})"
    environment = os.environ | {"PYTHONPATH": str(tmp_path)}
    quiet = {"capture_output": True, "text": True, "timeout": 60, "check": False}
    done = subprocess.run([sys.executable, "-c", start], env=environment, **quiet)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


def test_after_the_imports_ctrl_c_raises(monkeypatch):
    before = signal.signal(signal.SIGINT, interrupts._leave)
    try:
        interrupts.restore_interrupts()
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, before)
