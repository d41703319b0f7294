"""Tables of experiments that no benchmark repeats, from ``docs/experiments.json``.

A record of that file is one experiment: a comparison that was made once, on one commit, to decide
something. Its fields:

- ``device``, ``date``, ``commit`` and ``command``: on what, when, at which state of the code and
  how it was measured. A field that was not written down is null, and the table says so.
- ``columns`` and ``rows``: the table, as text.
"""

import functools
import json
import pathlib
from collections.abc import Callable, Mapping
from typing import Any

FILE = pathlib.Path(__file__).with_name("experiments.json")


def read() -> dict[str, dict[str, Any]]:
    """Return the records by their names."""
    return json.loads(FILE.read_text(encoding="utf-8"))


def table(record: Mapping[str, Any]) -> str:
    """Return the table of one experiment, and a line that says where its figures come from."""
    columns = record["columns"]
    rows = [columns, ["---"] * len(columns), *record["rows"]]
    text = "".join(f"| {' | '.join(map(str, row))} |\n" for row in rows)
    place = ", ".join(record[key] or f"{key} not recorded" for key in ("device", "date"))
    commit = f"commit {record['commit']}" if record["commit"] else "commit not recorded"
    command = f": `{record['command']}`" if record["command"] else ""
    return f"{text}\n{place}, {commit}{command}.\n"


def tables() -> dict[str, Callable[[], str]]:
    """Return what writes the table of each experiment, by the name that a guide gives."""
    return {
        f"experiments.{name}": functools.partial(table, record) for name, record in read().items()
    }
