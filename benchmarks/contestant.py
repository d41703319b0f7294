"""What the programs share that `moe.py` starts, one process each: arguments in, JSON lines out."""

import argparse
import json
from collections.abc import Callable, Iterable

from moe_cases import CASES, Case


def parser(description: str) -> argparse.ArgumentParser:
    """Return a parser that takes ``--case NAME ...`` and ``--tokens N ...``."""
    made = argparse.ArgumentParser(description=description.splitlines()[0])
    made.add_argument("--case", nargs="+", required=True, choices=CASES)
    made.add_argument("--tokens", nargs="+", type=int, required=True)
    return made


def emit(**line) -> None:
    """Print one line of JSON at once: what a program has measured survives its end."""
    print(json.dumps(line), flush=True)


def time_cells(
    contestant: str,
    names: Iterable[str],
    tokens: Iterable[int],
    make_layer: Callable[[Case], Callable[[int], dict[str, float]]],
) -> None:
    """Time every cell and emit it; what fails is emitted with its reason.

    Args:
      contestant: its name in the table.
      names, tokens: of the cells.
      make_layer: makes the weights of a case and returns a function from tokens to figures
        (``us``, ``low``, ``high`` and others).
    """
    for name in names:
        try:
            time_layer = make_layer(CASES[name])
        except Exception as error:  # a peer may fail in any way: the others go on
            emit(contestant=contestant, case=name, tokens=None, error=_short(error))
            continue
        for count in tokens:
            try:
                figures = time_layer(count)
            except Exception as error:
                figures = {"error": _short(error)}
            emit(contestant=contestant, case=name, tokens=count, **figures)
        del time_layer  # its weights, before those of the next case are made


def _short(error):
    return f"{type(error).__name__}: {error}"[:500]
