"""Run many hostile cases in worker processes, and report each that ends in a fault.

A program of this folder names its cases, and says what a user would run on each. `run_program` is
its command line. A case ends in one of three ways:

* right: every command did its work.
* refused: a command printed one message that the user can act on, with exit status 2.
* fault: anything else. That is another exception, a message that is only ``MemoryError``, a control
  character in the output, more than 2 seconds, more than 1 GB, or a worker that dies or hangs.

Times are those that the case would take alone: the processor's time where the machine is busy. A
case over the limit of time runs a second time, because the first one may have compiled something.
"""

import argparse
import collections
import contextlib
import dataclasses
import faulthandler
import gc
import io
import json
import logging
import os
import pathlib
import random
import resource
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence

TESTS = pathlib.Path(__file__).parents[1]
sys.path.append(str(TESTS))

SECONDS = 2.0  # of one command
MEGABYTES = 1024  # that one command may add to its process
_HANGS = 10  # seconds of the processor until the Python code of a command is interrupted
_LOST = 60  # seconds of a case until its worker is killed
_ADDRESSES = 8 << 30  # bytes of addresses that a worker may add, so that the machine stays alive
_CASES = 1500  # of one worker: JAX keeps what it has traced
_SHOWN = 240  # characters of a reason

Step = tuple[str, Callable[[], object]]


@dataclasses.dataclass(frozen=True)
class Result:
    """How one case ended.

    Attributes:
      case: the name of the case.
      verdict: "right", "refused" or "fault".
      why: the command and the message, or what is wrong.
      seconds: the time of the slowest command.
      megabytes: the memory that a command added at its peak.
    """

    case: str
    verdict: str
    why: str = ""
    seconds: float = 0.0
    megabytes: int = 0


class Hang(BaseException):
    """Interrupts a command that takes too long. It is no `Exception`, so that nobody handles it."""


def command(*arguments: str) -> Callable[[], None]:
    """Return a function that runs the command line ``jax-nvfp4-moe ARGUMENTS`` in this process."""

    def run():
        from jax_nvfp4_moe.cli.app import main

        main(list(arguments))

    return run


def as_command(action: Callable[[], object]) -> Callable[[], None]:
    """Return a function that runs a call of the library, and reports its errors as a command."""

    def run():
        from jax_nvfp4_moe.cli.errors import reporting_errors

        def made() -> None:
            action()

        reporting_errors(made)(verbose=False, show_traceback=False)

    return run


def run_program(
    path: str,
    list_cases: Callable[[], Sequence[str]],
    open_case: Callable[[str], contextlib.AbstractContextManager[Iterable[Step]]],
) -> None:
    """Run the command line of a program of this folder, and exit with 1 if it finds a fault.

    Args:
      path: the file of the program.
      list_cases: returns the names of all cases.
      open_case: takes the name of a case. It returns a context manager that makes the folder of the
        case, and yields the commands to run with their names.
    """
    parser = argparse.ArgumentParser(description=sys.modules["__main__"].__doc__)
    parser.add_argument("--case", action="append", help="run this case alone; may be repeated")
    parser.add_argument("--traceback", action="store_true", help="show where a case ends")
    parser.add_argument("--seed", type=int, default=0, help="of the order and of the sample")
    parser.add_argument("--sample", type=int, help="number of cases; all by default")
    parser.add_argument("--workers", type=int, default=os.cpu_count(), help="processes")
    parser.add_argument("--seconds", type=float, help="start no case after this time")
    parser.add_argument("--only", default="", help="only cases whose names contain this text")
    parser.add_argument("--results", type=pathlib.Path, help="file for one line of JSON a case")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.worker or given.traceback:
        serve(open_case, given.case)
        return
    cases = given.case or [case for case in list_cases() if given.only in case]
    if not given.case:
        random.Random(given.seed).shuffle(cases := list(cases))
        cases = cases[: given.sample]
    pool = Pool(path, cases, given.seconds, given.results)
    pool.run(min(given.workers, len(cases)))
    sys.exit(report(pathlib.Path(path), pool.results, len(cases), pool.took))


class Pool:
    """Worker processes that share a list of cases.

    Attributes:
      results: the results so far, in the order in which the cases ended.
      took: the seconds of the run.
    """

    def __init__(self, path, cases, seconds, file):
        """Make a pool that has not started."""
        self._path, self._cases = path, iter(cases)
        self._lock, self._stopped = threading.Lock(), False
        self._until = time.monotonic() + (seconds or 1e9)
        self._file = open(file, "w", encoding="utf-8") if file else None  # noqa: SIM115
        self.results: list[Result] = []
        self.took = 0.0

    def run(self, workers: int) -> None:
        """Run all cases. Ctrl-C, or SIGTERM, ends the run after the cases that have begun."""
        signal.signal(signal.SIGTERM, signal.default_int_handler)
        began = time.monotonic()
        threads = [threading.Thread(target=self._work) for _ in range(workers)]
        for thread in threads:
            thread.start()
        try:
            for thread in threads:
                thread.join()
        except KeyboardInterrupt:
            self._stopped = True
            for thread in threads:
                thread.join()
        self.took = time.monotonic() - began
        if self._file:
            self._file.close()

    def _next(self):
        with self._lock:
            if self._stopped or time.monotonic() > self._until:
                return None
            return next(self._cases, None)

    def _work(self):
        worker = None
        while (case := self._next()) is not None:
            if worker is None or worker.cases >= _CASES:
                if worker is not None:
                    worker.close()
                worker = Worker(self._path)
            result = worker.run(case)
            if worker.dead:
                worker = None
            with self._lock:
                self.results.append(result)
                if self._file:
                    print(json.dumps(dataclasses.asdict(result)), file=self._file, flush=True)
        if worker is not None:
            worker.close()


class Worker:
    """A process that runs one case after the other.

    Attributes:
      cases: the number of cases that it has run.
      dead: whether the process has ended.
    """

    def __init__(self, path):
        """Start the process, with a session of its own, so that Ctrl-C reaches the parent alone."""
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115
        self._process = subprocess.Popen(
            [sys.executable, path, "--worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            start_new_session=True,
        )
        self.cases, self.dead = 0, False

    def run(self, case: str) -> Result:
        """Return the result of one case. A worker that dies or hangs is a fault of the case."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        timer = threading.Timer(_LOST, self._process.kill)
        timer.start()
        line = ""
        with contextlib.suppress(BrokenPipeError):
            print(case, file=self._process.stdin, flush=True)
            line = self._process.stdout.readline()
        hung = not timer.is_alive()
        timer.cancel()
        self.cases += 1
        if line:
            return Result(**json.loads(line))
        self.dead = True
        status = self._process.wait()
        self._errors.seek(0)
        last = self._errors.read()[-4 * _SHOWN :].strip().splitlines()
        said = f"no answer in {_LOST} s" if hung else f"the process died with status {status}"
        return Result(case, "fault", f"{said}: {' | '.join(last[-4:])}", _LOST if hung else 0.0)

    def close(self) -> None:
        """End the process."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


def report(program: pathlib.Path, results: Sequence[Result], total: int, took: float) -> int:
    """Print totals and faults, and return the exit status."""
    found = collections.Counter(result.verdict for result in results)
    kinds: dict[str, list[Result]] = {}
    for result in results:
        if result.verdict == "fault":
            kinds.setdefault(result.why.split("\n")[0][:_SHOWN], []).append(result)
    for why, faults in sorted(kinds.items(), key=lambda kind: -len(kind[1])):
        print(f"FAULT ({len(faults)}): {why}")
        for fault in faults[:5]:
            print(f"    python {_shown(program)} --traceback --case {fault.case!r}")
    worst = max((r.seconds for r in results), default=0.0)
    most = max((r.megabytes for r in results), default=0)
    print(
        f"{len(results)} of {total} cases in {took:.0f} s: {found['right']} right, "
        f"{found['refused']} refused, {found['fault']} faults of {len(kinds)} kinds; "
        f"at most {worst:.1f} s and {most} MB"
    )
    return 1 if found["fault"] or not results else 0


def _shown(program):
    root = TESTS.parent
    return (
        program.resolve().relative_to(root) if program.resolve().is_relative_to(root) else program
    )


def serve(open_case, cases: Sequence[str] | None) -> None:
    """Run the cases that standard input names, or `cases`, with a traceback of each error."""
    shows = cases is not None
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    faulthandler.enable()
    logging.getLogger().addHandler(logging.NullHandler())  # logs are no result
    signal.signal(signal.SIGPROF, _interrupt)
    warm_up()
    _limit_addresses()
    for line in cases or sys.stdin:
        case = line.rstrip("\n")
        result = run_case(case, open_case, shows)
        print(json.dumps(dataclasses.asdict(result)), file=answers, flush=True)


def warm_up() -> None:
    """Import the package, and compile what every case needs."""
    from support.files.given import CHECKPOINTS

    import jax_nvfp4_moe.cli.app  # noqa: F401

    measure(command("inspect", str(CHECKPOINTS / "qwen3moe-modelopt-w4a16")), False)


def run_case(case: str, open_case, shows: bool) -> Result:
    """Run all commands of a case in this process, and return the worst result."""
    worst = Result(case, "right")
    with open_case(case) as steps:
        for name, action in steps:
            verdict, why, seconds, megabytes = measure(action, shows)
            if seconds > SECONDS and verdict != "fault":
                verdict, why, seconds, megabytes = measure(action, shows)
            if verdict != "fault" and seconds > SECONDS:
                verdict, why = "fault", f"takes over {SECONDS:g} s; {verdict}: {why}"
            if verdict != "fault" and megabytes > MEGABYTES:
                verdict, why = "fault", f"takes over {MEGABYTES} MB; {verdict}: {why}"
            if shows:
                print(
                    f"{name}: {verdict}: {why} ({seconds:.2f} s, {megabytes} MB)", file=sys.stderr
                )
            order = ("right", "refused", "fault")
            if order.index(verdict) > order.index(worst.verdict):
                worst = dataclasses.replace(worst, verdict=verdict, why=f"{name}: {why}")
            worst = dataclasses.replace(
                worst,
                seconds=round(max(worst.seconds, seconds), 2),
                megabytes=max(worst.megabytes, megabytes),
            )
            if verdict == "fault":
                break  # the next command may end in the same way
    return worst


def measure(action: Callable[[], object], shows: bool) -> tuple[str, str, float, int]:
    """Run one command. Return its verdict, the reason, its seconds and its megabytes."""
    gc.collect(0)
    before, wall, busy = _reset_peak(), time.monotonic(), time.process_time()
    verdict, why = "right", ""
    out, err = io.StringIO(), io.StringIO()
    signal.setitimer(signal.ITIMER_PROF, _HANGS)
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            action()
    except SystemExit as stop:
        if stop.code not in (None, 0):
            refused = stop.code == 2 and not _names_nothing(err.getvalue())
            verdict = "refused" if refused else "fault"
            why = f"status {stop.code}: {err.getvalue()[:_SHOWN].strip()}"
    except BaseException as error:
        verdict, why = "fault", _describe(error)
        if shows:
            traceback.print_exception(error)
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
    seconds = min(time.monotonic() - wall, time.process_time() - busy)
    raw = [c for c in out.getvalue() + err.getvalue() if not c.isprintable() and c != "\n"]
    if raw and verdict != "fault":
        verdict, why = "fault", f"control character {raw[0]!r} in the output"
    return verdict, why, seconds, max(_status("VmHWM") - before, 0)


def _names_nothing(message) -> bool:
    """Return whether a message says nothing that helps, such as the name of an exception alone."""
    words = message.strip().removeprefix("error:").strip()
    return not words or words in ("MemoryError", "OSError", "ValueError", "None")


def _describe(error) -> str:
    """Return the kind of an error with the last line of the package, which is where it began."""
    package = f"jax_nvfp4_moe{os.sep}"
    frames = [one for one in traceback.extract_tb(error.__traceback__) if package in one.filename]
    place = f"{frames[-1].filename.split(package)[-1]}:{frames[-1].lineno}" if frames else "?"
    message = str(error).split("\n")[0][:_SHOWN] if not isinstance(error, Hang) else ""
    return f"{type(error).__name__} at {place}\n{message}"


def _interrupt(number, frame):
    raise Hang(f"over {_HANGS} s")


def _limit_addresses() -> None:
    """Bound the addresses of this process, so that a huge allocation is an error of the case."""
    limit = (_status("VmSize") << 20) + _ADDRESSES
    resource.setrlimit(resource.RLIMIT_AS, (limit, resource.RLIM_INFINITY))


def _reset_peak() -> int:
    """Forget the peak of this process's memory, and return its memory now in megabytes."""
    with contextlib.suppress(OSError):
        pathlib.Path("/proc/self/clear_refs").write_text("5")
    return _status("VmRSS")


def _status(name) -> int:
    """Return a field of ``/proc/self/status`` in megabytes."""
    for line in pathlib.Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) >> 10
    raise RuntimeError(f"/proc/self/status has no {name}")


@contextlib.contextmanager
def scratch() -> Iterator[pathlib.Path]:
    """Yield an empty folder, in memory where the system has such a place."""
    memory = pathlib.Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else None) as folder:
        yield pathlib.Path(folder)
