"""Show the progress of a load or of a quantization: a bar of bytes, or a log line per layer."""

import contextlib
import logging
import re
import sys
from collections.abc import Callable, Iterator

LOG = logging.getLogger("jax_nvfp4_moe.progress")
_LAYER = re.compile(r".*?\.\d+(?=\.)")


@contextlib.contextmanager
def progress(
    wanted: bool | None, total: int, label: str = "loading"
) -> Iterator[Callable[[int], None]]:
    """Draw a progress bar of bytes on standard error, and yield the function that advances it.

    Args:
      wanted: whether to draw the bar. None draws it if standard error is a terminal.
      total: the total number of bytes.
      label: the text before the bar.
    """
    if not (sys.stderr.isatty() if wanted is None else wanted):
        yield lambda nbytes: None
        return
    import rich.console  # imported on demand, because it takes longer than this package does
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


def log_layers(wanted: bool | None, label: str) -> Callable[[str], None]:
    """Return a function that takes the names of tensors and logs each layer once.

    It logs nothing if `progress` draws a bar, or if the caller turned the bar on or off.

    Args:
      wanted: as for `progress`.
      label: the text before the layer.
    """
    seen: set[str] = set()
    silent = wanted is not None or sys.stderr.isatty()

    def note(name: str) -> None:
        layer = _LAYER.match(name)
        if silent or layer is None or layer[0] in seen:
            return
        seen.add(layer[0])
        LOG.info("%s %s", label, layer[0])

    return note
