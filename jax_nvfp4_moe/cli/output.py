"""Print the results of commands as tables, and messages on standard error.

All text that a command prints passes through this module, which escapes it.
"""

import contextlib
import json
import math
import os
import sys
import traceback
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from jax_nvfp4_moe.cli.escaping import escape_line, escape_message, escape_text
from jax_nvfp4_moe.parallel import processes as distributed


def table(rows: Iterable[Sequence[str]]) -> list[str]:
    """Return `rows` as lines with aligned columns, and control characters as escapes."""
    rows = [tuple(map(escape_line, row)) for row in rows]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]


def to_json(value: Any) -> str:
    """Return a value as one line of JSON, with null for each number that is not finite.

    JSON has no NaN and no infinity, and many readers refuse what Python writes for them. All
    characters outside of ASCII, and all control characters, are escapes.
    """
    return json.dumps(_finite(value), allow_nan=False).replace("\x7f", "\\u007f")


def _finite(value):
    """Return a value for JSON with None in place of each number that is not finite."""
    if isinstance(value, Mapping):
        return {name: _finite(one) for name, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def report(message: str) -> None:
    """Print a message on standard error, once even if several processes run."""
    if distributed.is_first():
        say(message)


def say(message: str) -> None:
    """Print a message on standard error, with control characters as escapes."""
    print(escape_message(message), file=sys.stderr, flush=True)


def say_traceback(error: BaseException) -> None:
    """Print the traceback of an error on standard error, as `say` prints messages."""
    say("".join(traceback.format_exception(error)).rstrip("\n"))


def show(result: str) -> None:
    """Print a result for people on standard output, with control characters as escapes."""
    print(escape_message(result), flush=True)


def write(text: str) -> None:
    """Print a part of the text of a model on standard output.

    Control characters are escapes on a terminal. In a file or a pipe, the text is as it came.
    """
    print(escape_text(text) if sys.stdout.isatty() else text, end="", flush=True)


def drop_output() -> None:
    """Point standard output to the null device, because nobody can read it.

    Python flushes standard output at exit. It would fail once more, and say so.
    """
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


@contextlib.contextmanager
def progress_bar(what: str):
    """Draw a progress bar on standard error, and yield the function that advances it.

    If standard error is not a terminal, or if this is not process 0, no bar is drawn and the
    function is None.

    Args:
      what: label of the bar.
    """
    if not (sys.stderr.isatty() and distributed.is_first()):
        yield None
        return
    import rich.console
    import rich.markup
    import rich.progress

    with rich.progress.Progress(console=rich.console.Console(stderr=True)) as bar:
        task = bar.add_task(rich.markup.escape(escape_line(what)), total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)
