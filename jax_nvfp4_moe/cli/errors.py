"""Error messages and exit statuses of commands.

A command ends with one of these statuses:

* 0: the result is complete.
* 1: the input was right and the result is not, because numbers in it are not finite; or the reader
  of our output has ended. Other errors, which no user can correct, are raised with a traceback, and
  Python then exits with 1 too.
* 2: the user can correct the error: an argument, a file, the memory. The message is one line.
"""

import contextlib
import inspect
import logging
import pathlib
import sys
import traceback
from collections.abc import Callable, Iterator
from typing import Annotated

import jax
import typer

from jax_nvfp4_moe.checkpoint import progress
from jax_nvfp4_moe.checkpoint.errors import CheckpointError
from jax_nvfp4_moe.cli.devices import explain_missing
from jax_nvfp4_moe.cli.options import with_options
from jax_nvfp4_moe.cli.output import drop_output, say, say_traceback
from jax_nvfp4_moe.inference.not_finite import MARK, NotFiniteError
from jax_nvfp4_moe.parallel import processes as distributed
from jax_nvfp4_moe.scheme import NoBackendError, Target

LOG = logging.getLogger("jax_nvfp4_moe")
# XLA's words for a device without memory. On a CPU, an error inside of a program has the second.
_OUT_OF_MEMORY = ("RESOURCE_EXHAUSTED", "Out of memory")
_PACKAGE = pathlib.Path(__file__).parents[1]


def _flag(name: str, option: str, words: str) -> inspect.Parameter:
    """Return an option of commands that is False unless the user passes it."""
    annotation = Annotated[bool, typer.Option(option, help=words)]
    kind = inspect.Parameter.KEYWORD_ONLY
    return inspect.Parameter(name, kind, default=False, annotation=annotation)


_OPTIONS = (
    _flag("verbose", "--verbose", "Log which scheme and backend runs, and why."),
    _flag("show_traceback", "--traceback", "Also print the traceback of an error."),
)


def reporting_errors(command: Callable[..., None]) -> Callable[..., None]:
    """Return a command that prints an error as one message, and exits with status 2.

    The command exits with status 1 if a warning said that results are not finite. It also gets the
    options --verbose and --traceback. An error that no user can correct is a fault of the package.
    It is raised, so that its traceback can be reported.
    """
    return with_options(command, *_OPTIONS, runs=_run)


def _run(command, *, verbose, show_traceback, **given):
    """Run a command, and print an error that the user can correct."""
    level = logging.INFO if verbose else logging.WARNING
    LOG.setLevel(level)
    progress.LOG.setLevel(logging.INFO)
    try:
        with _noting_not_finite() as warned:
            command(**given)
    except BrokenPipeError:  # the reader of our output has ended, as in `| head`
        drop_output()
        sys.exit(1)
    except Exception as error:
        message = _message(error)
        if message is None:
            error.add_note(
                "This is a fault of jax-nvfp4-moe: please report it with the traceback above."
            )
            raise
        if show_traceback:
            say_traceback(error)
        say(f"error: {message}")
        sys.exit(1 if isinstance(error, NotFiniteError) else 2)
    if warned:
        sys.exit(1)


@contextlib.contextmanager
def _noting_not_finite() -> Iterator[list[logging.LogRecord]]:
    """Yield a list to which the warnings are added that results are not finite."""
    warned: list[logging.LogRecord] = []

    class Noting(logging.Handler):
        def emit(self, record):
            if hasattr(record, MARK):
                warned.append(record)

    handler = Noting()
    LOG.addHandler(handler)
    try:
        yield warned
    finally:
        LOG.removeHandler(handler)


def _message(error: Exception) -> str | None:
    """Return the message for the user, or None if the error is a fault of the package."""
    if isinstance(error, jax.errors.JaxRuntimeError):
        if any(words in str(error) for words in _OUT_OF_MEMORY):
            return f"out of memory on {Target.current()} while the model ran: {error}"
        return None
    missing = explain_missing(error)
    if missing:
        return missing
    if isinstance(error, MemoryError):
        return f"out of memory on the host: {error}".removesuffix(": ")
    theirs = isinstance(error, (CheckpointError, NoBackendError, OSError))
    lost = isinstance(error, (ValueError, OSError)) and distributed.explain_loss(error)
    if lost:
        return lost
    if theirs or (isinstance(error, (ValueError, TypeError)) and _is_raised_here(error)):
        return str(error) or type(error).__name__
    return None


def _is_raised_here(error: Exception) -> bool:
    """Return whether a `raise` statement of this package raised `error`.

    The package documents every `ValueError` and `TypeError` that it raises, and the message says
    how to correct the call. One of Python or of a library means that our own code is wrong.
    """
    origin = traceback.extract_tb(error.__traceback__)[-1]
    ours = pathlib.Path(origin.filename).is_relative_to(_PACKAGE)
    return ours and (origin.line or "").startswith("raise ")
