"""Tables of the guides that come from ``benchmarks/results``, where the benchmarks write.

A table has one row for each cell that was measured, of the newest run that has the cell. Each row
says the commit of that run, and the first line under a table the devices, dates and versions.
"""

import functools
import json
import pathlib
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import howto_tables

RESULTS = pathlib.Path(__file__).parents[1] / "benchmarks" / "results"
# Names of models and of layers in the benchmarks -> their titles, in the order of the tables.
_TITLES = {
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
_FORMATS = {"nvfp4": "NVFP4", "fp8": "FP8", "bfloat16": "bfloat16"}

Row = dict[str, Any]


def _read_rows(*patterns: str) -> list[Row]:
    """Return the rows of all runs in the files of some patterns, the oldest run first.

    A row also has what its run says of itself, under ``run``.
    """
    runs = []
    for path in sorted(path for pattern in patterns for path in RESULTS.glob(pattern)):
        result = json.loads(path.read_text(encoding="utf-8"))
        runs += result.get("runs", [result])
    runs.sort(key=lambda run: run["date"])  # stable: the later one of a file is the newer one
    return [{**row, "run": run} for run in runs for row in run["rows"]]


def _newest(rows: Iterable[Row], keys: tuple[str, ...]) -> list[Row]:
    """Return the newest row of each cell, in the order of models and then of the other keys."""
    cells = {tuple(row.get(key, False) for key in keys): row for row in rows}
    order = [*_TITLES, *_FORMATS, "xla", "tokamax"]

    def place(cell):
        return [order.index(key) if isinstance(key, str) else key for key in cell]

    return [cells[cell] for cell in sorted(cells, key=place)]


def _table(headings: tuple[str, ...], lines: Iterable[Iterable[Any]]) -> str:
    """Return a table in Markdown. A first cell that repeats the one above it is left empty."""
    rows, above = [headings, ("---",) * len(headings)], None
    for first, *others in lines:
        rows.append(("" if first == above else first, *others))
        above = first
    return "".join(f"| {' | '.join(map(str, row))} |\n" for row in rows)


def _sources(rows: Iterable[Row], count: str = "One") -> str:
    """Return the line under a table: on what, when and with which versions it was measured.

    `count` is the number of devices in words.
    """
    rows = list(rows)
    devices = sorted({row["run"]["device"].replace("-", " ") for row in rows})
    dates = sorted({row["run"]["date"] for row in rows})
    versions = sorted({row["run"]["versions"]["jax"] for row in rows})
    when = dates[0] if len(dates) == 1 else f"{dates[0]} to {dates[-1]}"
    return f"\n{count} {', '.join(devices)}, {when}, jax {', '.join(versions)}.\n"


def _times(value: float | None) -> str:
    return "" if value is None else f"{value:.1f} x"


_LAYER_TOKENS = (1, 16, 64, 256, 1024, 8192)
_OWN = "moe_w4a16_sm90"


def _layers(show: Callable[[Row], str | None], *files: str) -> str:
    """Return a table of expert layers, with a column for each number of tokens.

    Args:
      show: takes contestant -> row of one cell of one run, and returns the text; None if the run
        does not have it. The newest run that does counts.
      files: names of the results, without the device.
    """
    cells: dict[tuple[Any, ...], Row] = {}
    for row in _read_rows(*(f"{file}.NVIDIA-H200.json" for file in files)):
        cell = cells.setdefault((row["run"]["commit"], row["case"], row["tokens"]), {})
        cell[row["contestant"]] = row
    texts, sources = {}, {}
    for (_, *cell), rows in cells.items():
        text = show(rows)
        if text is not None:
            texts[tuple(cell)], sources[tuple(cell)] = text, next(iter(rows.values()))
    cases = [case for case in _TITLES if any(case == name for name, _ in texts)]
    lines = (
        (_TITLES[case], *(texts.get((case, tokens), "") for tokens in _LAYER_TOKENS))
        for case in cases
    )
    return _table(("tokens", *map(str, _LAYER_TOKENS)), lines) + _sources(sources.values())


def _time(contestant: str) -> Callable[[Row], str | None]:
    """Return a function for `_layers`: the microseconds of a contestant."""
    return lambda rows: f"{rows[contestant]['us']:.0f}" if contestant in rows else None


def _ratio(one: str, other: str) -> Callable[[Row], str | None]:
    """Return a function for `_layers`: the time of one contestant over that of another."""

    def show(rows):
        if one not in rows or other not in rows:
            return None
        return f"{rows[one]['us'] / rows[other]['us']:.2f}"

    return show


_PEERS = "moe_peers", "moe_humming_earlier"


def decode() -> str:
    """Return the table of steps of decoding."""
    files = "decode.NVIDIA-H200.json", "decode_models.NVIDIA-H200.json", "decode_earlier.*.json"
    rows = _newest(_read_rows(*files), ("model", "format", "fp8_cache", "batch", "prompt"))
    headings = (
        *("model", "format", "rows", "prompt", "tokens/s", "us a step", "floor", "over the floor"),
        *("over llama.cpp", "over transformers", "commit"),
    )
    lines = (
        (
            _TITLES[row["model"]],
            _FORMATS[row["format"]] + (", cache in FP8" if row.get("fp8_cache") else ""),
            row["batch"],
            row["prompt"],
            f"{row['tokens_per_s']:,.0f}",
            f"{row['step_us']:.0f}",
            f"{row['floor_us']['sum']:.0f}",
            _times(row["over_floor"]),
            *(_times(row["times"].get(peer)) for peer in ("llama.cpp", "transformers")),
            row["run"]["commit"],
        )
        for row in rows
    )
    return _table(headings, lines) + _sources(rows)


_MESHES = {"1x1": "one GPU", "2x1": "2 along `expert`", "1x2": "2 along `tensor`"}


def decode_parallel() -> str:
    """Return the table of steps over several GPUs, as factors over one."""
    rows = _read_rows("decode_parallel.NVIDIA-H200.json")
    steps = {(row["mesh"], row["batch"]): row["step_us"] for row in rows}
    peaks = {row["mesh"]: f"{row['peak_bytes'] / 1e9:.1f} GB" for row in rows}
    lines: list[tuple[Any, ...]] = []
    for batch in sorted({row["batch"] for row in rows}):
        one, *others = (steps[mesh, batch] for mesh in _MESHES)
        lines.append((batch, f"{one:.0f} us", *(f"{one / other:.2f}" for other in others)))
    lines.append(("peak memory of a GPU while loading", *(peaks[mesh] for mesh in _MESHES)))
    return _table(("batch", *_MESHES.values()), lines) + _sources(rows, "One or two")


def drafts() -> str:
    """Return the table of steps with drafts; the shares of drafts that are kept are stated ones."""
    rows = [
        {**row, **step, "plain_us": row["step_us"]}
        for row in _read_rows("decode_drafts.NVIDIA-H200.json")
        for step in row["drafts"]
        if step["draft"] == "mtp" and step.get("draft_head") != "exact"
    ]
    rows = _newest(rows, ("model", "batch", "drafts"))
    headings = (
        *("model", "rows", "drafts", "ms a step", "without drafts", "tokens a step, stated"),
        *("tokens/s at that", "tokens/s without drafts", "commit"),
    )
    lines = (
        (
            _TITLES[row["model"]],
            row["batch"],
            row["drafts"],
            f"{row['step_us'] / 1e3:.2f}",
            f"{row['plain_us'] / 1e3:.2f}",
            f"{row['stated_tokens_a_step']:.2f}",
            f"{row['tokens_per_s_as_stated']:,.0f}",
            f"{row['tokens_per_s']:,.0f}",
            row["run"]["commit"],
        )
        for row in rows
    )
    return _table(headings, lines) + _sources(rows)


def prefill() -> str:
    """Return the table of prompts."""
    rows = _newest(_read_rows("prefill*.NVIDIA-H200.json"), ("model", "format", "batch", "tokens"))
    headings = "model", "tokens", "ms", "tokens/s", "over the floor", "memory, GB", "commit"
    lines = (
        (
            _TITLES[row["model"]],
            row["tokens"],
            f"{row['ms']:.0f}" if row["ms"] >= 100 else f"{row['ms']:.1f}",
            f"{row['tokens_per_s']:,.0f}",
            _times(row["over_floor"]),
            "-" if row["memory_gb"] is None else f"{row['memory_gb']:.2f}",
            row["run"]["commit"],
        )
        for row in rows
    )
    return _table(headings, lines) + _sources(rows)


def backward() -> str:
    """Return the table of forward and backward passes, beside tokamax."""
    rows = _newest(_read_rows("backward.NVIDIA-H200.json"), ("case", "tokens", "contestant"))
    rows = [row for row in rows if "error" not in row]
    peers = {(row["case"], row["tokens"]): row for row in rows if row["contestant"] == "tokamax"}
    own = [row for row in rows if row["contestant"] == "nvfp4"]
    headings = (
        *("layer", "tokens", "forward", "both", "both over forward", "memory, MB"),
        *("both with tokamax", "memory of it, MB", "commits"),
    )

    def line(row):
        peer = peers.get((row["case"], row["tokens"]))
        both, forward = row["both"], row["forward"]
        commits = [row["run"]["commit"], *([peer["run"]["commit"]] if peer else [])]
        return (
            _TITLES[row["case"]],
            row["tokens"],
            f"{forward['us']:.0f}",
            f"{both['us']:.0f}",
            f"{both['us'] / forward['us']:.1f}",
            f"{both['temp_bytes'] / 1e6:.0f}",
            f"{peer['both']['us']:.0f}" if peer else "",
            f"{peer['both']['temp_bytes'] / 1e6:.0f}" if peer else "",
            ", ".join(dict.fromkeys(commits)),
        )

    return _table(headings, map(line, own)) + _sources(rows)


def ragged_products() -> str:
    """Return the table of `ragged_dot` in an expert layer."""
    rows = _newest(_read_rows("ragged_products.NVIDIA-H200.json"), ("case", "tokens"))
    headings = (
        *("layer", "tokens", "`weight.mT`, prepared", "a `qwix.QArray` in each call"),
        *("`jax.lax.ragged_dot`, bfloat16", "tokamax, bfloat16"),
    )
    names = "nvfp4", "nvfp4_qarray", "xla", "tokamax"
    lines = (
        (_TITLES[row["case"]], row["tokens"], *(f"{row[name]['us']:.0f}" for name in names))
        for row in rows
    )
    return _table(headings, lines) + _sources(rows)


# The name of a table in a guide -> what writes it.
TABLES: Mapping[str, Callable[[], str]] = {
    "layers": functools.partial(_layers, _time(_OWN), *_PEERS),
    "layers_beside_marlin": functools.partial(_layers, _ratio("marlin", _OWN), *_PEERS),
    "layers_beside_humming": functools.partial(_layers, _ratio("humming_gemms", _OWN), *_PEERS),
    "layers_w4a4": functools.partial(_layers, _ratio(f"{_OWN} w4a4", _OWN), "moe_w4a4"),
    "layers_w4a4_token_scale": functools.partial(
        _layers, _ratio(f"{_OWN} w4a4_token_scale", _OWN), "moe_w4a4"
    ),
    "decode": decode,
    "decode_parallel": decode_parallel,
    "drafts": drafts,
    "prefill": prefill,
    "backward": backward,
    "ragged_products": ragged_products,
    **howto_tables.TABLES,
}
