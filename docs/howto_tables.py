"""Tables of the how-to guides that come from ``benchmarks/results``."""

import math
from collections.abc import Callable, Mapping

import records
from records import Row

from jax_nvfp4_moe.inference.evaluation import standard_error
from jax_nvfp4_moe.numerics.rounding import ALGORITHMS

_RANGE = 448  # the largest block scale; random weights were also measured with another one
_AMD = "Two cores of an AMD EPYC (Zen 4) with AVX512-BF16"


def backward_cpu() -> str:
    """Return the table of forward and backward passes of an expert layer on a CPU."""
    rows = records.read_rows("backward.cpu")

    def line(row):
        forward, both = row["forward"]["us"] / 1e3, row["both"]["us"] / 1e3
        megabytes = row["both"]["temp_bytes"] / 1e6
        cells = (f"{forward:.3g}", f"{both:.3g}", f"{both / forward:.2f}", f"{megabytes:.1f}")
        return row["tokens"], *cells

    headings = (
        *("tokens", "forward, ms", "forward and backward, ms"),
        *("time relative to forward", "temporary memory of both passes, MB"),
    )
    return records.table(headings, map(line, rows)) + records.sources(rows, device=_AMD)


def rounding() -> str:
    """Return the table of the algorithms that round weights."""
    result = records.read("rounding")
    headings = (
        *("algorithm", "NRMSE, normal weights", "NRMSE, Student-t weights (4 degrees of freedom)"),
        *("increase in cross-entropy, W4A16", "increase in cross-entropy, W4A4"),
    )
    lines = (_algorithm(result, name) for name in ALGORITHMS)
    return records.table(headings, lines) + records.sources([{"run": result}], device="A CPU")


def _algorithm(result: Row, name: str) -> list[str]:
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
    return records.table(("algorithm", "what it does", "needs"), lines)


# The name of a table in a guide -> what writes it.
TABLES: Mapping[str, Callable[[], str]] = {
    "backward_cpu": backward_cpu,
    "algorithms": algorithms,
    "rounding": rounding,
}
