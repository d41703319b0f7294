"""The bar of bytes that a load or a quantizer draws."""

import contextlib
import sys
from collections.abc import Callable, Iterator


@contextlib.contextmanager
def progress(
    wanted: bool | None, total: int, label: str = "loading"
) -> Iterator[Callable[[int], None]]:
    """Draw a bar of bytes on standard error; give the function that advances it.

    Args:
      wanted: None draws one on a terminal.
      total: bytes.
      label: stands before the bar.
    """
    if not (sys.stderr.isatty() if wanted is None else wanted):
        yield lambda nbytes: None
        return
    import rich.console  # on demand: it takes longer to import than this package
    import rich.progress

    with rich.progress.Progress(
        rich.progress.TextColumn(label),
        rich.progress.BarColumn(),
        rich.progress.DownloadColumn(binary_units=True),
        rich.progress.TransferSpeedColumn(),
        rich.progress.TimeRemainingColumn(),
        console=rich.console.Console(stderr=True),
    ) as bar:
        task = bar.add_task(label, total=total)
        yield lambda nbytes: bar.advance(task, nbytes)
