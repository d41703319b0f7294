"""Test the commands' pictures: they show the values of `--json`, and no label covers another."""

import itertools
import json
import sys

import numpy as np
import pytest
from matplotlib.figure import Figure
from support.files.given import CHECKPOINTS, EXAMPLE

from jax_nvfp4_moe.cli import app as cli
from jax_nvfp4_moe.cli import bench
from jax_nvfp4_moe.cli.pictures import Cell, Limits, draw_roofline
from jax_nvfp4_moe.figures import drawing

MIXED = CHECKPOINTS / "deepseek_v3-modelopt-mixed-w4a16-kv8"
SMALL = ("--experts", 4, "--hidden", 64, "--intermediate", 32, "--top-k", 2)
UNITS = {"bytes": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}


@pytest.fixture
def run(capsys, monkeypatch):
    """Return a function that runs the command line: status, stdout, stderr and figures."""
    figures, save = [], Figure.savefig

    def record(figure, *given, **options):
        figures.append(figure)
        save(figure, *given, **options)

    monkeypatch.setattr(Figure, "savefig", record)

    def call(*arguments):
        figures.clear()
        with pytest.raises(SystemExit) as stopped:
            cli.main([str(argument) for argument in arguments])
        captured = capsys.readouterr()
        return stopped.value.code or 0, captured.out, captured.err, list(figures)

    return call


def outlines(figure):
    """Return the bounding box of each label that is drawn, in pixels."""
    figure.draw_without_rendering()
    texts = [text for axes in figure.axes for text in axes.texts]
    texts += [label for axes in figure.axes for label in axes.get_yticklabels()]
    legends = [text for legend in figure.legends for text in legend.get_texts()]
    # Rotated labels are left out: the bounding box of rotated text is larger than the text.
    drawn = [text for text in (*texts, *legends) if text.get_text() and not text.get_rotation()]
    return {text.get_text(): text.get_window_extent() for text in drawn}


def assert_readable(figure):
    """Check that no label covers another, and that none is cut off at the left or right edge."""
    boxes = outlines(figure)
    covered = [
        (one, other)
        for (one, a), (other, b) in itertools.combinations(boxes.items(), 2)
        if a.overlaps(b)
    ]
    assert covered == []
    edge = figure.bbox
    outside = [words for words, b in boxes.items() if not (edge.x0 <= b.x0 and b.x1 <= edge.x1 + 1)]
    assert outside == []


@pytest.mark.parametrize("name", [EXAMPLE, MIXED, CHECKPOINTS / "qwen3_moe-ct-mixed"])
def test_bars_are_the_bytes_of_the_report(run, name, tmp_path):
    path = tmp_path / "bytes.png"
    status, out, err, (figure,) = run("inspect", name, "--json", "--plot", path)
    assert status == 0
    assert f"wrote {path}" in err
    assert path.read_bytes().startswith(b"\x89PNG")
    report = json.loads(out)

    (axes,) = figure.axes
    unit = UNITS[axes.get_xlabel().split()[0]]
    labels = [label.get_text().rpartition(" (")[0] or label.get_text() for label in
              axes.get_yticklabels()]  # fmt: skip
    drawn = {}
    for bars in axes.containers:
        kind = bars.get_label().partition(":")[0]
        for label, bar in zip(labels, bars, strict=True):
            if bar.get_width():
                drawn[label, kind] = bar.get_width() * unit
    expected = {}
    for module in report["modules"]:
        for label in (module["module"], "whole model"):
            key = label, module["format"]
            expected[key] = expected.get(key, 0) + module["bytes"]
    assert drawn == pytest.approx(expected)
    whole = sum(size for (label, _), size in drawn.items() if label == "whole model")
    assert whole == pytest.approx(report["loaded_bytes"])
    assert_readable(figure)


def test_a_report_counts_each_byte_once(run):
    """The example has five layers of 16 experts, each with 3 * 256 * 192 weights of 9/16 byte."""
    status, out, _, _ = run("inspect", EXAMPLE, "--json")
    assert status == 0
    report = json.loads(out)
    assert report["architectures"] == ["Qwen3MoeForCausalLM"]
    (experts,) = [m for m in report["modules"] if m["module"] == "layers.*.mlp.experts"]
    assert (experts["count"], experts["format"]) == (5, "NVFP4 w4a4")
    packed = 5 * 16 * 3 * 256 * 192 * 9 // 16
    assert packed < experts["bytes"] < 1.001 * packed  # the rest are global and input scales
    assert sum(m["bytes"] for m in report["modules"]) == report["loaded_bytes"]
    of_model = report["file_bytes"] - report["drafting"]["bytes"]  # drafts are not asked for
    assert of_model < report["loaded_bytes"] < 1.01 * of_model


def test_points_of_a_roofline_are_the_rows_of_the_report(run, tmp_path, monkeypatch):
    monkeypatch.setattr(bench, "_CPU_SIZES", (1 / 512, 64))
    path = tmp_path / "roofline.svg"
    status, out, err, (figure,) = run(
        "bench", *SMALL, "--tokens", "1,8", "--backend", "reference", "--json", "--plot", path
    )
    assert status == 0
    assert f"wrote {path}" in err
    assert path.read_bytes().startswith(b"<?xml")
    report = json.loads(out)
    assert [row["tokens"] for row in report["rows"]] == [1, 8]
    first = report["rows"][0]
    assert first["operations"] == 2 * 2 * 3 * 64 * 32  # two experts with three matrices each
    assert first["moved_bytes"] - first["weight_bytes"] == 2 * 64 * 2  # one token in and one out
    assert first["gflop_per_s"] == pytest.approx(first["operations"] / first["us"] * 1e-3)

    (axes,) = figure.axes
    roof, points = axes.get_lines()
    scale = {"GFLOP/s": 1, "TFLOP/s": 1e3}[axes.get_ylabel()]
    x, y = points.get_data()
    assert list(x) == [row["intensity"] for row in report["rows"]]
    assert list(y * scale) == pytest.approx([row["gflop_per_s"] for row in report["rows"]])
    limits = report["limits"]
    x, y = roof.get_data()
    assert y[0] * scale == pytest.approx(x[0] * limits["copy_gb_per_s"])
    assert list(y[1:] * scale) == pytest.approx([limits["matmul_gflop_per_s"]] * 2)


def test_points_of_errors_are_the_rows_of_the_report(run, tmp_path):
    options = ("--errors", "--tokens", 8, "--scheme", "w4a16", "--json")
    small = CHECKPOINTS / "qwen3moe-modelopt-w4a4"
    status, out, _, (figure,) = run("inspect", small, *options, "--plot", tmp_path / "e.png")
    assert status == 0
    errors = json.loads(out)["errors"]
    lines = {line.get_label(): line.get_ydata() for line in figure.axes[0].get_lines()}
    assert list(lines["w4a16: NRMSE"]) == [error["nrmse"] for error in errors]
    assert list(lines["w4a16: worst token"]) == [error["worst"] for error in errors]


H200 = Limits(4260.0, 747_000.0, "bfloat16")


def cell(tokens, us, active):
    """Return a measurement of one layer with the sizes of Qwen3-30B-A3B."""
    read = active * 3 * 2048 * 768 * 9 / 16
    operations = 6 * tokens * 8 * 2048 * 768
    moved = read + 4 * tokens * 2048
    return Cell(tokens, us, us, us, 0.1, read, moved, operations, "w4a16", "moe_w4a16_sm90")


def test_the_limit_is_the_longer_of_memory_and_products():
    few, many = cell(1, 17.0, 8), cell(8192, 1143.0, 128)
    assert H200.us(few) == pytest.approx(few.moved_bytes / 4260e3)
    assert H200.us(many) == pytest.approx(many.operations / 747e6)


# Fourteen sizes on a GPU, one size, three at nearly the same place, and one above the limits.
CASES = {
    "many": [(2**power, 17.0 * 1.4**power) for power in range(14)],
    "one": [(16, 77.0)],
    "close": [(1, 17.0), (2, 34.0), (3, 50.5)],
    "above": [(1, 1.0), (64, 110.0)],
}


@pytest.mark.parametrize("case", CASES)
def test_a_roofline_is_readable(case, tmp_path):
    cells = [cell(n, us, 128 * (1 - (15 / 16) ** n)) for n, us in CASES[case]]
    with drawing(tmp_path / "r.png", (10, 5.6)) as figure:
        draw_roofline(figure, cells, H200, "a layer")
    assert_readable(figure)
    (axes,) = figure.axes
    labels = {text.get_text(): text for text in axes.texts}
    shown = [label for one in cells if (label := labels.get(str(one.tokens)))]
    assert len(shown) >= (1 if case == "close" else len(cells))
    points = axes.transData.transform([(one.intensity, one.gflop_per_s / 1e3) for one in cells])
    for label in shown:
        box = label.get_window_extent()
        middle = np.array([box.x0 + box.x1, box.y0 + box.y1]) / 2
        nearest = cells[np.linalg.norm(points - middle, axis=1).argmin()]
        assert label.get_text() == str(nearest.tokens)


COMMANDS = (["inspect", EXAMPLE], ["inspect", EXAMPLE, "--errors"], ["bench", *SMALL])


@pytest.mark.parametrize("command", COMMANDS, ids=lambda c: " ".join(map(str, c[:1] + c[2:3])))
@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("{}/picture.xyz", "plot: expected a name ending in .eps"),
        ("{}/picture", "plot: expected a name ending in .eps"),
        ("{}/none/picture.png", "plot: expected a folder that exists; got "),
    ],
)
def test_a_picture_that_cannot_be_is_one_message(run, command, path, message, tmp_path):
    status, out, err, _ = run(*command, "--plot", path.format(tmp_path))
    assert (status, out) == (2, "")
    (line,) = err.splitlines()
    assert line.startswith(f"error: {message}")


def test_a_folder_in_place_of_a_picture_is_one_message(run, tmp_path):
    (tmp_path / "picture.png").mkdir()
    status, out, err, _ = run("inspect", EXAMPLE, "--plot", tmp_path / "picture.png")
    assert (status, out) == (2, "")
    (line,) = err.splitlines()
    assert line.startswith("error: ")
    assert "picture.png" in line


@pytest.mark.parametrize("command", COMMANDS, ids=lambda c: " ".join(map(str, c[:1] + c[2:3])))
def test_without_matplotlib_the_extra_is_named(run, command, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    status, out, err, _ = run(*command, "--plot", "picture.png")
    assert (status, out) == (2, "")
    (line,) = err.splitlines()
    assert "matplotlib is not installed; run pip install 'jax-nvfp4-moe[plot]'" in line


def test_pictures_are_light_whatever_the_users_settings_are(tmp_path):
    import matplotlib

    with matplotlib.rc_context({"figure.facecolor": "black", "text.color": "white"}):
        with drawing(tmp_path / "r.png", (10, 5.6)) as figure:
            draw_roofline(figure, [cell(1, 17.0, 8)], H200, "a layer")
        assert matplotlib.rcParams["text.color"] == "white"
    assert figure.get_facecolor() == (1, 1, 1, 1)
    assert figure.axes[0].texts[0].get_color() == "#24292f"
