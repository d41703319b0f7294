"""The table of `docs/guides/accuracy.md` that summarizes what `measure` has measured."""

import statistics
from collections.abc import Callable, Mapping

import measure

# What is compared -> the measure in `docs/results.json`, and how the table shows it.
_COMPARED = {
    "float32: routed experts": ("experts", "{:.1e}"),
    "float32: whole blocks of experts": ("blocks", "{:.1e}"),
    "float32: logits": ("logits", "{:.1e}"),
    "float32: decoding with a cache against the whole prompt": ("decoding", "{:.1e}"),
    "float32: two to four CPU devices against one": ("mesh", "{:.1e}"),
    "bfloat16 on a CPU, over plain rounding": ("bfloat16", "{:.2f}"),
    "bfloat16 on an H200, over plain rounding": ("gpu", "{:.2f}"),
}


def has_experts(measured: Mapping[str, float]) -> bool:
    """Return whether a checkpoint has layers of experts.

    Without any, `measure` finds an error of 0 for them. A block of experts never has an error of
    exactly 0.
    """
    return measured.get("blocks") != 0


def summary() -> str:
    """Return the table of the median and the largest error of each measure."""
    results = list(measure.read_results().values())
    rows = [("what is compared", "median", "largest"), ("---",) * 3]
    for title, (key, form) in _COMPARED.items():
        needed = key in ("experts", "blocks")
        found = [r[key] for r in results if key in r and (has_experts(r) or not needed)]
        median, largest = statistics.median(found), max(found)
        cells = (form.format(value).replace("e-0", "e-") for value in (median, largest))
        rows.append((f"{title} ({len(found)} checkpoints)", *cells))
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


# The name of a table in a guide -> what writes it.
TABLES: Mapping[str, Callable[[], str]] = {"accuracy_summary": summary}
