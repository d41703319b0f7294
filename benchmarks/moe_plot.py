"""Draw the result of `moe.py`: times with floor and peers, and fractions of the floor.

    python benchmarks/moe_plot.py benchmarks/results/moe_peers.NVIDIA-H200.json

Writes the picture of the README, the speed of three layers beside vLLM's, as
``moe_peers.NVIDIA-H200.svg``. `moe.py` draws the PNG of all layers.
"""

import argparse
import json
import pathlib

import matplotlib
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


# Layers with many small experts, with few large ones, and with many large ones.
SUMMARY_CASES = {
    "qwen3-30b-a3b": "Qwen3-30B-A3B",
    "mixtral-8x7b": "Mixtral-8x7B",
    "deepseek-v3": "DeepSeek-V3",
}
OURS, PEER = "moe_w4a16_sm90", "marlin"
INK, BAR, LINE = "#24292f", "#0969da", "#bc4c00"


def draw_speed(result, path: pathlib.Path) -> None:
    """Write an SVG of bars: how many times as fast as vLLM's Marlin layer ours is.

    Each bar has its factor above it, and our own time below it. The background is white, so that
    pages with a dark theme can show the picture too.

    Args:
      result: the result that `moe.py` writes.
      path: path of the SVG.

    Raises:
      KeyError: the result lacks our layer or Marlin's.
    """
    missing = {OURS, PEER} - {row["contestant"] for row in result["rows"]}
    if missing:
        raise KeyError(f"no rows of {', '.join(sorted(missing))}: give moe.py its peers")
    # With this salt, the same figures give the same bytes.
    with matplotlib.rc_context({"svg.hashsalt": "moe", "text.color": INK, "font.size": 9}):
        figure = Figure(figsize=(9, 3.4), layout="constrained", facecolor="white")
        panels = figure.subplots(1, len(SUMMARY_CASES), sharey=True)
        for axes, (case, title) in zip(panels, SUMMARY_CASES.items(), strict=True):
            _draw_factors(axes, result["rows"], case)
            axes.set_title(title, fontsize=11)
        panels[0].set_ylabel("times as fast as Marlin")
        figure.supxlabel("tokens, and the time of our layer", fontsize=9)
        figure.savefig(path, metadata={"Date": None})


def _draw_factors(axes, rows, case):
    """Draw the bars of one layer."""
    tokens, own = _line(rows, case, OURS, "us")
    theirs = dict(zip(*_line(rows, case, PEER, "us"), strict=True))
    factors = [theirs[count] / us for count, us in zip(tokens, own, strict=True)]
    bars = axes.bar(range(len(tokens)), factors, color=BAR, width=0.7)
    axes.bar_label(bars, [f"{factor:.2f}" for factor in factors], padding=2, fontsize=8)
    axes.axhline(1, color=LINE, linewidth=1.2)
    labels = [f"{count}\n{_duration(us)}" for count, us in zip(tokens, own, strict=True)]
    axes.set_xticks(range(len(tokens)), labels, fontsize=7.5)
    axes.set_ylim(0, 3)
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(axis="x", length=0)


def _duration(us):
    return f"{us:.0f} us" if us < 1000 else f"{us / 1000:.1f} ms"


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("result", type=pathlib.Path, help="JSON file that moe.py wrote")
    path = parser.parse_args().result
    draw_speed(json.loads(path.read_text(encoding="utf-8")), path.with_suffix(".svg"))


if __name__ == "__main__":
    main()
