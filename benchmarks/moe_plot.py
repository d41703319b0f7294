"""Draw the result of `moe.py`: times with floor and peers, and fractions of the floor.

`moe.py` calls it. ``docs/draw_charts.py`` draws the pictures of README and guides.
"""

import pathlib

from matplotlib.figure import Figure
from moe_cases import CASES, Ceilings


def draw(result, path: pathlib.Path) -> None:
    """Write a PNG with a column for each case: microseconds above, fraction of the floor below."""
    rows = result["rows"]
    cases = [name for name in CASES if any(row["case"] == name for row in rows)]
    contestants = list(dict.fromkeys(row["contestant"] for row in rows))
    figure = Figure(figsize=(max(6, 4.2 * len(cases)), 7.5), layout="constrained")
    axes = figure.subplots(2, len(cases), sharex=True, squeeze=False)
    for (times, fractions), case in zip(axes.T, cases, strict=True):
        for index, contestant in enumerate(contestants):
            style = {"color": f"C{index}", "marker": ".", "label": contestant}
            times.plot(*_line(rows, case, contestant, "us"), **style)
            fractions.plot(*_line(rows, case, contestant, "of_floor"), **style)
        times.plot(*_line(rows, case, contestants[0], "floor_us"), "k--", label="floor")
        times.set(title=case, yscale="log")
        times.set_xscale("log", base=2)
        fractions.set(xlabel="tokens", ylim=(0, 1))
    axes[0, 0].set_ylabel("us a layer")
    axes[1, 0].set_ylabel("floor / time")
    axes[0, 0].legend(fontsize="small")
    ceilings = Ceilings(**result["ceilings"])
    figure.suptitle(f"{result['device']}, commit {result['commit']}; floor from {ceilings}")
    figure.savefig(path, dpi=110)


def _line(rows, case, contestant, figure):
    """Return the tokens and the values of `figure` of one curve."""
    found = [row for row in rows if row["case"] == case and row["contestant"] == contestant]
    found.sort(key=lambda row: row["tokens"])
    return [row["tokens"] for row in found], [row[figure] for row in found]
