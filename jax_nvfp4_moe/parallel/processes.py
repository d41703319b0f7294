"""Several processes, on one host or many: they join, share their devices, and end together.

Everything is JAX's own runtime: `jax.distributed` lets processes find each other and notices when
one is gone; collectives are NCCL's on GPUs and Gloo's on CPUs. Each process runs the same program.

What happens when a process dies, t being `peer_timeout`:

* Collectives of a CPU (Gloo) and the loss of process 0 are noticed at once, a process that is alive
  but silent, and one of GPUs, after t at the latest.
* JAX then ends the other processes by SIGABRT, unless a collective has raised an error before.
  Either way nobody waits: under `supervise` each says one line and exits with status 2.
* Nothing is kept: the same command starts the run again, which loads, and gives the same tokens.
"""

import contextlib
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence

import jax
import numpy as np
from jax.sharding import AxisType, Mesh

PEER_TIMEOUT = 60
START_TIMEOUT = 300
STATUS = 2
SUPERVISED = "--supervised"
_AXES = ("expert", "tensor")
_COLLECTIVES = ("Gloo", "NCCL")
# What JAX, Gloo and NCCL say, in any case of letters, where another process is gone or silent, ...
_LOST = (
    "coordination service", "distributed service", "by peer", "remote process exited", "timed out",
    "timeout", "broken pipe", "connection refused", "socket closed",
)  # fmt: skip
# ... and where it is this program or device.
_OWN = ("invalid usage", "invalid argument", "out of memory", "unimplemented")
_JOINED = b"j"


def join(
    coordinator: str | None = None,
    processes: int | None = None,
    process_id: int | None = None,
    *,
    peer_timeout: int = PEER_TIMEOUT,
    start_timeout: int = START_TIMEOUT,
) -> None:
    """Join the other processes of a run; before anything else asks JAX for its devices.

    Args:
      coordinator: ``host:port`` of process 0, a free port there; None, with the next two, takes all
        three from what started the processes, if it is one that JAX knows: Slurm, Open MPI, a
        Kubernetes job, Cloud TPU.
      processes: how many there are.
      process_id: which this is, from 0.
      peer_timeout: seconds without a sign of life after which a process counts as dead.
      start_timeout: seconds that processes have to come together; JAX ends them after that.

    Raises:
      ValueError: an argument is missing or out of range, JAX knows no scheduler here, or has
        computed already.
    """
    check_join(coordinator, processes, process_id, peer_timeout, start_timeout)
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    # It would catch SIGTERM and wait for a program that asks: a scheduler could not stop this one.
    jax.config.update("jax_enable_preemption_service", False)
    try:
        jax.distributed.initialize(
            coordinator,
            processes,
            process_id,
            heartbeat_timeout_seconds=peer_timeout,
            initialization_timeout=start_timeout,
        )
    except (ValueError, RuntimeError) as error:
        if coordinator is None:
            what = "found no scheduler that says where the others are; pass them"
            raise ValueError(f"coordinator, processes, process_id: {what} ({error})") from error
        raise ValueError(f"coordinator: could not join at {coordinator}: {error}") from error


def check_join(
    coordinator: str | None,
    processes: int | None,
    process_id: int | None,
    peer_timeout: int,
    start_timeout: int,
) -> None:
    """Check the arguments of `join`.

    Raises:
      ValueError: one is missing or out of range.
    """
    given = [value is not None for value in (coordinator, processes, process_id)]
    if any(given) and not all(given):
        raise ValueError(
            "coordinator, processes, process_id: expected all three, or none to take them from the "
            f"scheduler; got {coordinator}, {processes}, {process_id}"
        )
    if coordinator is not None and not re.fullmatch(r"\S+:\d{1,5}", coordinator):
        raise ValueError(f"coordinator: expected host:port, got {coordinator!r}")
    if processes is not None and processes < 1:
        raise ValueError(f"processes: expected at least 1, got {processes}")
    if process_id is not None and processes is not None and not 0 <= process_id < processes:
        raise ValueError(f"process_id: expected 0 to {processes - 1}, got {process_id}")
    # XLA checks at a fraction of the timeout; below it takes a busy host for a dead one.
    for name, value, least in (("peer", peer_timeout, 5), ("start", start_timeout, 1)):
        if value < least:
            raise ValueError(f"{name}_timeout: expected at least {least} s, got {value}")


def make_mesh(shape: str | None = None) -> Mesh:
    """Return the devices of all processes as a mesh.

    Args:
      shape: such as ``"expert=8,tensor=2"``, either of which may be missing; all devices along
        `expert` where None.

    Raises:
      ValueError: it is not of that form, or the sizes do not multiply to the number of devices.
    """
    devices = jax.devices()
    text = f"expert={len(devices)}" if shape is None else shape
    pairs = re.findall(r"(\w+)=(\d+)", text)
    names = [name for name, _ in pairs]
    wellformed = ",".join(f"{name}={size}" for name, size in pairs) == text.replace(" ", "")
    if not (pairs and wellformed) or not set(names) <= set(_AXES) or len(set(names)) != len(names):
        raise ValueError(f"mesh: expected expert=N, tensor=N or both with a comma, got {shape!r}")
    sizes = [int(size) for _, size in pairs]
    if np.prod(sizes) != len(devices):
        raise ValueError(
            f"mesh: expected sizes that multiply to {len(devices)}, the devices of "
            f"{jax.process_count()} processes; got {shape}"
        )
    return jax.make_mesh(tuple(sizes), tuple(names), axis_types=(AxisType.Auto,) * len(names))


def is_first() -> bool:
    """Return whether this process is the one that speaks: process 0."""
    return jax.process_index() == 0


def explain_loss(error: BaseException) -> str | None:
    """Return what to tell the user where `error` comes, or may, from the loss of another process.

    A collective fails for reasons of this process too; None where it says so, and where `error` is
    none of a collective or of JAX's runtime.
    """
    text = str(error)
    lower = text.lower()
    if not jax.distributed.is_initialized() or any(word in lower for word in _OWN):
        return None
    collective = any(word in text for word in _COLLECTIVES)
    if any(word in lower for word in _LOST[: None if collective else 2]):
        return f"another process of this run has ended ({text}); start all of them again"
    if collective:
        return (
            f"a collective has failed ({text}): another process has ended, or a device, driver or "
            "network has failed; see what the others say, and start all of them again"
        )
    return None


@contextlib.contextmanager
def leaving_at_once() -> Iterator[None]:
    """End this process without waiting for the others where its work has failed.

    Python's own way out would wait for all processes to come to the end, which they cannot.
    """
    try:
        yield
    except SystemExit as stop:
        if stop.code not in (None, 0):
            _leave(stop.code if isinstance(stop.code, int) else 1)
        raise
    except BaseException as error:
        if lost := explain_loss(error):
            print(f"error: {lost}", file=sys.stderr)
            _leave(STATUS)
        if jax.distributed.is_initialized():
            sys.excepthook(type(error), error, error.__traceback__)
            _leave(1)
        raise


def _leave(status):
    if jax.distributed.is_initialized():
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def supervise(command: Sequence[str], peer_timeout: int, start_timeout: int) -> int:
    """Run `command` as a child, and say why where JAX's runtime has ended it; return its status.

    JAX ends a process whose peers are gone from inside, and no Python of it comes to speak. The
    child lives as long as this process: each ends the other.

    Args:
      command: takes the option `SUPERVISED` with a number, calls `be_supervised`, `join`, and
        `report_joined` with the number.
      peer_timeout, start_timeout: as for `join`.
    """
    reader, writer = os.pipe()
    command = [*command, SUPERVISED, str(writer)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, pass_fds=[writer]) as child:
        os.close(writer)
        # Control-C reaches the child by itself: both are in the terminal's foreground.
        handlers = {signal.SIGTERM: lambda *_: child.terminate(), signal.SIGINT: signal.SIG_IGN}
        before = {number: signal.signal(number, do) for number, do in handlers.items()}
        try:
            status = child.wait()
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
    with os.fdopen(reader, "rb") as pipe:
        joined = pipe.read(1) == _JOINED
    if status >= 0:
        return status
    if status != -signal.SIGABRT:
        return 128 - status
    lost = (
        f"another process of this run has ended, or was silent for {peer_timeout} s (above is what "
        "JAX says of it); start all of them again"
    )
    absent = (
        f"coordinator: not all processes came together within {start_timeout} s; check that the "
        "number of processes is right, and that its host and port can be reached from all"
    )
    print(f"error: {lost if joined else absent}", file=sys.stderr, flush=True)
    return STATUS


def be_supervised() -> None:
    """End when the parent, in `supervise`, ends; keep standard output for results.

    What libraries print there, as Gloo its greetings, goes to standard error.
    """
    threading.Thread(target=_end_with_parent, daemon=True).start()
    results = os.dup(1)
    os.dup2(2, 1)
    sys.stdout = os.fdopen(results, "w", encoding="utf-8")


def report_joined(pipe: int) -> None:
    """Tell `supervise` that this process has joined.

    Args:
      pipe: the number behind the option `SUPERVISED`.
    """
    os.write(pipe, _JOINED)
    os.close(pipe)


def _end_with_parent():
    while os.read(0, 1):  # nothing is ever written: it returns when the other end is closed
        pass
    os._exit(STATUS)
