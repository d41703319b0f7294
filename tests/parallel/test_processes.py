"""Test processes with Gloo: several equal one, and one that dies ends the others with a message."""

import contextlib
import dataclasses
import os
import pathlib
import signal
import socket
import subprocess
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.files.given import CHECKPOINTS, EXAMPLE, EXAMPLE_REFERENCE, PROGRAMS, reference_facts

from jax_nvfp4_moe import generate, load_model
from jax_nvfp4_moe.inference.balance import count_experts
from jax_nvfp4_moe.nn.experts.moe import expert_blocks
from jax_nvfp4_moe.parallel import processes as distributed

SCRIPT = PROGRAMS / "several_processes.py"
ROOT = pathlib.Path(distributed.__file__).parents[2]
SMALL = CHECKPOINTS / "qwen3moe-modelopt-w4a16"
GREEDY = reference_facts(EXAMPLE_REFERENCE)["mean_cross_entropy"]["w4a16_greedy"]
PEER_TIMEOUT = 10
# A lost process is noticed within PEER_TIMEOUT. The rest is a margin for a busy machine.
AT_MOST = PEER_TIMEOUT + 10
ENDED = "another process of this run has ended"


@contextlib.contextmanager
def started(*commands):
    """Start Python processes in the project's folder, and kill those that are left at the end."""
    flags = os.environ.get("XLA_FLAGS", "").split()
    # Each process has one device. The other flags let it compile as fast as the tests do.
    flags = [flag for flag in flags if "host_platform_device_count" not in flag]
    environment = os.environ | {"XLA_FLAGS": " ".join(flags)}
    environment |= {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    processes = [
        subprocess.Popen([sys.executable, *map(str, command)], env=environment, **pipes)
        for command in commands
    ]
    try:
        yield processes
    finally:
        for process in processes:
            process.kill()
            process.communicate()


def free_address():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{probe.getsockname()[1]}"


def run_script(count, *what):
    address = free_address()
    return started(*((SCRIPT, address, count, i, PEER_TIMEOUT, *what) for i in range(count)))


def finish(process, seconds=200):
    """Return status, standard output and standard error of a process that ends by itself."""
    out, err = process.communicate(timeout=seconds)
    return process.returncode, out, err


def generate_commands(count, new_tokens):
    address = free_address()
    for index in range(count):
        yield (
            "-m", "jax_nvfp4_moe", "generate", EXAMPLE, "--prompt", GREEDY["prompt"],
            "--scheme", "w4a16", "--dtype", "float32", "--max-new-tokens", new_tokens,
            "--coordinator", address, "--processes", count, "--process-id", index,
            "--peer-timeout", PEER_TIMEOUT,
        )  # fmt: skip


@pytest.mark.slow
def test_two_processes_generate_what_one_does_again_after_one_was_killed():
    with started(*generate_commands(2, 400)) as (first, second):
        assert first.stdout.read(len(GREEDY["prompt"]) + 8)  # it is generating
        second.kill()
        begin = time.monotonic()
        status, _, err = finish(first)
        assert time.monotonic() - begin < AT_MOST
        assert status == 2
        assert ENDED in err.splitlines()[-1]
        assert "Traceback" not in err
    with started(*generate_commands(2, 48)) as (first, second):
        status, out, err = finish(first)
        assert status == 0, err
        assert out == GREEDY["text"] + "\n"
        assert finish(second)[:2] == (0, "")


@pytest.mark.slow
def test_processes_agree_on_whether_a_folder_is_free_and_one_writes_the_record(tmp_path):
    with run_script(2, "save", tmp_path) as processes:
        for process in processes:
            status, out, err = finish(process)
            assert status == 0, err
            assert "folder: expected a new or an empty folder" in out


@pytest.mark.slow
@pytest.mark.parametrize(("count", "mesh"), [(2, "tensor=2"), (4, "expert=2,tensor=2")])
def test_logits_are_those_of_one_process(count, mesh, tmp_path):
    """Greedy tokens agree too, and so do logits after experts moved between processes."""
    with run_script(count, SMALL, mesh, tmp_path / "result.npz") as processes:
        for process in processes:
            status, _, err = finish(process)
            assert status == 0, err
    found = np.load(tmp_path / "result.npz")
    model = load_model(SMALL, scheme="checkpoint", dtype=jnp.float32)
    ids = np.arange(12, dtype=np.int32).reshape(2, 6)
    expected = jax.jit(lambda model, ids: model(ids))(model, ids)
    # Sums over experts and over halves of experts are in another order.
    bound = 1e-5 * float(jnp.abs(expected).max())
    for name in {"logits", "placed"} & set(found):
        np.testing.assert_allclose(found[name], expected, rtol=0, atol=bound)
    block = next(block for _, block in expert_blocks(model))
    params = block.experts.params.get_value()
    scale = params.down.global_scale * 1.01  # the bound must catch 1 % in one layer
    down = dataclasses.replace(params.down, global_scale=scale)
    block.experts.params.set_value(dataclasses.replace(params, down=down))
    wrong = jax.jit(lambda model, ids: model(ids))(model, ids)
    assert np.abs(found["logits"] - wrong).max() > 10 * bound
    block.experts.params.set_value(params)
    if "load" in found:
        np.testing.assert_array_equal(found["load"], count_experts(model, ids))
    else:
        np.testing.assert_array_equal(
            found["tokens"], generate(model, ids, max_new_tokens=4, stop_ids=())
        )


@pytest.mark.slow
@pytest.mark.parametrize(("victim", "number"), [(0, signal.SIGKILL), (1, signal.SIGTERM)])
def test_the_other_process_ends_at_once(victim, number):
    """A worker ends with the process that started it, whichever signal ends that process."""
    with run_script(2, "sum") as processes:
        for process in processes:
            assert process.stdout.readline() == "1.0\n"
        processes[victim].send_signal(number)
        begin = time.monotonic()
        status = -number if number == signal.SIGKILL else 128 + number
        assert finish(processes[victim])[0] == status
        status, out, err = finish(processes[1 - victim])
        assert time.monotonic() - begin < AT_MOST
        assert status == 2
        assert ENDED in err.splitlines()[-1]
        assert set(out.split()) <= {"1.0"}  # nothing but results on standard output


@pytest.mark.slow
def test_a_silent_process_counts_as_dead():
    with run_script(2, "sum") as (first, second):
        for process in (first, second):
            assert process.stdout.readline() == "1.0\n"
        tasks = pathlib.Path(f"/proc/{second.pid}/task/{second.pid}/children")
        (worker,) = map(int, tasks.read_text().split())
        os.kill(worker, signal.SIGSTOP)
        try:
            begin = time.monotonic()
            status, _, err = finish(first)
            assert PEER_TIMEOUT / 2 < time.monotonic() - begin < AT_MOST
        finally:
            os.kill(worker, signal.SIGKILL)
        assert status == 2
        assert err.splitlines()[-1].startswith("error: " + ENDED)
        assert f"silent for {PEER_TIMEOUT} s" in err
        assert finish(second)[0] == 128 + signal.SIGKILL


@pytest.mark.slow
def test_a_process_that_stays_alone_says_so():
    command = ("-m", "jax_nvfp4_moe", "generate", "--coordinator", free_address())
    alone = (*command, "--processes", 2, "--process-id", 1, "--start-timeout", 1)
    with started(alone) as (process,):
        status, out, err = finish(process)
    assert (status, out) == (2, "")
    assert err.splitlines()[-1].startswith("error: coordinator: not all processes came together")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("Gloo all-reduce failed: Connection closed by peer [10.0.0.1]:5555", ENDED),
        ("NCCL operation failed: remote process exited or there was a network error", ENDED),
        ("The coordination service was shut down", ENDED),
        ("NCCL operation ncclAllReduce failed: unhandled system error", "a collective has failed"),
        ("NCCL operation ncclAllReduce failed: invalid usage", None),
        ("NCCL: Cuda failure 2 'out of memory'", None),
        ("reading the file timed out", None),
    ],
)
def test_errors_that_come_of_a_lost_process(text, said, monkeypatch):
    monkeypatch.setattr(jax.distributed, "is_initialized", lambda: True)
    found = distributed.explain_loss(RuntimeError(text))
    assert found is None if said is None else str(found).startswith(said)
    monkeypatch.setattr(jax.distributed, "is_initialized", lambda: False)
    assert distributed.explain_loss(RuntimeError(text)) is None


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("x:1",), "expected all three, or none"),
        (("x:1", 2), "expected all three, or none"),
        (("nowhere", 2, 0), "coordinator: expected host:port, got 'nowhere'"),
        (("x:1", 0, 0), "processes: expected at least 1, got 0"),
        (("x:1", 2, 2), "process_id: expected a number from 0 to 1, got 2"),
        ((), "found no scheduler"),
    ],
)
def test_bad_arguments(arguments, message, monkeypatch):
    for name in list(os.environ):
        if name.startswith(("SLURM", "OMPI", "KUBERNETES", "JAX_COORDINATOR")):
            monkeypatch.delenv(name)

    def detect(*_, **__):
        raise ValueError("coordinator_address should be defined.")

    monkeypatch.setattr(jax.distributed, "initialize", detect)
    with pytest.raises(ValueError, match=message):
        distributed.join(*arguments)


@pytest.mark.parametrize(("name", "value"), [("peer_timeout", 1), ("start_timeout", 0)])
def test_timeouts_out_of_range(name, value):
    with pytest.raises(ValueError, match=f"{name}: expected at least"):
        distributed.join("x:1", 2, 0, **{name: value})


def test_meshes():
    count = jax.device_count()
    assert dict(distributed.make_mesh().shape) == {"expert": count}
    assert dict(distributed.make_mesh(f"tensor={count}").shape) == {"tensor": count}
    both = distributed.make_mesh(f"expert={count}, tensor=1")
    assert list(both.shape.items()) == [("expert", count), ("tensor", 1)]


@pytest.mark.parametrize("shape", ["", "8", "expert=x", "data=1", "expert=1,expert=1", "expert=1;"])
def test_a_mesh_of_another_form(shape):
    with pytest.raises(ValueError, match="mesh: expected expert=N, tensor=N or both"):
        distributed.make_mesh(shape)


def test_a_mesh_of_another_size():
    count = jax.device_count()
    message = f"mesh: expected sizes that multiply to {count}, the devices of"
    with pytest.raises(ValueError, match=message):
        distributed.make_mesh(f"expert={count + 1}")


def test_a_mesh_without_processes_is_for_the_devices_of_this_one():
    command = ("-m", "jax_nvfp4_moe", "generate", "--mesh", "expert=2")
    with started(command) as (process,):
        status, out, err = finish(process)
    assert (status, out) == (2, "")
    assert "mesh: expected sizes that multiply to 1" in err.splitlines()[-1]
