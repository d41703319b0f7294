"""Tables of the memory that models take: computed from their sizes, beside measured peaks."""

from collections.abc import Callable, Mapping

import model_tables
import records
from records import TITLES, Row

# The memory of cards in GB: RTX 4090, 5090, L40, A100 and H100, RTX PRO 6000, H200.
CARDS = (24, 32, 48, 80, 96, 141)
TOKENS = 8192  # the tokens of the text that a card has to hold
WORKING = 2e9  # bytes for the program, its temporary arrays, and the CUDA context
SHARE = 0.9  # of the memory of a card that a process can take
_COMPUTED = "\nComputed by `python benchmarks/model_sizes.py`, not measured.\n"


def sizes() -> list[Row]:
    """Return the computed sizes of each model, the smallest first."""
    rows = records.read("model_sizes")["rows"]
    return sorted(rows, key=lambda row: row["weights_bytes"]["nvfp4"])


def needed(row: Row, linear_format: str = "nvfp4") -> float:
    """Return the bytes that one text of `TOKENS` tokens needs."""
    text = TOKENS / row["cache_tokens"] * row["cache_bytes"] + row["states_bytes"]
    return row["weights_bytes"][linear_format] + text + WORKING


def holds(card: int, row: Row, linear_format: str = "nvfp4") -> bool:
    """Return whether a card of so many GB holds a model and its text."""
    return needed(row, linear_format) <= SHARE * card * 1e9


def smallest(row: Row, linear_format: str = "nvfp4") -> str:
    """Return the smallest card that holds a model, or how many of the largest have the memory."""
    for card in CARDS:
        if holds(card, row, linear_format):
            return f"{card} GB"
    return f"several of {CARDS[-1]} GB"


def models() -> str:
    """Return the table of weights and caches, with measured speeds."""
    steps = {
        row["model"]: row
        for row in model_tables.steps()
        if model_tables.is_plain(row) and (row["batch"], row["prompt"]) == (1, 128)
    }
    headings = (
        *("model", "smallest card", "weights, GB", "cache of 1,000 tokens, MB"),
        *("tokens/s, batch 1, on an H200", "parameters"),
    )
    lines = (
        (
            *(TITLES[row["model"]], smallest(row), _gigabytes(row["weights_bytes"]["nvfp4"])),
            f"{row['cache_bytes'] / row['cache_tokens'] * 1000 / 1e6:.1f}",
            f"{steps[row['model']]['tokens_per_s']:,.0f}" if row["model"] in steps else "",
            f"{row['parameters'] / 1e9:.1f} billion",
        )
        for row in sizes()
    )
    named = [steps[row["model"]] for row in sizes() if row["model"] in steps]
    measured = records.sources(named)[1:].replace("One", "Speeds: one", 1)
    return f"{records.table(headings, lines)}{_COMPUTED.rstrip()} {measured}"


def parts() -> str:
    """Return the table of the parts of the weights, and of the states of a text."""
    headings = (
        *("model", "experts, GB", "other weights, GB", "of these embedding and head, GB"),
        "state of a text, MB",
    )
    lines = (
        (
            TITLES[row["model"]],
            _gigabytes(row["experts_bytes"]) if row["experts_bytes"] else "-",
            _gigabytes(row["weights_bytes"]["nvfp4"] - row["experts_bytes"]),
            _gigabytes(row["vocabulary_bytes"]),
            f"{row['states_bytes'] / 1e6:.0f}" if row["states_bytes"] else "-",
        )
        for row in sizes()
    )
    return records.table(headings, lines) + _COMPUTED


def _gigabytes(count: float) -> str:
    return f"{count / 1e9:.1f}"


def unquantized() -> str:
    """Return the table of checkpoints that quantize the experts only."""
    rows = [row for row in sizes() if row["experts_bytes"]]
    headings = "model", "smallest card", "weights, GB", "all in NVFP4, GB", "all in bfloat16, GB"
    lines = (
        (
            *(TITLES[row["model"]], smallest(row, "bfloat16")),
            *(_gigabytes(row["weights_bytes"][name]) for name in ("bfloat16", "nvfp4")),
            _gigabytes(2 * row["parameters"]),
        )
        for row in rows
    )
    return records.table(headings, lines) + _COMPUTED


def room(row: Row, card: int) -> str:
    """Return how many tokens a card has room for beside the weights, or a dash."""
    if not holds(card, row):
        return "-"
    left = SHARE * card * 1e9 - WORKING - row["weights_bytes"]["nvfp4"] - row["states_bytes"]
    thousands = left / (row["cache_bytes"] / row["cache_tokens"]) / 1e3
    return f"{thousands:.0f}k" if thousands < 1000 else f"{thousands / 1000:.1f}M"


def cards() -> str:
    """Return the table of the tokens for which each card has room."""
    headings = "model", *(f"{card} GB" for card in CARDS)
    lines = ((TITLES[row["model"]], *(room(row, card) for card in CARDS)) for row in sizes())
    return records.table(headings, lines) + _COMPUTED


def check() -> str:
    """Return the table of prepared weights beside the peaks of loading on an H200."""
    row = next(row for row in sizes() if row["model"] == "qwen3-30b-a3b")
    whole = next(
        found
        for found in records.read_rows("decode_parallel.NVIDIA-H200")
        if (found["mesh"], found["batch"]) == ("1x1", 1)
    )
    other = records.read("load.NVIDIA-H200")
    cells = {
        f"{TITLES[row['model']]}, computed": (row["weights_bytes"]["nvfp4"], whole["peak_bytes"]),
        "the checkpoint of the table above, on an H200": (
            other["prepared_bytes"],
            other["device_peak_bytes"],
        ),
    }
    headings = "weights", "peak over weights", "measured peak, GB", "weights, GB"
    lines = (
        (name, f"{peak / weights:.3f} x", f"{peak / 1e9:.2f}", f"{weights / 1e9:.2f}")
        for name, (weights, peak) in cells.items()
    )
    return records.table(headings, lines) + records.sources([whole, {"run": other}])


# The name of a table in a guide -> what writes it.
TABLES: Mapping[str, Callable[[], str]] = {
    "memory": models,
    "memory_parts": parts,
    "memory_experts_only": unquantized,
    "memory_cards": cards,
    "memory_check": check,
}
