"""Tables of the how-to guides that come from ``benchmarks/results``."""

import json
import math
import pathlib
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from jax_nvfp4_moe.inference.evaluation import standard_error
from jax_nvfp4_moe.numerics.rounding import ALGORITHMS

RESULTS = pathlib.Path(__file__).parents[1] / "benchmarks" / "results"
_RANGE = 448  # the largest block scale; random weights were also measured with another one


def _read(name: str) -> dict[str, Any]:
    return json.loads((RESULTS / name).read_text(encoding="utf-8"))


def _table(headings: Iterable[str], lines: Iterable[Iterable[Any]]) -> str:
    headings = tuple(headings)
    rows = [headings, ("---",) * len(headings), *lines]
    return "".join(f"| {' | '.join(map(str, row))} |\n" for row in rows)


def _source(result: Mapping[str, Any]) -> str:
    """Return the line under a table: when and how a result was measured."""
    date = result.get("date") or "date not recorded"
    command = result["command"].replace("python backward.py", "python benchmarks/backward.py")
    versions = f"jax {result['versions']['jax']}, commit {result['commit']}"
    return f"\nA CPU, {date}, {versions}: `{command}`.\n"


def backward_cpu() -> str:
    """Return the table of forward and backward passes of an expert layer on a CPU."""
    result = _read("backward.cpu.json")

    def line(row):
        forward, both = row["forward"]["us"] / 1e3, row["both"]["us"] / 1e3
        megabytes = row["both"]["temp_bytes"] / 1e6
        cells = (f"{forward:.3g}", f"{both:.3g}", f"{both / forward:.2f}", f"{megabytes:.1f}")
        return row["tokens"], *cells

    headings = (
        *("tokens", "forward, ms", "forward and backward, ms"),
        *("both over forward", "temporary memory of both, MB"),
    )
    return _table(headings, map(line, result["rows"])) + _source(result)


def rounding() -> str:
    """Return the table of the algorithms that round weights."""
    result = _read("rounding.json")
    headings = (
        *("algorithm", "NRMSE, normal weights", "NRMSE, Student-t 4"),
        *("nats lost in W4A16", "nats lost in W4A4"),
    )
    lines = (_algorithm(result, name) for name in ALGORITHMS)
    return _table(headings, lines) + _source(result)


def _algorithm(result: Mapping[str, Any], name: str) -> list[str]:
    """Return the row of one algorithm: errors of random weights, and losses of the example.

    Losses are over the bfloat16 original. Each run of the result has another global scale.
    """
    cells = [f"`{name}`"]
    for kind in ("normal", "student-t 4"):
        key = (name, kind, _RANGE)
        errors = [
            row["nrmse"]
            for row in result["weights"]
            if (row["algorithm"], row["values"], row["largest"]) == key
        ]
        cells.append(f"{math.fsum(errors) / len(errors):.4f}")
    runs = [run for run in result["models"] if run["algorithm"] == name]
    for scheme in ("w4a16", "w4a4"):
        losses = [run[scheme] - result["original"] for run in runs]
        mean = math.fsum(losses) / len(losses)
        cells.append(f"{mean:.4f} ± {standard_error(losses):.4f}")
    return cells


def algorithms() -> str:
    """Return the table of what the algorithms that round weights do, and what they need."""
    lines = (
        (f"`{name}`", row.meaning, "a text" if row.needs_importance else "")
        for name, row in ALGORITHMS.items()
    )
    return _table(("algorithm", "what it does", "needs"), lines)


# The name of a table in a guide -> what writes it.
TABLES: Mapping[str, Callable[[], str]] = {
    "backward_cpu": backward_cpu,
    "algorithms": algorithms,
    "rounding": rounding,
}
