"""Options that several commands share."""

import functools
import inspect
from collections.abc import Callable


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
