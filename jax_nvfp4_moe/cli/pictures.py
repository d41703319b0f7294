"""Pictures of the commands: sizes by module for `inspect`, and a roofline for `bench`."""

import dataclasses
import itertools
import math
from collections.abc import Sequence

import numpy as np

from jax_nvfp4_moe.cli.inspection import ModuleBytes, mebibytes

# A format has the same color in every picture. Formats that are not listed take the next color of
# `_OTHER_FORMATS`.
_FORMATS = {
    "NVFP4 w4a4": "#0969da",
    "NVFP4 w4a16": "#54aeff",
    "FP8 fp8": "#bc4c00",
    "FP8 fp8_token": "#fb8f44",
    "bfloat16": "#8c959f",
    "float16": "#6e7781",
    "float32": "#424a53",
}
_OTHER_FORMATS = ("#8250df", "#1a7f37", "#bf3989")
_ABOVE = "#f0f2f4"  # the area that no device reaches, and its labels
_SMALL, _LINE = 9, 12  # points: size of a label, and height of its line
_BESIDE = {  # a label beside its bar, with a background that hides the lines of the grid
    "textcoords": "offset points",
    "bbox": {"boxstyle": "square,pad=0.15", "facecolor": "white", "edgecolor": "none"},
}
_UNITS = ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"), (1, "bytes"))


def chart_size(modules: Sequence[ModuleBytes]) -> tuple[float, float]:
    """Return the width and the height in inches that `draw_bytes` needs."""
    return 10.0, 2.0 + 0.34 * (1 + len({one.module for one in modules}))


def draw_bytes(figure, modules: Sequence[ModuleBytes], name: str) -> None:
    """Draw one bar for the whole model and one for each kind of module, stacked by format.

    Args:
      figure: empty figure of about `chart_size`.
      modules: result of `measure_bytes`.
      name: name of the checkpoint, for the title.
    """
    total = sum(one.nbytes for one in modules)
    unit, spelled = next((size, unit) for size, unit in _UNITS if total >= size)
    bars = [("whole model", _by_format(modules))]
    names = dict.fromkeys(one.module for one in modules)
    kinds = [(kind, [one for one in modules if one.module == kind]) for kind in names]
    kinds.sort(key=lambda kind: -sum(one.nbytes for one in kind[1]))
    bars += [(_label(kind, own), _by_format(own)) for kind, own in kinds]

    axes = figure.subplots()
    formats = sorted(_by_format(modules).items(), key=lambda item: -item[1])
    spare = iter(_OTHER_FORMATS)
    left = [0.0] * len(bars)
    for kind, size in formats:
        widths = [sizes.get(kind, 0) / unit for _, sizes in bars]
        color = _FORMATS.get(kind) or next(spare, "black")
        label = f"{kind}: {mebibytes(size)}, {_percent(size, total)}"
        axes.barh(range(len(bars)), widths, 0.72, left, color=color, label=label)
        left = [begin + width for begin, width in zip(left, widths, strict=True)]
    for row, (_, sizes) in enumerate(bars):
        size = sum(sizes.values())
        said = mebibytes(size) if row == 0 else f"{mebibytes(size)}, {_percent(size, total)}"
        axes.annotate(said, (size / unit, row), (5, 0), **_BESIDE, va="center", fontsize=_SMALL)
    axes.set_yticks(range(len(bars)), [label for label, _ in bars])
    axes.set_ylim(len(bars) - 0.4, -0.6)
    axes.set_xlim(0, 1.08 * total / unit)  # room for the number beside the longest bar
    axes.set_xlabel(f"{spelled} as loaded (in parentheses: number of modules)")
    axes.tick_params(axis="y", length=0)
    axes.grid(axis="x", linewidth=0.6)
    axes.set_axisbelow(True)
    figure.legend(loc="outside lower center", ncols=3)  # outside of the axes, it hides no bar
    figure.suptitle(f"{name}: bytes by module and format")


def _by_format(modules) -> dict[str, int]:
    """Return the name of each format -> its size in bytes."""
    sizes: dict[str, int] = {}
    for one in modules:
        sizes[one.format] = sizes.get(one.format, 0) + one.nbytes
    return sizes


def _label(kind, modules) -> str:
    """Return the label of a bar: the kind of module, and the number of modules."""
    counts = [one.count for one in modules if one.count]
    return f"{kind} ({sum(counts)})" if counts else kind


def _percent(size, total) -> str:
    """Return a share of the total as text."""
    share = 100 * size / total
    return f"{share:.0f} %" if share >= 10 else f"{share:.1f} %"


@dataclasses.dataclass(frozen=True)
class Cell:
    """The measured time of an expert layer for one number of tokens.

    Attributes:
      tokens: number of tokens in a call.
      us: time of a call in microseconds, the median of several batches.
      low_us: time of a call in the fastest batch.
      high_us: time of a call in the slowest batch.
      host_share: time that the host needs to start the calls, divided by the time to run them.
      weight_bytes: bytes of expert weights that a call reads, on average.
      moved_bytes: `weight_bytes`, and the bytes of the tokens that a call reads and writes.
      operations: multiplications and additions in the products.
      scheme: scheme that ran.
      backend: backend that ran.
    """

    tokens: int
    us: float
    low_us: float
    high_us: float
    host_share: float
    weight_bytes: float
    moved_bytes: float
    operations: int
    scheme: str
    backend: str

    @property
    def intensity(self) -> float:
        """Operations per byte moved."""
        return self.operations / self.moved_bytes

    @property
    def gflop_per_s(self) -> float:
        """Billions of operations per second."""
        return self.operations / self.us * 1e-3


@dataclasses.dataclass(frozen=True)
class Limits:
    """The measured limits of a device.

    Attributes:
      copy_gb_per_s: bandwidth of a large copy, counting bytes read and written.
      matmul_gflop_per_s: rate of a large matrix product.
      matmul_dtype: name of the dtype of that product.
    """

    copy_gb_per_s: float
    matmul_gflop_per_s: float
    matmul_dtype: str

    def gflop_per_s(self, intensity: float) -> float:
        """Return the largest possible rate at an intensity, in billions of operations a second."""
        return min(intensity * self.copy_gb_per_s, self.matmul_gflop_per_s)

    def us(self, cell: Cell) -> float:
        """Return the shortest possible time of a call in microseconds."""
        return cell.operations / self.gflop_per_s(cell.intensity) * 1e-3


def draw_roofline(figure, cells: Sequence[Cell], limits: Limits, title: str) -> None:
    """Draw measured cells below the limits of the memory and of the matrix products.

    Args:
      figure: empty figure.
      cells: result of `bench.time_layer`.
      limits: limits of the same device.
      title: what was measured, and on which device.
    """
    axes = figure.subplots()
    scale, unit = (1e3, "TFLOP/s") if limits.matmul_gflop_per_s >= 1e3 else (1.0, "GFLOP/s")
    xs = [cell.intensity for cell in cells]
    ys = [cell.gflop_per_s / scale for cell in cells]
    bend, top = limits.matmul_gflop_per_s / limits.copy_gb_per_s, limits.matmul_gflop_per_s / scale
    low, high = min(min(xs) / 2, bend / 15), max(2 * max(xs), 15 * bend)  # room for labels
    corners = [low, bend, high]
    roof = [limits.gflop_per_s(x) / scale for x in corners]
    highest = 3 * max(*ys, top)
    axes.plot(corners, roof, color="#424a53", linewidth=1.5)
    axes.fill_between(corners, roof, highest, color=_ABOVE, linewidth=0)
    axes.plot(xs, ys, "o-", color=_FORMATS["NVFP4 w4a4"], linewidth=1, markersize=6)
    axes.set(xscale="log", yscale="log", xlim=(low, high), ylim=(min(*ys, roof[0]) / 2, highest))
    axes.set_xlabel("operations for each byte moved (weights read, tokens in and out)")
    axes.set_ylabel(unit)
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter("{x:g}")  # 100 for 10 to the power of 2
        axis.set_minor_formatter("")
    axes.grid(linewidth=0.6)
    axes.set_axisbelow(True)
    names = ", ".join(dict.fromkeys(f"{cell.backend}, {cell.scheme}" for cell in cells))
    figure.suptitle(f"{title}\n{names}; the numbers at the points are tokens", fontsize=11)
    axes.text(
        1.03, 1, _figures(cells, limits), transform=axes.transAxes, va="top", family="monospace",
        fontsize=_SMALL, linespacing=1.4,
    )  # fmt: skip

    figure.draw_without_rendering()  # lays out the axes, so that the points have their places
    points, bends = (
        axes.transData.transform(np.column_stack(line)) for line in ((xs, ys), (corners, roof))
    )
    above = bends + np.array([0, figure.dpi / 72 * _LINE])  # line through the labels of the roof
    memory = f"{limits.copy_gb_per_s:.3g} GB/s"
    if limits.copy_gb_per_s >= 1e3:
        memory = f"{limits.copy_gb_per_s / 1e3:.3g} TB/s"
    _label_roof(
        axes, bends,
        f"memory: {memory} (large copy)",
        f"products: {limits.matmul_gflop_per_s / scale:.3g} {unit} "
        f"(large {limits.matmul_dtype} product)",
    )  # fmt: skip
    lines = [pair for line in (bends, above, points) for pair in itertools.pairwise(line)]
    lines += [(point, point) for point in points]
    _label_points(axes, points, [str(cell.tokens) for cell in cells], lines)


def _figures(cells, limits) -> str:
    """Return the table beside a roofline: tokens, time, and the share of the limit."""
    rows = [("tokens", "time", "of limit")]
    rows += [(str(c.tokens), _duration(c.us), f"{100 * limits.us(c) / c.us:.0f} %") for c in cells]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True))
        for row in rows
    )


def _duration(us) -> str:
    """Return a time as text, in us, ms or s."""
    for scale, unit in ((1e6, "s"), (1e3, "ms")):
        if us >= scale:
            return f"{us / scale:.3g} {unit}"
    return f"{us:.3g} us"


def _label_roof(axes, bends, memory, products) -> None:
    """Write the meaning of both parts of the roof above them.

    Args:
      axes: axes of the roofline.
      bends: corners of the roof in pixels.
      memory: label of the rising part.
      products: label of the flat part.
    """
    begin, bend, end = bends
    angle = math.degrees(math.atan2(*(bend - begin)[::-1]))
    for words, at, offset, turn, side in (
        (memory, (begin + bend) / 2, (0, 5), angle, "center"),
        (products, end, (-5, 5), 0.0, "right"),
    ):
        axes.annotate(
            words, axes.transData.inverted().transform(at), offset, textcoords="offset points",
            rotation=turn, rotation_mode="anchor", ha=side, va="bottom", fontsize=_SMALL,
            bbox={**_BESIDE["bbox"], "facecolor": _ABOVE},
        )  # fmt: skip


# Offsets of a label from its point, in typographic points. The first free place is taken.
_PLACES = tuple(
    (distance * x, distance * y)
    for distance in (8, 12, 16)
    for x, y in ((1, 0), (0.7, -0.7), (-1, 0), (0, -1), (-0.7, 0.7), (-0.7, -0.7), (0, 1))
)


def _label_points(axes, points, words, lines) -> None:
    """Write labels beside points where they cover no line, no point and no other label.

    A label without a free place is left out. Labels are placed from both ends to the middle, so
    that the first and the last point get theirs.

    Args:
      axes: axes with their final layout and everything else drawn.
      points: places of the points in pixels, ``[n, 2]``.
      words: label of each point.
      lines: pairs of ends of the lines in the picture, in pixels.
    """
    taken = np.concatenate([np.linspace(a, b, 200) for a, b in lines])
    pixels = axes.figure.dpi / 72
    frame = axes.get_window_extent()
    for index in sorted(range(len(words)), key=lambda i: min(i, len(words) - 1 - i)):
        size = _text_size(axes, words[index])
        for place in _PLACES:
            low = points[index] + pixels * np.array(place) - size * (1 - np.sign(place)) / 2
            high = low + size
            if np.linalg.norm(points - (low + high) / 2, axis=1).argmin() != index:
                continue  # the label would be closer to another point
            if (low < frame.min).any() or (high > frame.max).any():
                continue
            if ((taken > low - 1) & (taken < high + 1)).all(axis=1).any():
                continue
            middle = axes.transData.inverted().transform((low + high) / 2)
            axes.text(*middle, words[index], ha="center", va="center", fontsize=_SMALL)
            grid = np.stack(np.meshgrid(*np.linspace(low, high, 30).T), axis=-1)
            taken = np.concatenate([taken, grid.reshape(-1, 2)])
            break


def _text_size(axes, words) -> np.ndarray:
    """Return the width and the height of a label in pixels."""
    text = axes.text(0, 0, words, fontsize=_SMALL)
    size = text.get_window_extent().size
    text.remove()
    return size
