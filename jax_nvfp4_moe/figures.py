"""What all pictures share: the check of a file's name, the style, and the writing of the file."""

import contextlib
import pathlib
from collections.abc import Iterator
from typing import Any

from jax_nvfp4_moe.checkpoint.errors import printable
from jax_nvfp4_moe.checkpoint.folder import expand_home

# A white background, also behind labels: the picture reads on a dark page too.
STYLE = {
    "axes.edgecolor": "#8c959f",
    "axes.labelcolor": "#24292f",
    "axes.spines.right": False,
    "axes.spines.top": False,
    "figure.facecolor": "white",
    "grid.color": "#d0d7de",
    "legend.frameon": False,
    "savefig.dpi": 150,
    "text.color": "#24292f",
    "xtick.color": "#57606a",
    "xtick.labelcolor": "#24292f",
    "ytick.color": "#57606a",
    "ytick.labelcolor": "#24292f",
}


def check_plot(path: str | pathlib.Path) -> None:
    """Check that `drawing` can write `path`.

    Args:
      path: file to write; its ending says the kind, such as ".png" or ".svg".

    Raises:
      ValueError: matplotlib is not installed, or cannot write this kind of file; or the folder
        does not exist.
    """
    kinds = _figure_class()().canvas.get_supported_filetypes()
    path = expand_home(path)
    if path.suffix.lower().removeprefix(".") not in kinds:
        raise ValueError(
            f"plot: expected a name ending in .{' or .'.join(kinds)}; got {printable(path)}"
        )
    if not path.parent.is_dir():
        raise ValueError(f"plot: expected a folder that exists; got {printable(path.parent)}")


@contextlib.contextmanager
def drawing(path: str | pathlib.Path, size: tuple[float, float]) -> Iterator[Any]:
    """Give an empty figure in the project's style, and write it to `path` at the end.

    Args:
      path: as for `check_plot`.
      size: width and height in inches.

    Yields:
      A `matplotlib.figure.Figure` with the layout "constrained".

    Raises:
      ValueError: as `check_plot`.
      OSError: the file cannot be written.
    """
    check_plot(path)
    figure_class = _figure_class()
    from matplotlib import style  # on demand, as the figure

    # "default" first: settings of the user, such as a dark theme, would mix with ours.
    with style.context(["default", STYLE]):
        figure = figure_class(figsize=size, layout="constrained")
        yield figure
        figure.savefig(expand_home(path))


def _figure_class():
    try:
        from matplotlib.figure import Figure  # on demand: optional, and slow to import
    except ImportError as error:
        raise ValueError(
            "plot: matplotlib is not installed; run pip install 'jax-nvfp4-moe[plot]'"
        ) from error
    return Figure
