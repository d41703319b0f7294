"""Draw the result of `moe.py`: times with floor and peers, and fractions of the floor.

    python benchmarks/moe_plot.py benchmarks/results/moe.NVIDIA-H200.json

Writes the picture of the README, with the fractions of three layers, as
``moe.NVIDIA-H200.light.svg`` and ``.dark.svg``. `moe.py` draws the PNG of all layers.
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
SUMMARY_LABELS = {
    "moe_w4a16_sm90": "this project",
    "humming_gemms": "Humming, its two products alone",
    "marlin": "vLLM's Marlin layer",
}
PEERS = ("humming_gemms", "marlin")
# Tokens at which our own time is written beside the curve; its offset in points, and alignment.
TIMED = {
    1: ((-6, 0), "right", "center"),
    16: ((0, 6), "center", "bottom"),
    64: ((4, 3), "left", "bottom"),
    8192: ((7, 0), "left", "center"),
}
THEMES = {
    "light": {"text": "#24292f", "grid": "#d0d7de", "lines": ("#0969da", "#8250df", "#bc4c00")},
    "dark": {"text": "#e6edf3", "grid": "#3d444d", "lines": ("#4493f8", "#ab7df8", "#f0883e")},
}


def draw_summary(result, path: pathlib.Path, theme: str) -> None:
    """Write an SVG without a background: percent of the floor, by number of tokens.

    Args:
      result: the result that `moe.py` writes.
      path: path of the SVG.
      theme: "light" or "dark", the theme of the page that shows it.

    Raises:
      KeyError: the result lacks a contestant.
    """
    missing = SUMMARY_LABELS.keys() - {row["contestant"] for row in result["rows"]}
    if missing:
        raise KeyError(f"no rows of {', '.join(sorted(missing))}: give moe.py its peers")
    colors = THEMES[theme]
    style = {
        **dict.fromkeys(("text.color", "axes.labelcolor", "axes.titlecolor"), colors["text"]),
        **dict.fromkeys(("xtick.color", "ytick.color"), colors["text"]),
        "axes.edgecolor": colors["grid"],
        "grid.color": colors["grid"],
        "svg.hashsalt": "moe",  # the same figures then give the same bytes
    }
    with matplotlib.rc_context(style):
        figure = Figure(figsize=(10, 3.7), layout="constrained")
        panels = figure.subplots(1, len(SUMMARY_CASES), sharey=True)
        for axes, (case, title) in zip(panels, SUMMARY_CASES.items(), strict=True):
            _draw_summary_case(axes, result["rows"], case, colors["lines"])
            axes.set_title(title, fontsize=11)
        panels[0].set_ylabel("% of what the GPU allows")
        curves = panels[0].get_lines()[: len(SUMMARY_LABELS)]
        figure.legend(
            curves, SUMMARY_LABELS.values(), loc="outside upper center", ncols=3, frameon=False
        )
        figure.savefig(path, transparent=True, metadata={"Date": None})


def _draw_summary_case(axes, rows, case, colors):
    for contestant, color in zip(SUMMARY_LABELS, colors, strict=True):
        tokens, fractions = _line(rows, case, contestant, "of_floor")
        width = 1.4 if contestant in PEERS else 2.6
        axes.plot(tokens, [100 * f for f in fractions], color=color, linewidth=width)
    ours = next(name for name in SUMMARY_LABELS if name not in PEERS)
    places = dict(zip(*_line(rows, case, ours, "of_floor"), strict=True))
    times = dict(zip(*_line(rows, case, ours, "us"), strict=True))
    for tokens, (offset, ha, va) in TIMED.items():
        point = tokens, 100 * places[tokens]
        axes.plot(*point, "o", color=colors[0], markersize=5)
        style = {"textcoords": "offset points", "ha": ha, "va": va, "fontsize": 8}
        axes.annotate(_duration(times[tokens]), point, xytext=offset, **style)
    axes.set_xscale("log", base=2)
    axes.set_xticks([1, 16, 256, 8192], ["1", "16", "256", "8192"])
    axes.minorticks_off()
    axes.set(xlim=(2**-2.2, 2**15.6), ylim=(0, 100), xlabel="tokens")
    axes.grid(axis="y", linewidth=0.6)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(length=0)


def _duration(us):
    return f"{us:.0f} us" if us < 1000 else f"{us / 1000:.1f} ms"


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("result", type=pathlib.Path, help="JSON file that moe.py wrote")
    path = parser.parse_args().result
    result = json.loads(path.read_text(encoding="utf-8"))
    for theme in THEMES:
        draw_summary(result, path.with_suffix(f".{theme}.svg"), theme)


if __name__ == "__main__":
    main()
