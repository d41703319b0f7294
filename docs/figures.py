"""Single figures in the sentences of README and guides, from ``benchmarks/results``.

A figure is text with its unit. It comes from the same rows as the tables of `benchmark_tables`, so
that a page cannot contradict a table.
"""

import datetime
import functools
from collections.abc import Callable, Iterable, Mapping

import layer_tables
import model_tables
import records
import speeds

_QWEN = "qwen3-30b-a3b"


def _range(ratios: Iterable[float]) -> str:
    """Return the smallest and the largest of some ratios."""
    found = list(ratios)
    return f"{min(found):.1f} to {max(found):.1f} times"


def _over_marlin() -> str:
    """Return how many times as long Marlin took, over all layers and numbers of tokens."""
    own, peer = layer_tables.OWN, layer_tables.MARLIN
    found = layer_tables.newest((own, peer))
    return _range(rows[peer]["us"] / rows[own]["us"] for rows in found.values())


def _steps_over(peer: str) -> str:
    """Return how many times as fast as a peer decoding is, over all cells of both."""
    return _range(row["times"][peer] for row in model_tables.steps(peer))


def _prompts_over(peer: str) -> str:
    """Return how many times as fast as a peer prompts are read, over all cells of both."""
    return _range(row["times"][peer] for row in model_tables.first_tokens())


def _own(compare: Callable[..., speeds.Comparison], *cell) -> str:
    """Return the time or the speed of this package."""
    return compare(*cell).own_text


def _other(compare: Callable[..., speeds.Comparison], *cell) -> str:
    """Return the time or the speed of the peer in the same run."""
    return compare(*cell).other_text


def _when() -> str:
    """Return the day, or the first and the last day, of the first table's cells of one model."""
    cells = [speeds.layer(*cell) for cell in speeds.LAYERS]
    cells += [speeds.step(*cell) for cell in speeds.STEPS if cell[0] == _QWEN]
    days = sorted({datetime.date.fromisoformat(cell.run["date"]) for cell in cells})
    return " to ".join(f"{day.day} {day:%B %Y}" for day in dict.fromkeys((days[0], days[-1])))


def _seconds(device: str) -> str:
    """Return how long it took to load a checkpoint from a cold disk."""
    return f"{records.read(f'load.{device}')['seconds']:.0f} seconds"


def _layer_figures() -> dict[str, Callable[[], str]]:
    """Return the figures of expert layers, by names such as "layer_64" and "layer_64_marlin"."""
    both = {"": _own, "_marlin": _other}
    return {
        f"layer_{tokens}{end}": functools.partial(show, speeds.layer, case, tokens)
        for case, tokens in speeds.LAYERS
        for end, show in both.items()
    }


# The name of a figure in a page -> what writes it.
FIGURES: Mapping[str, Callable[[], str]] = {
    **_layer_figures(),
    "decode_1": functools.partial(_own, speeds.step, _QWEN, 1, 128),
    "decode_1_llama": functools.partial(_other, speeds.step, _QWEN, 1, 128),
    "decode_64": functools.partial(_own, speeds.step, _QWEN, 64, 1024),
    "decode_64_llama": functools.partial(_other, speeds.step, _QWEN, 64, 1024),
    "over_marlin": _over_marlin,
    "over_llama": functools.partial(_steps_over, "llama.cpp"),
    "over_transformers": functools.partial(_steps_over, "transformers"),
    "prompts_over_llama": functools.partial(_prompts_over, "llama.cpp"),
    "load_h200": functools.partial(_seconds, "NVIDIA-H200"),
    "load_cpu": functools.partial(_seconds, "cpu"),
    "measured": _when,
}
