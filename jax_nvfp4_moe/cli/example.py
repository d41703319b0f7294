"""The example model that comes with the package, for commands without a path."""

import contextlib
import importlib.resources
import pathlib
from collections.abc import Iterator
from typing import Annotated

import typer

EXAMPLE = "tiny-python-moe"
ModelPath = Annotated[
    pathlib.Path | None,
    typer.Argument(
        help="Folder of a checkpoint, or its name on the Hugging Face Hub. Without it, the command "
        "runs the example model of this package."
    ),
]


@contextlib.contextmanager
def example_or(path: pathlib.Path | None) -> Iterator[pathlib.Path]:
    """Yield `path`, or the folder of the example model if `path` is None."""
    if path is not None:
        yield path
        return
    example = importlib.resources.files("jax_nvfp4_moe") / "examples" / EXAMPLE
    with importlib.resources.as_file(example) as folder:
        yield folder
