"""Read the results of the benchmarks, ``benchmarks/results``, and write tables of them in Markdown.

A cell is one quantity on one device: a step of a model, or a layer with some tokens. Several runs
may have it. Tables, figures and pictures show the newest run of a cell, so that it has one value in
all of them. A ratio has both of its times from one run.
"""

import json
import pathlib
from collections.abc import Iterable, Sequence
from typing import Any

RESULTS = pathlib.Path(__file__).parents[1] / "benchmarks" / "results"
# Names of models and of layers in the benchmarks -> their titles, in the order of the tables.
TITLES = {
    "qwen3-30b-a3b": "Qwen3-30B-A3B",
    "qwen3.6-35b-a3b": "Qwen3.6-35B-A3B",
    "nemotron3-nano": "Nemotron-3-Nano",
    "kimi-linear-48b-a3b": "Kimi-Linear-48B-A3B",
    "mixtral-8x7b": "Mixtral-8x7B",
    "deepseek-v3": "DeepSeek-V3",
    "deepseek-v3-4-layers": "DeepSeek-V3, 4 layers",
    "llama-3.1-8b": "Llama-3.1-8B",
    "qwen3.6-27b": "Qwen3.6-27B",
}
FORMATS = {"nvfp4": "NVFP4", "fp8": "FP8", "bfloat16": "bfloat16"}

Row = dict[str, Any]
_MOST_COMMITS = 8  # that a line under a table names


def read(name: str) -> Row:
    """Return the contents of the result ``name.json``."""
    return json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))


def read_rows(*patterns: str) -> list[Row]:
    """Return the rows of all runs in the files of some patterns, the oldest run first.

    Of two runs of one day, that of the later pattern is the newer one, or the later one of a file.
    A row also has what its run says of itself, under ``run``.
    """
    runs = []
    for path in (path for name in patterns for path in sorted(RESULTS.glob(f"{name}.json"))):
        result = json.loads(path.read_text(encoding="utf-8"))
        runs += result.get("runs", [result])
    runs.sort(key=lambda run: run["date"])  # stable
    return [{**row, "run": run} for run in runs for row in run["rows"]]


def newest(rows: Iterable[Row], keys: tuple[str, ...]) -> list[Row]:
    """Return the newest row of each cell, in the order of models and then of the other keys."""
    cells = {tuple(row.get(key, False) for key in keys): row for row in rows}
    order = [*TITLES, *FORMATS, "xla", "tokamax"]

    def place(cell):
        return [order.index(key) if isinstance(key, str) else key for key in cell]

    return [cells[cell] for cell in sorted(cells, key=place)]


def table(
    headings: Sequence[str], lines: Iterable[Sequence[Any]], repeat_first: bool = False
) -> str:
    """Return a table in Markdown.

    Args:
      headings: the first row.
      lines: the other rows.
      repeat_first: whether a first cell is shown that repeats the one above it. By default it is
        left empty.
    """
    rows, above = [tuple(headings), ("---",) * len(headings)], None
    for first, *others in lines:
        rows.append(("" if first == above and not repeat_first else first, *others))
        above = first
    return "".join(f"| {' | '.join(map(str, row))} |\n" for row in rows)


def sources(rows: Iterable[Row], count: str = "One", device: str | None = None) -> str:
    """Return the line under a table: on what, when, at which commits and with which versions.

    Args:
      rows: the rows of the table.
      count: the number of devices in words.
      device: the device with its article, for runs that do not name it.
    """
    runs = [row["run"] for row in rows]
    named = sorted({run["device"].replace("-", " ") for run in runs}) if device is None else []
    dates = _range(run["date"] for run in runs if "date" in run) or "date not recorded"
    versions = ", ".join(sorted({run["versions"]["jax"] for run in runs}))
    commits = list(dict.fromkeys(run["commit"][:7] for run in runs))
    where = device or f"{count} {', '.join(named)}"
    listed = f"commit{'s' if len(commits) > 1 else ''} {', '.join(commits)}"
    if len(commits) > _MOST_COMMITS:
        listed = f"{len(commits)} commits"
    return f"\n{where}, {dates}, jax {versions}, {listed}.\n"


def _range(dates: Iterable[str]) -> str:
    found = sorted(set(dates))
    return " to ".join(dict.fromkeys((found[0], found[-1]))) if found else ""


def counted(count: int, noun: str) -> str:
    """Return a number with its noun, such as "1 token" or "16 tokens"."""
    return f"{count} {noun}" + "s" * (count > 1)


def times(value: float | None) -> str:
    """Return a ratio as text, or nothing for None."""
    return "" if value is None else f"{value:.1f} x"


def duration(us: float) -> str:
    """Return microseconds as text, in milliseconds from 10,000 on."""
    return f"{us:,.0f} us" if us < 9999.5 else f"{us / 1e3:.1f} ms"
