"""What commands print: results as tables, and what is said once on standard error."""

import contextlib
import sys
from collections.abc import Iterable, Sequence

from jax_nvfp4_moe.parallel import processes as distributed


def table(rows: Iterable[Sequence[str]]) -> list[str]:
    """Return `rows` as lines of aligned columns."""
    rows = [tuple(row) for row in rows]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]


def report(message: str) -> None:
    """Say what is worth saying once, however many processes there are."""
    if distributed.is_first():
        say(message)


def say(message: str) -> None:
    """Print a line on standard error."""
    print(message, file=sys.stderr, flush=True)


@contextlib.contextmanager
def progress_bar(what: str):
    """Draw a bar on standard error where it is a terminal; give the function that advances it."""
    if not (sys.stderr.isatty() and distributed.is_first()):
        yield None
        return
    import rich.console
    import rich.progress

    with rich.progress.Progress(console=rich.console.Console(stderr=True)) as bar:
        task = bar.add_task(what, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)
