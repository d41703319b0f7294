"""Predict one expert layer on many GPUs: bytes, time, and the fastest form for so many tokens.

    python benchmarks/parallel_prediction.py [--measured benchmarks/results/moe.NVIDIA-H200.json]
        [--one-host benchmarks/results/parallel.NVIDIA-H200.json]

A PREDICTION. No run of this project on more than one host is behind any figure. What goes in is in
`INPUTS`, each with its source. One layer takes in t tokens in all (of every host together), h wide,
with k of e experts each, on n GPUs in hosts of 8. Nothing overlaps; routing is uniform, and
`imbalance` is what is left of skew after placement. With p = max(e, n) physical experts (copies
where GPUs outnumber experts):

    products   start + hypot(bytes / copy / memory, flops / matmul / tensor) * imbalance, the three
               as the same layer has them on one H200 (`--measured`): start is what one token takes
               over its floor, memory and tensor the best fractions of either floor; bytes of the
               experts that get a token, p / n (1 - (1 - k / p)^t) of them, flops of t k / n slots
    psum       forms a (experts shared out), c (each cut into n), a x c (cut over the 8 of a host,
               shared out over hosts); all tokens on all GPUs, sums float32:
               2 (n - 1) / n * 4 h t bytes / bus + latency
    ragged     form b (experts shared out, tokens too), true sizes: a token goes once to each GPU
               that has one of its experts, d = 1 - C(p - p / n, k) / C(p, k) of the others (in
               bfloat16 also under w4a4 with scales of each expert), and the sum comes back in
               bfloat16: max(bytes to own host / NVLink, to other hosts / InfiniBand) + latency,
               twice; bytes of a row are those of `parallel.dispatch.Wire`
    all_to_all the same with equal room for each GPU: for all tokens that one has, or for `room`
               times the mean d, in one round

The same equations for the GPUs of one host stand beside what `parallel.py` measured there
(`--one-host`); no input is taken from it.

Latency grows with log2 of the hosts for sums, which go up and down a tree, and with the number of
GPUs in other hosts for exchanges, which post one message for each. Form c is there where it cuts no
block of 16. Writes ``benchmarks/results/parallel_prediction.{json,md}``.
"""

import argparse
import dataclasses
import json
import math
import pathlib

from moe_cases import CASES, Case
from provenance import provenance, write_page

from jax_nvfp4_moe.parallel.dispatch import WireFormat
from jax_nvfp4_moe.scheme import Scheme

HERE = pathlib.Path(__file__).resolve().parent
HOST = 8
GPUS = (8, 64, 512)
TOKENS = (1, 16, 64, 256, 1024, 4096, 16384, 65536)
MEASURED_CASES = ("deepseek-v3", "qwen3-30b-a3b")
CONTESTANT = "moe_w4a16_sm90"
MOST_TOKENS = 2**20
FEW = 64  # tokens up to which a layer is bound by memory alone


@dataclasses.dataclass(frozen=True)
class Input:
    """One number that goes in.

    Attributes:
      value, unit: what.
      kind: "measured elsewhere", "measured here", "model of NCCL" or "chosen".
      source: where it is from.
    """

    value: float
    unit: str
    kind: str
    source: str


INPUTS = {
    "bus_nvlink": Input(
        370, "GB/s", "measured elsewhere",
        "all-reduce on 8 H100 (the same NVLink 4 as H200) without multicast, bus bandwidth: "
        "NVIDIA/nccl-tests issue 309, NVIDIA/nccl issue 1455 (365 to 370)",
    ),
    "bus_hosts": Input(
        320, "GB/s", "measured elsewhere",
        "all-reduce on 4 hosts of 8 H100 and 8 x 400 Gb/s, bus bandwidth: NVIDIA/nccl issue 1221; "
        "taken for any number of hosts",
    ),
    "nvlink": Input(
        320, "GB/s", "measured elsewhere",
        "all-to-all of experts on 8 H200, each GPU: README of uccl-project/uccl, ep (320 out, 319 "
        "back)",
    ),
    "infiniband": Input(
        45, "GB/s", "measured elsewhere",
        "all-to-all of experts on 64 GPUs, 400 Gb/s each: deepseek-ai/DeepEP, docs/legacy.md (43 "
        "to 51)",
    ),
    "infiniband_far": Input(
        39, "GB/s", "measured elsewhere",
        "the same on 128 and 256 GPUs (39 to 40); taken for more than 64",
    ),
    "sum_in_host": Input(
        15, "us", "model of NCCL",
        "tree, low-latency protocol: 6.8 + 2 * 7 * 0.6; NVIDIA/nccl, src/graph/tuning.cc",
    ),
    "sum_two_hosts": Input(
        46, "us", "measured elsewhere",
        "smallest all-reduce on 2 hosts of 8 H20, 400 Gb/s each: NVIDIA/nccl issue 1244",
    ),
    "sum_doubling": Input(
        10, "us", "model of NCCL", "each doubling of hosts: 2 * 5.0, as above"
    ),
    "exchange_in_host": Input(
        14, "us", "model of NCCL", "simple protocol, as above; taken for the first message"
    ),
    "exchange_message": Input(
        1, "us", "model of NCCL", "each message to another host (getNetOverhead), as above"
    ),
    "imbalance": Input(
        1.1, "", "measured here",
        "busiest GPU over the mean, Zipf routing of 256 experts, 320 copies on 64 GPUs: "
        "balance.json",
    ),
    "room": Input(2, "", "chosen", "of all_to_all, in place of room for all tokens"),
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Layer:
    """One layer on one H200, as measured.

    Attributes:
      case: sizes.
      copy_tb_per_s, matmul_tflop_per_s: what that GPU does at best.
      start: microseconds over the floor at one token.
      memory, tensor: best fractions of the floors of few tokens and of many.
    """

    case: Case
    copy_tb_per_s: float
    matmul_tflop_per_s: float
    start: float
    memory: float
    tensor: float


@dataclasses.dataclass(frozen=True)
class Cost:
    """What one layer costs the busiest GPU.

    Attributes:
      nvlink, infiniband: bytes that it sends over each.
      products, wire: microseconds.
    """

    nvlink: float
    infiniband: float
    products: float
    wire: float

    @property
    def us(self) -> float:
        return self.products + self.wire


def read_layer(case: str, path: pathlib.Path) -> Layer:
    """Return the measured layer of `case`."""
    result = json.loads(path.read_text(encoding="utf-8"))
    rows = {
        row["tokens"]: row
        for row in result["rows"]
        if row["case"] == case and row["contestant"] == CONTESTANT
    }
    one = rows[min(rows)]
    return Layer(
        CASES[case],
        **result["ceilings"],
        start=one["us"] - one["floor_us"],
        memory=max(row["of_floor"] for tokens, row in rows.items() if tokens <= FEW),
        tensor=rows[max(rows)]["of_floor"],
    )


def physical_experts(case: Case, gpus: int) -> int:
    """Return how many experts are held in all: copies fill up GPUs that outnumber experts."""
    return -(-max(case.experts, gpus) // gpus) * gpus


def products_us(layer: Layer, tokens: int, shares: int, cut: int) -> float:
    """Return the time of the products where `shares` GPUs share out experts, each cut in `cut`.

    Without `imbalance`.
    """
    case, physical = layer.case, physical_experts(layer.case, shares)
    active = physical / shares * -math.expm1(tokens * math.log1p(-case.top_k / physical))
    # Not one expert in many GPUs: the busiest has at least one of those that are active.
    active = max(active, 1.0)
    moved = case.packed_bytes(active) / cut + 2 * tokens * case.hidden * 2
    flops = case.flops(tokens) / (shares * cut)
    memory = moved / layer.copy_tb_per_s / layer.memory
    tensor = flops / layer.matmul_tflop_per_s / layer.tensor
    return layer.start + math.hypot(memory, tensor) * 1e-6


def _busiest_us(layer, tokens, shares, cut):
    even = products_us(layer, tokens, shares, cut)
    return layer.start + (even - layer.start) * INPUTS["imbalance"].value


def sum_latency(gpus: int) -> float:
    """Microseconds of an all-reduce of nothing."""
    if gpus <= HOST:
        return INPUTS["sum_in_host"].value
    doublings = math.log2(gpus / HOST) - 1
    return INPUTS["sum_two_hosts"].value + doublings * INPUTS["sum_doubling"].value


def psum(layer: Layer, tokens: int, gpus: int, cut: int) -> Cost:
    """Forms a (cut 1), c (cut `gpus`) and their product: one all-reduce of float32 tokens."""
    sent = 2 * (gpus - 1) / gpus * tokens * layer.case.hidden * 4
    far = gpus > HOST
    bus = INPUTS["bus_hosts" if far else "bus_nvlink"].value
    # A ring through all hosts leaves each host over its 8 ports: an eighth of the bytes each.
    return Cost(
        sent, sent / HOST if far else 0.0, products_us(layer, tokens, gpus // cut, cut),
        sent / bus * 1e-3 + sum_latency(gpus),
    )  # fmt: skip


def hit_chance(case: Case, gpus: int) -> float:
    """Return the chance that a GPU has one of the k experts of a token."""
    physical = physical_experts(case, gpus)
    own = physical // gpus
    missed = (max(physical - own - j, 0) / (physical - j) for j in range(case.top_k))
    return 1 - math.prod(missed)


def ragged(layer: Layer, tokens: int, gpus: int, wire: WireFormat) -> Cost:
    """Form b with true sizes: each token to the GPUs that have an expert of it, and back."""
    rows = -(-tokens // gpus) * hit_chance(layer.case, gpus) * INPUTS["imbalance"].value
    return _exchanged(layer, tokens, gpus, rows, wire)


def all_to_all(layer: Layer, tokens: int, gpus: int, room: float | None) -> Cost:
    """Form b with equal room for each GPU: `room` times the mean, or for all tokens where None."""
    own = -(-tokens // gpus)
    rows = own if room is None else math.ceil(own * hit_chance(layer.case, gpus) * room)
    return _exchanged(layer, tokens, gpus, min(rows, own), WireFormat())


def _exchanged(layer, tokens, gpus, rows, how):
    """Cost of so many rows to each other GPU, and back in bfloat16."""
    near, far = min(gpus, HOST) - 1, max(gpus - HOST, 0)
    port = INPUTS["infiniband" if gpus <= 64 else "infiniband_far"].value
    latency = INPUTS["exchange_in_host"].value + far * INPUTS["exchange_message"].value
    wire, sent = 0.0, [0.0, 0.0]
    case = layer.case
    out = how.row_bytes(case.hidden, case.top_k, "bfloat16")
    for row_bytes in (out, 2 * case.hidden):
        row = rows * row_bytes
        wire += max(near * row / INPUTS["nvlink"].value, far * row / port) * 1e-3 + latency
        sent = [sent[0] + near * row, sent[1] + far * row]
    return Cost(*sent, _busiest_us(layer, tokens, gpus, 1), wire)


def fits(case: Case, gpus: int, cut: int) -> bool:
    """Whether experts can be cut into `cut` parts of whole blocks, and `gpus` into groups of it."""
    return gpus % cut == 0 and case.intermediate % (16 * cut) == 0


FORMS = {
    "a psum": lambda layer, tokens, gpus: psum(layer, tokens, gpus, 1),
    "c psum, cut": lambda layer, tokens, gpus: psum(layer, tokens, gpus, gpus),
    "a x c psum, cut in hosts": lambda layer, tokens, gpus: psum(layer, tokens, gpus, HOST),
    "b ragged, bf16": lambda layer, tokens, gpus: ragged(layer, tokens, gpus, WireFormat()),
    "b ragged, NVFP4 by token": lambda layer, tokens, gpus: ragged(
        layer, tokens, gpus, WireFormat(scheme=Scheme.W4A4_TOKEN_SCALE)
    ),
    "b all_to_all, bf16": lambda layer, tokens, gpus: all_to_all(layer, tokens, gpus, None),
    "b all_to_all, bf16, less room": lambda layer, tokens, gpus: all_to_all(
        layer, tokens, gpus, INPUTS["room"].value
    ),
}
_CUTS = {"c psum, cut": lambda gpus: gpus, "a x c psum, cut in hosts": lambda gpus: HOST}


def forms_for(case: Case, gpus: int) -> list[str]:
    """Return the forms that these sizes allow; the product of a and c only over several hosts."""
    legal = [name for name in FORMS if fits(case, gpus, _CUTS.get(name, lambda _: 1)(gpus))]
    return [name for name in legal if gpus > HOST or name != "a x c psum, cut in hosts"]


def crossover(layer: Layer, gpus: int, first: str, second: str) -> int | None:
    """Return the fewest tokens from which on form `second` is the faster one; None where nowhere.

    Steps of the tokens, by powers of two to `MOST_TOKENS`, then by halving.
    """

    def faster(tokens):
        return FORMS[second](layer, tokens, gpus).us <= FORMS[first](layer, tokens, gpus).us

    tokens = MOST_TOKENS
    if not faster(tokens):
        return None
    while tokens > 1 and faster(tokens // 2):
        tokens //= 2
    low, high = tokens // 2, tokens
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if faster(middle) else (middle, high)
    return high


PAIRS = (
    ("a psum", "a x c psum, cut in hosts"),
    *(("a psum", form) for form in FORMS if form.startswith("b ")),
)


def predict(layer: Layer, gpus: int) -> dict:
    """Return all cells of one case on `gpus` GPUs, and the crossovers."""
    legal = forms_for(layer.case, gpus)
    cells = [
        {"form": form, "tokens": tokens, **dataclasses.asdict(cost), "us": cost.us}
        for form in legal
        for tokens in TOKENS
        for cost in [FORMS[form](layer, tokens, gpus)]
    ]
    crossings = [
        {"from": first, "to": second, "tokens": crossover(layer, gpus, first, second)}
        for first, second in PAIRS
        if first in legal and second in legal
    ]
    return {"case": layer.case.name, "gpus": gpus, "cells": cells, "crossovers": crossings}


# Form as measured by parallel.py -> as predicted here.
_ONE_HOST = {
    "psum": lambda layer, tokens, gpus: psum(layer, tokens, gpus, 1),
    "tensor": lambda layer, tokens, gpus: psum(layer, tokens, gpus, gpus),
    "all_to_all": lambda layer, tokens, gpus: all_to_all(layer, tokens, gpus, None),
    "ragged": lambda layer, tokens, gpus: ragged(layer, tokens, gpus, WireFormat()),
}


def compare(layers: list[Layer], rows: list[dict]) -> list[dict]:
    """Return prediction and measurement of each row of `parallel.py`, in microseconds.

    Args:
      layers: as `read_layer` returns them.
      rows: its results; those of other cases and schemes are left out.
    """
    by_name = {layer.case.name: layer for layer in layers}
    found = []
    for row in rows:
        form, scheme, _ = row["contestant"].split()
        if "us" not in row or row.get("case") not in by_name or scheme != Scheme.W4A16:
            continue
        cost = _ONE_HOST[form](by_name[row["case"]], row["tokens"], row["devices"])
        found.append(
            {name: row[name] for name in ("case", "devices", "tokens", "us", "exchange_us")}
            | {"form": form, "predicted_us": cost.us, "predicted_wire_us": cost.wire}
        )
    return found


def _comparison(measured) -> list[str]:
    rows = measured["rows"]
    tokens = sorted({row["tokens"] for row in rows})
    keys = dict.fromkeys((row["case"], row["devices"], row["form"]) for row in rows)
    cells = {(r["case"], r["devices"], r["form"], r["tokens"]): r for r in rows}

    def describe(key, n):
        row = cells.get((*key, n))
        if row is None:
            return "-"
        return (
            f"{row['predicted_us']:.0f} / {row['us']:.0f} "
            f"({row['predicted_wire_us']:.0f} / {row['exchange_us']:.0f})"
        )

    table = [(*key, *(describe(key, n) for n in tokens)) for key in keys]
    return [
        "## One host: prediction / measurement",
        f"Measured here on GPUs of one host ({measured['device']}, commit {measured['commit']}, "
        f"`{measured['file']}`), beside the same equations and inputs: microseconds of the layer, "
        "and in brackets of its exchange alone. Nothing was fitted to these. A measured exchange "
        f"has the kernels around it too. {measured['note']}".strip(),
        _table(("case", "GPUs", "form", *(f"{n} token" + "s" * (n > 1) for n in tokens)), table),
    ]


def _table(headings, rows):
    lines = ["| " + " | ".join(headings) + " |", "|" + "---|" * len(headings)]
    return "\n".join([*lines, *("| " + " | ".join(map(str, row)) + " |" for row in rows)])


def _where(tokens):
    """Say from how many tokens on a form is at least as fast as another."""
    if tokens is None:
        return f"slower, up to {MOST_TOKENS} tokens, than"
    return "never slower than" if tokens == 1 else f"from {tokens} tokens on faster than"


def _section(part) -> list[str]:
    cells = {(cell["form"], cell["tokens"]): cell for cell in part["cells"]}
    forms = list(dict.fromkeys(cell["form"] for cell in part["cells"]))
    fastest = {n: min(cells[form, n]["us"] for form in forms) for n in TOKENS}

    def describe(cell):
        mark = "**" if cell["us"] == fastest[cell["tokens"]] else ""
        sent = f"{cell['nvlink'] / 1e6:.2g} + {cell['infiniband'] / 1e6:.2g}"
        return f"{mark}{cell['us']:.0f}{mark} ({cell['wire']:.0f}; {sent})"

    rows = [(form, *(describe(cells[form, n]) for n in TOKENS)) for form in forms]
    lines = [
        f"## {part['case']}, {part['gpus']} GPUs (prediction)",
        _table(("form", *(f"{n} token" + "s" * (n > 1) for n in TOKENS)), rows),
    ]
    crossings = [f"{c['to']} is {_where(c['tokens'])} {c['from']}" for c in part["crossovers"]]
    return [*lines, "; ".join(crossings) + "."]


def make_page(result) -> str:
    """Return the page as Markdown."""
    inputs = [
        (name, f"{row['value']} {row['unit']}", row["kind"], row["source"])
        for name, row in result["inputs"].items()
    ]
    layers = [
        (row["case"], *(f"{row[name]:.3g}" for name in ("start", "memory", "tensor")))
        for row in result["layers"]
    ]
    parts = [
        "# Many GPUs: a prediction",
        "Nothing on this page was measured on more than one host; what was on one is in one table, "
        "beside its prediction. It is made by "
        "`python benchmarks/parallel_prediction.py`, whose first lines have the equations.",
        "## What goes in",
        _table(("input", "value", "kind", "source"), inputs),
        f"Products of a layer, measured here on one H200 (`{result['measured']}`):",
        _table(("case", "start, us", "memory", "tensor"), layers),
        "With these the equation gives 0.82 to 1.12 of every measured time of one GPU, 1 to 8192 "
        "tokens.",
        "In each cell: microseconds of the layer on the busiest GPU, and in brackets those on the "
        "wire, then megabytes that it sends over NVLink + InfiniBand. Tokens are those of all GPUs "
        "together; bold is the fastest form.",
    ]
    for part in result["parts"]:
        parts += _section(part)
    parts += _comparison(result["one_host"])
    return "\n\n".join(parts) + "\n"


def main():
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    default = HERE / "results" / "moe.NVIDIA-H200.json"
    parser.add_argument("--measured", type=pathlib.Path, default=default)
    default = HERE / "results" / "parallel.NVIDIA-H200.json"
    parser.add_argument("--one-host", type=pathlib.Path, default=default)
    parser.add_argument("--commit", help="where there is no git to ask")
    parser.add_argument("--output", type=pathlib.Path, default=HERE / "results")
    arguments = parser.parse_args()
    layers = [read_layer(case, arguments.measured) for case in MEASURED_CASES]
    one_host = json.loads(arguments.one_host.read_text(encoding="utf-8"))
    result = {
        "kind": "prediction",
        "commit": provenance(arguments.commit)["commit"],
        "measured": arguments.measured.name,
        "inputs": {name: dataclasses.asdict(row) for name, row in INPUTS.items()},
        "layers": [
            {"case": x.case.name, "start": x.start, "memory": x.memory, "tensor": x.tensor}
            for x in layers
        ],
        "one_host": {
            "file": arguments.one_host.name,
            "device": one_host["device"],
            "commit": one_host["commit"],
            "note": one_host.get("note", ""),
            "rows": compare(layers, one_host["rows"]),
        },
        "parts": [predict(layer, gpus) for layer in layers for gpus in GPUS],
    }
    write_page(arguments.output / "parallel_prediction", result, make_page(result))


if __name__ == "__main__":
    main()
