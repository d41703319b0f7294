"""Shared code of the programs that `moe.py` starts: they take arguments and print JSON lines."""

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
    """Print one line of JSON and flush it, so that it survives if the program ends early."""
    print(json.dumps(line), flush=True)


def time_cells(
    contestant: str,
    names: Iterable[str],
    tokens: Iterable[int],
    make_layer: Callable[[Case], Callable[[int], dict[str, float]]],
) -> None:
    """Time every cell and emit its figures, or the reason of its failure.

    Args:
      contestant: name of the contestant in the table.
      names: names of the cases to time.
      tokens: numbers of tokens to time.
      make_layer: makes the weights of a case. Returns a function from a number of tokens to figures
        (``us``, ``low``, ``high`` and others).
    """
    for name in names:
        try:
            time_layer = make_layer(CASES[name])
        except Exception as error:  # a peer may fail in any way; the others must still run
            emit(contestant=contestant, case=name, tokens=None, error=_short(error))
            continue
        for count in tokens:
            try:
                figures = time_layer(count)
            except Exception as error:
                figures = {"error": _short(error)}
            emit(contestant=contestant, case=name, tokens=count, **figures)
        del time_layer  # frees its weights before the next case makes its own


def _short(error):
    return f"{type(error).__name__}: {error}"[:500]
