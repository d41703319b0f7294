"""Options that several commands share."""

import functools
import inspect
import os
import pathlib
from collections.abc import Callable
from typing import Annotated

import typer

from jax_nvfp4_moe.checkpoint.folder import expand_home

Folder = Annotated[
    pathlib.Path,
    typer.Argument(help="Folder of a checkpoint, or its name on the Hugging Face Hub."),
]
SchemeOption = Annotated[
    str | None,
    typer.Option("--scheme", help="checkpoint, w4a16, w4a4, w4a4_unit_scale, w4a4_token_scale."),
]
SchemesOption = Annotated[
    list[str] | None, typer.Option("--scheme", help="As elsewhere; repeat it to compare.")
]
DtypeOption = Annotated[str, typer.Option("--dtype", help="bfloat16, float16 or float32.")]
BackendOption = Annotated[str | None, typer.Option("--backend", help="Name of a backend.")]
DispatchOption = Annotated[
    str,
    typer.Option(
        "--dispatch",
        help="How tokens reach experts over a mesh: psum, all_to_all, or ragged on GPUs.",
    ),
]


def with_options(
    command: Callable[..., None], *options: inspect.Parameter, runs: Callable, made: str = ""
) -> Callable[..., None]:
    """Return a command with more options.

    Typer reads a command's options off its signature, so the one returned has both joined.

    Args:
      command: a function whose parameters are options.
      options: those to add.
      runs: called with `command` and the values of all options.
      made: name of the parameter of `command` that `runs` fills in: no option.
    """
    own = [one for one in inspect.signature(command).parameters.values() if one.name != made]
    joined = [one.replace(kind=inspect.Parameter.KEYWORD_ONLY) for one in (*own, *options)]

    @functools.wraps(command)
    def run(**given):
        runs(command, **given)

    run.__signature__ = inspect.Signature(joined)  # type: ignore[attr-defined]
    run.__annotations__ = {one.name: one.annotation for one in joined}
    return run


def each_once(schemes: list[str] | None) -> list[str | None]:
    """Return the schemes that the user asks for, each once; None alone where they name none."""
    return [*dict.fromkeys(schemes or [None])]


def read_text(path: pathlib.Path) -> str:
    """Return the text of a file that an option names, a leading ``~`` expanded.

    Raises:
      OSError: it cannot be read.
      ValueError: it is not UTF-8.
    """
    path = expand_home(path)
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: expected text in UTF-8, got {error}") from None


def read_argument(name: str, text: str) -> str:
    """Return the text of an argument; in an ASCII locale Python leaves its bytes undecoded.

    Args:
      name: of the argument.
      text: as Python gives it, with surrogates for bytes that it could not decode.

    Raises:
      ValueError: it is not UTF-8.
    """
    try:
        return os.fsencode(text).decode("utf-8") if has_surrogates(text) else text
    except UnicodeDecodeError as error:
        raise ValueError(f"{name}: expected text in UTF-8, got {error}") from None


def has_surrogates(text: str) -> bool:
    """Return whether Python could not decode all bytes of an argument."""
    return any("\ud800" <= character <= "\udfff" for character in text)
