"""Tables of one layer: an expert layer beside other libraries, its backward pass, `ragged_dot`."""

import functools
from collections.abc import Callable, Mapping

import records
from records import TITLES, Row

TOKENS = (1, 16, 64, 256, 1024, 8192)
OWN, MARLIN, HUMMING = "moe_w4a16_sm90", "marlin", "humming_gemms"
# The runs with the kernels of today. Other files have older kernels, beside other contestants.
_NEWEST = "moe_peers", "moe_humming_earlier", "moe_deepseek_few"


def newest(contestants: tuple[str, ...], *files: str) -> dict[tuple[str, int], Row]:
    """Return the rows of each cell, by contestant, of the newest run that has them all.

    Args:
      contestants: the contestants that a run must have.
      files: names of the results, without the device.

    Returns:
      Case and number of tokens -> contestant -> row.
    """
    runs: dict[tuple[str, str, int], Row] = {}
    for row in records.read_rows(*(f"{file}.NVIDIA-H200" for file in files or _NEWEST)):
        key = row["run"]["commit"], row["case"], row["tokens"]
        runs.setdefault(key, {})[row["contestant"]] = row
    return {
        (case, tokens): rows
        for (_, case, tokens), rows in runs.items()
        if all(name in rows for name in contestants)
    }


def _matrix(show: Callable[[Row], str], contestants: tuple[str, ...], *files: str) -> str:
    """Return a table with a row for each layer, and a column for each number of tokens."""
    found = newest(contestants, *files)
    found = {cell: rows for cell, rows in found.items() if cell[1] in TOKENS}
    lines = (
        (
            TITLES[case],
            *(show(found[case, n]) if (case, n) in found else "" for n in TOKENS),
        )
        for case in TITLES
        if any(case == name for name, _ in found)
    )
    named = (rows[contestants[0]] for rows in found.values())
    return records.table(("tokens", *map(str, TOKENS)), lines) + records.sources(named)


def _us(rows: Row) -> str:
    return f"{rows[OWN]['us']:,.0f}"


def _of_limit(rows: Row) -> str:
    return f"{rows[OWN]['of_floor']:.0%}".replace("%", " %")


def _ratio(one: str, other: str = OWN) -> Callable[[Row], str]:
    """Return what shows the time of one contestant over that of another."""
    return lambda rows: f"{rows[one]['us'] / rows[other]['us']:.2f}"


def _beside(peer: str, own: str = OWN, *files: str) -> Callable[[], str]:
    """Return what writes the table of a peer's times over ours, both of one run."""
    return functools.partial(_matrix, _ratio(peer, own), (own, peer), *files)


# What JAX itself offers -> its contestants, with the dtype of the weights.
_OF_JAX = {
    "`jax.lax.ragged_dot`, bfloat16 weights": "ragged_dot_bf16",
    "tokamax 0.0.17, bfloat16 weights": "tokamax_bf16",
    "tokamax 0.0.17, int4 weights": "tokamax_int4",
}


def beside_jax() -> str:
    """Return the table of an expert layer from the products that JAX and tokamax have."""
    names = tuple(_OF_JAX.values())
    found = newest((OWN, *names), "moe_jax_peers")
    tokens = [n for _, n in found]
    headings = ("tokens", *map(str, tokens))
    lines = (
        (title, *(_ratio(name)(rows) for rows in found.values())) for title, name in _OF_JAX.items()
    )
    return records.table(headings, lines) + records.sources(rows[OWN] for rows in found.values())


def backward() -> str:
    """Return the table of forward and backward passes, beside tokamax."""
    keys = "case", "tokens", "contestant"
    rows = records.newest(records.read_rows("backward.NVIDIA-H200"), keys)
    rows = [row for row in rows if "error" not in row]
    cells: dict[tuple[str, int], Row] = {}
    for row in rows:
        cells.setdefault((row["case"], row["tokens"]), {})[row["contestant"]] = row
    headings = (
        *("layer", "tokens", "times as fast as tokamax", "us, both passes"),
        *("over the forward pass", "memory, MB", "of tokamax's memory"),
    )

    def line(cell, own, peer):
        both, theirs = own["both"], peer["both"]
        return (
            *(TITLES[cell[0]], cell[1], f"{theirs['us'] / both['us']:.1f}", f"{both['us']:.0f}"),
            f"{both['us'] / own['forward']['us']:.1f}",
            f"{both['temp_bytes'] / 1e6:.0f}",
            f"{both['temp_bytes'] / theirs['temp_bytes']:.0%}".replace("%", " %"),
        )

    both = {cell: found for cell, found in cells.items() if {"nvfp4", "tokamax"} <= found.keys()}
    lines = (line(cell, found["nvfp4"], found["tokamax"]) for cell, found in both.items())
    named = [row for found in both.values() for row in found.values()]
    return records.table(headings, lines) + records.sources(named)


def ragged_products() -> str:
    """Return the table of `ragged_dot` in an expert layer."""
    rows = records.newest(records.read_rows("ragged_products.NVIDIA-H200"), ("case", "tokens"))
    headings = (
        *("layer", "tokens", "`weight.mT`, prepared", "a `qwix.QArray` in each call"),
        *("`jax.lax.ragged_dot`, bfloat16", "tokamax, bfloat16"),
    )
    names = "nvfp4", "nvfp4_qarray", "xla", "tokamax"
    lines = (
        (TITLES[row["case"]], row["tokens"], *(f"{row[name]['us']:.0f}" for name in names))
        for row in rows
    )
    return records.table(headings, lines) + records.sources(rows)


# The name of a table in a guide -> what writes it.
TABLES: Mapping[str, Callable[[], str]] = {
    "layers": functools.partial(_matrix, _us, (OWN,)),
    "layers_of_limit": functools.partial(_matrix, _of_limit, (OWN,)),
    "layers_beside_marlin": _beside(MARLIN),
    "layers_beside_humming": _beside(HUMMING),
    "layers_sm80_beside_marlin": _beside(MARLIN, "moe_w4a16_sm80", "moe"),
    "layers_beside_jax": beside_jax,
    "layers_w4a4": functools.partial(
        _matrix, _ratio(f"{OWN} w4a4"), (OWN, f"{OWN} w4a4"), "moe_w4a4"
    ),
    "layers_w4a4_token_scale": functools.partial(
        _matrix,
        _ratio(f"{OWN} w4a4_token_scale"),
        (OWN, f"{OWN} w4a4_token_scale"),
        "moe_w4a4",
    ),
    "backward": backward,
    "ragged_products": ragged_products,
}
