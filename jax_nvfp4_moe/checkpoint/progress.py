"""How far a load or a quantizer is: a bar of bytes, or lines in the log, one a layer."""

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


def log_layers(wanted: bool | None, label: str) -> Callable[[str], None]:
    """Return a function that takes names of tensors, and logs each layer at its first.

    Where `progress` draws a bar, and where the caller wants none, it logs nothing.

    Args:
      wanted: as for `progress`.
      label: stands before the layer.
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
