"""Several processes on one or more hosts: they join, share their devices, and end together.

All of this uses JAX's own runtime. `jax.distributed` lets processes find each other, and notices if
one ends. Collectives are NCCL's on GPUs and Gloo's on CPUs. Each process runs the same program.

If a process dies, the following happens; t is `peer_timeout`:

* Collectives on CPUs (Gloo) fail at once, and the loss of process 0 is noticed at once. A process
  that is alive but does not respond, and a lost process in a run on GPUs, are noticed after at most
  t.
* JAX then ends the other processes by SIGABRT, unless a collective has raised an error before. In
  both cases no process waits forever. Under `supervise` each process prints one line and exits with
  status 2.
* No state is kept. The same command starts the run again, loads the model, and generates the same
  tokens.
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
# Lower-case parts of messages of JAX, Gloo and NCCL. These mean that another process has ended or
# does not respond. The first two are JAX's own services; the others count in collectives only.
_LOST = (
    "coordination service", "distributed service", "by peer", "remote process exited", "timed out",
    "timeout", "broken pipe", "connection refused", "socket closed",
)  # fmt: skip
# These mean that this process or its device has failed.
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
    """Join the other processes of a run.

    Call it before any other use of JAX's devices. Each process runs the same program with its own
    `process_id`.

    Args:
      coordinator: ``host:port`` of process 0, with a port that is free on that host. None (default)
        takes all three values from the scheduler that started the processes, if JAX knows it:
        Slurm, Open MPI, a Kubernetes job, Cloud TPU.
      processes: number of processes; None (default) as for `coordinator`.
      process_id: number of this process, from 0; None (default) as for `coordinator`.
      peer_timeout: seconds without a response after which a process counts as dead; at least 5, 60
        by default.
      start_timeout: seconds that processes may take to find each other, 300 by default. JAX ends
        them after that time.

    Raises:
      ValueError: if an argument is missing or out of range.
      ValueError: if JAX finds no known scheduler, or has already used its devices.
    """
    check_join(coordinator, processes, process_id, peer_timeout, start_timeout)
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    # The service would catch SIGTERM and wait for a program that asks it. A scheduler could then
    # not stop this program.
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
            what = "found no scheduler that names the other processes; pass all three"
            raise ValueError(f"coordinator, processes, process_id: {what} ({error})") from error
        raise ValueError(f"coordinator: could not join at {coordinator}: {error}") from error


def check_join(
    coordinator: str | None,
    processes: int | None,
    process_id: int | None,
    peer_timeout: int,
    start_timeout: int,
) -> None:
    """Check the arguments of `join`, which describes them.

    Raises:
      ValueError: if one is missing or out of range.
    """
    given = [value is not None for value in (coordinator, processes, process_id)]
    if any(given) and not all(given):
        raise ValueError(
            "coordinator, processes, process_id: expected all three, or none of them to use the "
            f"scheduler's values; got {coordinator}, {processes}, {process_id}"
        )
    if coordinator is not None and not re.fullmatch(r"\S+:\d{1,5}", coordinator):
        raise ValueError(f"coordinator: expected host:port, got {coordinator!r}")
    if processes is not None and processes < 1:
        raise ValueError(f"processes: expected at least 1, got {processes}")
    if process_id is not None and processes is not None and not 0 <= process_id < processes:
        raise ValueError(
            f"process_id: expected a number from 0 to {processes - 1}, got {process_id}"
        )
    # XLA checks for responses several times within the timeout. With a shorter timeout it would
    # take a busy host for a dead one.
    for name, value, least in (("peer", peer_timeout, 5), ("start", start_timeout, 1)):
        if value < least:
            raise ValueError(f"{name}_timeout: expected at least {least} s, got {value}")


def make_mesh(shape: str | None = None) -> Mesh:
    """Return the devices of all processes as a mesh.

    Args:
      shape: sizes of the axes, such as ``"expert=8,tensor=2"``; one axis may be missing. None
        (default) puts all devices along `expert`.

    Returns:
      A `jax.sharding.Mesh` with Auto axes.

    Raises:
      ValueError: if `shape` has another form, or its sizes do not multiply to the number of
        devices.

    Example:
      >>> import jax
      >>> from jax_nvfp4_moe.parallel.processes import make_mesh
      >>> make_mesh().shape["expert"] == len(jax.devices())
      True
    """
    devices = jax.devices()
    text = f"expert={len(devices)}" if shape is None else shape
    pairs = re.findall(r"(\w+)=([0-9]{1,9})", text)
    names = [name for name, _ in pairs]
    wellformed = ",".join(f"{name}={size}" for name, size in pairs) == text.replace(" ", "")
    if not (pairs and wellformed) or not set(names) <= set(_AXES) or len(set(names)) != len(names):
        raise ValueError(
            f"mesh: expected expert=N, tensor=N or both, separated by a comma; got {shape!r}"
        )
    sizes = [int(size) for _, size in pairs]
    if np.prod(sizes) != len(devices):
        raise ValueError(
            f"mesh: expected sizes that multiply to {len(devices)}, the devices of "
            f"{jax.process_count()} processes; got {shape}"
        )
    return jax.make_mesh(tuple(sizes), tuple(names), axis_types=(AxisType.Auto,) * len(names))


def is_first() -> bool:
    """Return whether this is process 0, the only process that prints results."""
    return jax.process_index() == 0


def explain_loss(error: BaseException) -> str | None:
    """Return a message for the user if the loss of another process may have caused `error`.

    A collective can also fail because of this process. The result is None if the text of the error
    says so, and if the error comes neither from a collective nor from JAX's runtime.
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
            "network has failed; read the messages of the other processes, and start all of them "
            "again"
        )
    return None


@contextlib.contextmanager
def leaving_at_once() -> Iterator[None]:
    """End this process without waiting for the others if its work fails.

    Python's normal exit would wait until all processes reach their end, which they then cannot.
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
    """Flush the output and end the process, if it runs together with others."""
    if jax.distributed.is_initialized():
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def supervise(command: Sequence[str], peer_timeout: int, start_timeout: int) -> int:
    """Run `command` as a child process, and print the reason if JAX's runtime ends it.

    JAX ends a process whose peers are lost from C++ code, so that no Python code of the process can
    print a message. The child does not outlive this process, and this process ends with the child.

    Args:
      command: command line of the child. It must accept the option `SUPERVISED` with a number, and
        call `be_supervised`, `join`, and `report_joined` with that number.
      peer_timeout: as in `join`, for the message.
      start_timeout: as in `join`, for the message.

    Returns:
      The exit status for this process.
    """
    reader, writer = os.pipe()
    command = [*command, SUPERVISED, str(writer)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, pass_fds=[writer]) as child:
        os.close(writer)
        # Control-C reaches the child by itself, because both processes are in the foreground of the
        # terminal.
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
        f"another process of this run has ended, or was silent for {peer_timeout} s (JAX's message "
        "is above); start all of them again"
    )
    absent = (
        f"coordinator: not all processes came together within {start_timeout} s; check that the "
        "number of processes is right, and that every host can reach the coordinator's port"
    )
    print(f"error: {lost if joined else absent}", file=sys.stderr, flush=True)
    return STATUS


def be_supervised() -> None:
    """End this process when its parent, in `supervise`, ends; keep standard output for results.

    Messages that libraries print to standard output, such as Gloo's, go to standard error.
    """
    threading.Thread(target=_end_with_parent, daemon=True).start()
    results = os.dup(1)
    os.dup2(2, 1)
    sys.stdout = os.fdopen(results, "w", encoding="utf-8")


def report_joined(pipe: int) -> None:
    """Tell `supervise` that this process has joined the others.

    Args:
      pipe: the number that followed the option `SUPERVISED`.
    """
    os.write(pipe, _JOINED)
    os.close(pipe)


def _end_with_parent():
    """Wait until the parent closes its end of standard input, then end this process."""
    while os.read(0, 1):  # the parent writes nothing: read returns when the pipe is closed
        pass
    os._exit(STATUS)
