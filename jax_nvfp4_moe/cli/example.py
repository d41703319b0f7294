"""The model that comes with the package, for commands that run without a path."""

import contextlib
import importlib.resources
import pathlib
from collections.abc import Iterator
from typing import Annotated

import typer

EXAMPLE = "tiny-python-moe"
ModelPath = Annotated[
    pathlib.Path | None, typer.Argument(help="Folder or Hub name; the example where none.")
]


@contextlib.contextmanager
def example_or(path: pathlib.Path | None) -> Iterator[pathlib.Path]:
    """Give `path`, or the example model as a folder on disk."""
    if path is not None:
        yield path
        return
    example = importlib.resources.files("jax_nvfp4_moe") / "examples" / EXAMPLE
    with importlib.resources.as_file(example) as folder:
        yield folder
