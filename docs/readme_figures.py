"""The figures of README and of the pages that link to it: speed beside peers, from results."""

import datetime
import functools
from collections.abc import Callable, Iterable, Mapping

from benchmark_tables import Row, _newest, _read_rows

_OWN, _MARLIN, _LLAMA = "moe_w4a16_sm90", "marlin", "llama.cpp"
_MODEL = "qwen3-30b-a3b"
_DECODING = "decode.NVIDIA-H200.json", "decode_models.NVIDIA-H200.json", "decode_earlier.*.json"


def _layers() -> dict[tuple[str, int], dict[str, Row]]:
    """Return (layer, tokens) -> the rows of this package and of Marlin, of the newest run."""
    runs: dict[tuple[str, str, int], dict[str, Row]] = {}
    for row in _read_rows("moe_peers.NVIDIA-H200.json"):
        cell = row["run"]["commit"], row["case"], row["tokens"]
        runs.setdefault(cell, {})[row["contestant"]] = row
    both = {cell: rows for cell, rows in runs.items() if {_OWN, _MARLIN} <= rows.keys()}
    return {(case, tokens): rows for (_, case, tokens), rows in both.items()}


def _decoding() -> dict[tuple[str, int, int], Row]:
    """Return (model, rows, prompt) -> the newest row of decoding in NVFP4 beside llama.cpp."""
    keys = "model", "format", "fp8_cache", "batch", "prompt"
    rows = _newest(_read_rows(*_DECODING), keys)
    return {
        (row["model"], row["batch"], row["prompt"]): row
        for row in rows
        if row["format"] == "nvfp4" and not row.get("fp8_cache") and _LLAMA in row["times"]
    }


def _layer(contestant: str, tokens: int) -> str:
    """Return the time of one expert layer."""
    return f"{_layers()[_MODEL, tokens][contestant]['us']:,.0f} us"


def _decode(batch: int, prompt: int, peer: str | None = None) -> str:
    """Return the tokens per second of all rows together, of this package or of a peer."""
    row = _decoding()[_MODEL, batch, prompt]
    return f"{row['tokens_per_s'] / (row['times'][peer] if peer else 1):,.0f} tokens/s"


def _range(ratios: Iterable[float]) -> str:
    """Return the smallest and the largest of some ratios."""
    ratios = list(ratios)
    return f"{min(ratios):.1f} to {max(ratios):.1f} times"


def _over_marlin() -> str:
    """Return how many times as long Marlin took, over all layers and numbers of tokens."""
    return _range(rows[_MARLIN]["us"] / rows[_OWN]["us"] for rows in _layers().values())


def _over_llama() -> str:
    """Return how many times as many tokens per second, over all cells beside llama.cpp."""
    return _range(row["times"][_LLAMA] for row in _decoding().values())


def _when() -> str:
    """Return the day, or the first and the last day, of what the table of README shows."""
    cells = [rows[_OWN] for (case, _), rows in _layers().items() if case == _MODEL]
    cells += [row for (model, *_), row in _decoding().items() if model == _MODEL]
    days = sorted({datetime.date.fromisoformat(row["run"]["date"]) for row in cells})
    return " to ".join(f"{day.day} {day:%B %Y}" for day in dict.fromkeys((days[0], days[-1])))


# The name of a figure -> what writes it. `figures.FIGURES` has them too.
README_FIGURES: Mapping[str, Callable[[], str]] = {
    "layer_1": functools.partial(_layer, _OWN, 1),
    "layer_1_marlin": functools.partial(_layer, _MARLIN, 1),
    "layer_64": functools.partial(_layer, _OWN, 64),
    "layer_64_marlin": functools.partial(_layer, _MARLIN, 64),
    "layer_8192": functools.partial(_layer, _OWN, 8192),
    "layer_8192_marlin": functools.partial(_layer, _MARLIN, 8192),
    "decode_1": functools.partial(_decode, 1, 128),
    "decode_1_llama": functools.partial(_decode, 1, 128, _LLAMA),
    "decode_64": functools.partial(_decode, 64, 1024),
    "decode_64_llama": functools.partial(_decode, 64, 1024, _LLAMA),
    "over_marlin": _over_marlin,
    "over_llama": _over_llama,
    "measured": _when,
}
