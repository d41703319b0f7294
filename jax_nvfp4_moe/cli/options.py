"""Command-line options that several commands share."""

import contextlib
import functools
import importlib.resources
import inspect
import math
import os
import pathlib
from collections.abc import Callable, Iterator
from typing import Annotated, Any

import typer

from jax_nvfp4_moe.checkpoint.errors import printable
from jax_nvfp4_moe.checkpoint.folder import expand_home

LARGEST = 2**31 - 1  # what the index types of JAX hold
EXAMPLE = "tiny-python-moe"  # the model that comes with the package


def number(
    *names: str,
    help: str,
    least: float = 1,
    most: float = LARGEST,
    above: float | None = None,
    **settings: Any,
) -> Any:
    """Return a Typer option for a number, which is checked before the command begins.

    Args:
      names: spellings of the option; by default the name of the parameter.
      help: as for `typer.Option`.
      least: the smallest value.
      most: the largest value.
      above: None, or a number that the value must be larger than.
      settings: further arguments of `typer.Option`.
    """
    largest = f"{most}" if isinstance(most, int) else f"{most:g}"
    expected = f"a number from {least} to {largest}"
    if above is not None:
        expected = f"a number above {above} and at most {largest}"

    def check(value):
        fits = value is None or (math.isfinite(value) and least <= value <= most)
        if not fits or (above is not None and value is not None and value <= above):
            raise typer.BadParameter(f"expected {expected}, got {value}")
        return value

    return typer.Option(*names, help=help, callback=check, **settings)


Folder = Annotated[
    pathlib.Path,
    typer.Argument(help="Folder of a checkpoint, or its name on the Hugging Face Hub."),
]
ModelPath = Annotated[
    pathlib.Path | None,
    typer.Argument(
        help="Folder of a checkpoint, or its name on the Hugging Face Hub. Without it, the command "
        "runs the example model of this package."
    ),
]
SchemeOption = Annotated[
    str | None,
    typer.Option(
        "--scheme",
        help="Scheme to run: checkpoint, w4a16, w4a4, w4a4_unit_scale or w4a4_token_scale. By "
        "default, the checkpoint and the device decide.",
    ),
]
SchemesOption = Annotated[
    list[str] | None,
    typer.Option(
        "--scheme",
        help="Scheme to run: checkpoint, w4a16, w4a4, w4a4_unit_scale or w4a4_token_scale. Repeat "
        "the option to compare schemes.",
    ),
]
DtypeOption = Annotated[
    str,
    typer.Option(
        "--dtype", help="Dtype of activations and dense weights: bfloat16, float16 or float32."
    ),
]
BackendOption = Annotated[
    str | None,
    typer.Option(
        "--backend",
        help="Name of the backend of NVFP4 modules, as `inspect` lists them. By default, the first "
        "backend that can run a module.",
    ),
]
TemperatureOption = Annotated[
    float,
    number(
        help="Temperature of sampling. 0 always takes the most likely token.",
        least=0,
        most=3e38,  # about the largest float32
    ),
]
TopKOption = Annotated[
    int | None, number(help="Sample from the k most likely tokens; from all by default.")
]
TopPOption = Annotated[
    float,
    number(
        help="Sample from the most likely tokens whose probabilities add up to this.",
        least=0,
        most=1,
        above=0,
    ),
]
# JAX takes the lower 32 bits of a seed. Other seeds would give the numbers of one of these.
SeedOption = Annotated[int, number(help="Seed of the random numbers.", least=0, most=2**32 - 1)]
DispatchOption = Annotated[
    str,
    typer.Option(
        "--dispatch",
        help="How tokens reach their experts over a mesh: psum, all_to_all, or ragged on GPUs.",
    ),
]
DraftOption = Annotated[
    str | None,
    typer.Option(
        "--draft",
        help="Draft several tokens a step: mtp, by the drafting layers of the checkpoint, or "
        "lookup, from the text so far. The text stays the same.",
    ),
]
DraftTokensOption = Annotated[
    str,
    typer.Option(
        "--draft-tokens", help="Number of tokens to draft in a step, from 1 to 16, or auto."
    ),
]


def read_drafting(draft: str | None, draft_tokens: str) -> dict[str, Any]:
    """Return the arguments of `generate` for the options of drafting."""
    whole = draft_tokens.isascii() and draft_tokens.isdecimal()
    return {"draft": draft, "draft_tokens": int(draft_tokens[:9]) if whole else draft_tokens}


def with_options(
    command: Callable[..., None], *options: inspect.Parameter, runs: Callable, made: str = ""
) -> Callable[..., None]:
    """Return a command that takes more options.

    Typer reads the options of a command from its signature. The returned command therefore has a
    signature with the options of `command` and the new ones.

    Args:
      command: a function whose parameters are options.
      options: parameters to add.
      runs: function that is called with `command` and the values of all options.
      made: name of the parameter of `command` that `runs` provides. It is not an option. Empty if
        there is none.
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
    """Return the schemes that the user names, without repetitions; ``[None]`` if there are none."""
    return [*dict.fromkeys(schemes or [None])]


def read_text(path: pathlib.Path) -> str:
    """Return the text of a file that an option names; a leading ``~`` is expanded.

    Raises:
      OSError: the file cannot be read.
      ValueError: the file is not UTF-8.
    """
    path = expand_home(path)
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{printable(path)}: expected text in UTF-8; decoding failed: {error}"
        ) from None


def read_argument(name: str, text: str) -> str:
    """Return the text of an argument.

    In an ASCII locale, Python does not decode the bytes of an argument that are not ASCII. This
    function decodes them as UTF-8.

    Args:
      name: name of the argument, for the message.
      text: the argument as Python passes it, with surrogates for bytes that are not decoded.

    Raises:
      ValueError: the bytes are not UTF-8.
    """
    try:
        return os.fsencode(text).decode("utf-8") if has_surrogates(text) else text
    except UnicodeDecodeError as error:
        raise ValueError(f"{name}: expected text in UTF-8; decoding failed: {error}") from None


def has_surrogates(text: str) -> bool:
    """Return whether Python left bytes of an argument undecoded."""
    return any("\ud800" <= character <= "\udfff" for character in text)


@contextlib.contextmanager
def example_or(path: pathlib.Path | None) -> Iterator[pathlib.Path]:
    """Yield `path`, or the folder of the example model if `path` is None."""
    if path is not None:
        yield path
        return
    example = importlib.resources.files("jax_nvfp4_moe") / "examples" / EXAMPLE
    with importlib.resources.as_file(example) as folder:
        yield folder
