"""Draw the charts of README and guides: python docs/draw_charts.py writes docs/pictures/*.svg.

Their figures are those of the tables: `speeds` and `memory_tables`. A chart is narrow and has large
letters, so that a phone can show it. It has a white background for pages with a dark theme.
"""

from collections.abc import Iterator

import memory_tables
import speeds
from draw_pictures import BLUE, GRAY, HERE, INK, ORANGE, picture, text
from records import TITLES

WIDTH, LEFT, SPAN = 400, 16, 368
_BAR, _PEER = BLUE, "#9aa4ae"
_PAIR = 80  # height of a pair of bars


def _bar(x: float, y: float, width: float, height: float, fill: str) -> str:
    """Return a bar of a chart."""
    return (
        f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height}" rx="2" '
        f'fill="{fill}"/>'
    )


def _short(tokens_per_s: float) -> str:
    """Return a speed with three digits."""
    for size, name in ((1e6, " million"), (1e3, ",000")):
        if tokens_per_s >= 10 * size or (name == " million" and tokens_per_s >= size):
            digits = 1 if name == " million" else 0
            return f"{tokens_per_s / size:,.{digits}f}{name}"
    return f"{tokens_per_s:,.0f}"


def _pairs(y: float, comparisons: list[speeds.Comparison], peer: str) -> Iterator[str]:
    """Yield a pair of bars for each comparison. The longer bar of a pair fills the width."""
    for row in comparisons:
        yield text(LEFT, y + 16, f"{row.model}, {row.what}", 16, INK, "start", "bold")
        longest = max(row.own, row.other)
        names = (
            (row.own, _BAR, "white", "this package"),
            (row.other, _PEER, INK, peer),
        )
        for index, (speed, fill, ink, name) in enumerate(names):
            top, width = y + 23 + 25 * index, SPAN * speed / longest
            yield _bar(LEFT, top, width, 23, fill)
            words = f"{_short(speed)} tokens/s, {name}"
            inside = width > 8.2 * len(words)
            place = LEFT + 8 if inside else LEFT + width + 7
            yield text(f"{place:.1f}", top + 17, words, 15, ink if inside else INK, "start")
        y += _PAIR


def _notes(y: float, lines: tuple[str, ...]) -> Iterator[str]:
    """Yield the small lines below a chart."""
    for index, words in enumerate(lines):
        yield text(LEFT, y + 20 * index, words, 15, GRAY, "start")


def speed() -> str:
    """Draw the speeds of expert layers beside vLLM's Marlin, and of models beside llama.cpp."""
    layers = [speeds.layer(*cell) for cell in (*speeds.LAYERS, ("deepseek-v3", 8192))]
    steps = [speeds.step(*cell) for cell in speeds.STEPS[:3]]
    parts = [text(LEFT, 30, "Beside vLLM's Marlin", 19, BLUE, "start", "bold")]
    parts += _pairs(42, layers, "Marlin")
    y = 42 + _PAIR * len(layers)
    parts.append(text(LEFT, y + 24, "Beside llama.cpp", 19, BLUE, "start", "bold"))
    parts += _pairs(y + 36, steps, "llama.cpp")
    y += 36 + _PAIR * len(steps)
    dates = sorted({row.run["date"] for row in (*layers, *steps)})
    words = (
        f"One NVIDIA H200, {dates[0]} to {dates[-1]}.",
        "In each pair, the longer bar is the faster one.",
    )
    parts += _notes(y + 10, words)
    return picture(WIDTH, y + 42, "Speed beside other engines", parts)


def memory() -> str:
    """Draw what each model needs, with a line for each size of a card."""
    rows = [row for row in memory_tables.sizes() if memory_tables.holds(141, row)]
    cards = (24, 48, 80, 141)
    full = cards[-1] * 1.06

    def x(count):
        return LEFT + SPAN * count / 1e9 / full

    bottom = 76 + 78 * len(rows)
    parts = [text(LEFT, 30, "Memory in GB, and what cards have", 19, BLUE, "start", "bold")]
    for card in cards:
        place = f"{x(card * 1e9):.1f}"
        parts.append(
            f'<line x1="{place}" y1="62" x2="{place}" y2="{bottom}" '
            f'stroke="{ORANGE}" stroke-width="1.5" stroke-dasharray="5 4"/>'
        )
        parts.append(text(place, 56, card, 16, ORANGE, "middle", "bold"))
    for index, row in enumerate(rows):
        top = 68 + 78 * index
        weights, wide = row["weights_bytes"]["nvfp4"], 2 * row["parameters"]
        whole = memory_tables.needed(row)
        parts += [
            _bar(LEFT, top + 24, x(whole) - LEFT, 23, "#8fb8dd"),
            _bar(LEFT, top + 24, x(weights) - LEFT, 23, _BAR),
            _bar(LEFT, top + 49, x(wide) - LEFT, 15, _PEER),
            _label(LEFT, top + 17, TITLES[row["model"]], "bold"),
            _label(x(whole) + 6, top + 41, f"{weights / 1e9:.1f}", "bold"),
            _label(x(wide) + 6, top + 62, f"{wide / 1e9:.0f} in bfloat16"),
        ]
    size = f"{memory_tables.TOKENS:,} tokens and {memory_tables.WORKING / 1e9:.0f} GB of work"
    words = (
        "Dark: weights in NVFP4. Gray: weights in bfloat16.",
        f"Light: a text of {size}.",
        f"Computed. Dashed: cards of {', '.join(map(str, cards))} GB.",
    )
    parts += _notes(bottom + 26, words)
    return picture(WIDTH, bottom + 82, "Memory of models and of cards", parts)


def _label(x: float, y: float, words: str, weight: str = "normal") -> str:
    """Return a line of text with a white edge, which stays readable across a line."""
    label = text(f"{x:.1f}", y, words, 15, INK, "start", weight)
    edge = 'paint-order="stroke" stroke="white" stroke-width="4"'
    return label.replace("<text ", f"<text {edge} ")


CHARTS = (speed, memory)


def main():
    """Write all charts."""
    for draw in CHARTS:
        (HERE / f"{draw.__name__}.svg").write_text(draw(), encoding="utf-8")


if __name__ == "__main__":
    main()
