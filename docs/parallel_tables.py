"""Tables of the guides to several GPUs and hosts, from ``benchmarks/results``.

The table of whole models, `decode_parallel`, is in `model_tables`.
"""

import functools
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import records

# The forms of `benchmarks/parallel.py` in the order of the tables. All but "tensor" shard the layer
# along `expert`.
_FORMS = "psum", "all_to_all", "ragged", "tensor"
_RUNS = "parallel.NVIDIA-H200", "parallel_w4a4.NVIDIA-H200"


def _table(rows: Iterable[Iterable[Any]]) -> str:
    """Return a table in Markdown; the first row has the headings."""
    headings, *others = [tuple(map(str, row)) for row in rows]
    rows = [headings, ("---",) * len(headings), *others]
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


def layer(case: str) -> str:
    """Return the table of one expert layer over several GPUs, as factors over one GPU.

    Args:
      case: name of the layer in the benchmarks.
    """
    found: dict[tuple[Any, ...], dict[int, str]] = {}
    for row in (row for name in _RUNS for row in records.read(name)["rows"] if row["case"] == case):
        form, scheme, _ = row["contestant"].split()
        cell = f"{row['one_device_us'] / row['us']:.2f}"
        found.setdefault((scheme.upper(), row["devices"], form), {})[row["tokens"]] = cell
    tokens = sorted({count for cells in found.values() for count in cells})
    lines = [("GPUs and form", *(records.counted(count, "token") for count in tokens))]
    for key in sorted(found, key=lambda key: (key[0] != "W4A16", key[1], _FORMS.index(key[2]))):
        scheme, devices, form = key
        label = f"{devices} GPUs, `{form}`" + (f", {scheme}" if scheme != "W4A16" else "")
        lines.append((label, *(found[key].get(count, "") for count in tokens)))
    return _table(lines)


def layer_with_source(case: str) -> str:
    """Return the table of `layer`, and on what and when the tables were measured."""
    places = []
    for run in map(records.read, _RUNS):
        version, command = run["versions"]["jax"], run["command"].partition(" --commit")[0]
        places.append(f"{run['date']}, jax {version}, commit {run['commit']}: `{command}`")
    return f"{layer(case)}\nBoth tables: NVIDIA H200, {'; '.join(places)}.\n"


def few_tokens() -> str:
    """Return the table of expert layers over two GPUs for few tokens, with connected memory or not.

    Cells are factors over one GPU.
    """
    rows = records.read_rows("parallel_few.NVIDIA-H200")
    found: dict[tuple[str, int, str], dict[int, str]] = {}
    for row in rows:
        form, _, peers = row["contestant"].split()[0].partition("+")
        key = records.TITLES[row["case"]], _FORMS.index(form), peers
        found.setdefault(key, {})[row["tokens"]] = f"{row['one_device_us'] / row['us']:.2f}"
    tokens = sorted({row["tokens"] for row in rows})
    headings = "layer of", "form", *(records.counted(count, "token") for count in tokens)
    lines = (
        (layer, f"`{_FORMS[form]}`, {'connected' if peers else 'NCCL'}", *map(cells.get, tokens))
        for (layer, form, peers), cells in sorted(found.items())
    )
    return records.table(headings, lines) + records.sources(rows, "One or two")


def balance() -> str:
    """Return the table of how evenly placement loads the devices."""
    result = records.read("balance")
    lines = [("routing and devices", "as stored", "moved", "moved, with replicas")]
    for row in result["rows"]:
        routing, *details = row["routing"].split(", ")
        if "s = 0.5" in details:  # nearly even; the page that the guide links to has them
            continue
        text = " ".join(details)
        number = int(text.partition(" experts")[0].split()[-1])
        means = (f"{row[name]['mean']:.2f}" for name in ("before", "placed", "copies"))
        replicas, devices = row["physical"] - number, row["devices"]
        where = f"{number} experts on {devices} devices, {replicas} replicas"
        lines.append((f"{routing}, {where}", *means))
    source = f"Commit {result['commit']}: `{result['command']}`."
    return f"{_table(lines)}\n{source}\n"


def load_processes() -> str:
    """Return the table of memory of processes that load one checkpoint together."""
    result = records.read("load_processes")
    found: dict[str, list[Mapping[str, Any]]] = {}
    for row in result["rows"]:
        found.setdefault(row["mesh"], []).append(row)
    lines = [("mesh", "held weights, MB", "peak memory, MB", "bound, MB")]
    for mesh, rows in found.items():
        share, peak, bound = (
            f"{max(row[name] for row in rows) / 1e6:.0f}"
            for name in ("share_bytes", "peak_bytes", "bound_bytes")
        )
        lines.append((mesh.replace("=", " ").replace(",", ", "), share, peak, bound))
    version = result["versions"]["jax"]
    source = f"Four processes on CPUs, {result['date']}, jax {version}, commit {result['commit']}"
    return f"{_table(lines)}\n{source}: `{result['command']}`.\n"


# The name of a table in a guide -> what writes it.
TABLES: Mapping[str, Callable[[], str]] = {
    "parallel_layer_deepseek": functools.partial(layer, "deepseek-v3"),
    "parallel_layer_qwen": functools.partial(layer_with_source, "qwen3-30b-a3b"),
    "parallel_few": few_tokens,
    "balance": balance,
    "load_processes": load_processes,
}
