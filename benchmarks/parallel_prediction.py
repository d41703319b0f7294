"""Predict one expert layer on many GPUs: bytes, time, and the fastest form for a number of tokens.

    python benchmarks/parallel_prediction.py [--measured benchmarks/results/moe.NVIDIA-H200.json]
        [--one-host benchmarks/results/parallel.NVIDIA-H200.json]

The result is a PREDICTION: no figure comes from a run of this project on more than one host.
`INPUTS` has all inputs, each with its source.

One layer runs on n GPUs in hosts of 8. It gets t tokens in all (of every host together), with
hidden size h and k of e experts for each token. Nothing overlaps. Routing is uniform, and
`imbalance` is the skew that remains after placement. There are p = max(e, n) physical experts, some
of them replicas if there are more GPUs than experts:

    products   start + hypot(bytes / copy / memory, flops / matmul / tensor) * imbalance. The three
               numbers start, memory and tensor are those of the same layer on one H200
               (`--measured`): start is the time of one token minus its floor, and memory and tensor
               are the best fractions of the two floors. Bytes are those of the experts that get a
               token, p / n (1 - (1 - k / p)^t) of them. Flops are those of t k / n slots.
    psum       forms a (experts sharded), c (each expert cut into n) and a x c (experts cut over the
               8 GPUs of a host, and sharded over hosts). All GPUs have all tokens, and sums are
               float32: 2 (n - 1) / n * 4 h t bytes / bus + latency.
    ragged     form b (experts and tokens sharded), with exact sizes. A token goes once to each GPU
               that has one of its experts, d = 1 - C(p - p / n, k) / C(p, k) of the other GPUs. It
               goes in bfloat16, also in W4A4 with scales of each expert. The sum comes back in
               bfloat16: max(bytes to own host / NVLink, bytes to other hosts / InfiniBand) +
               latency, twice. Bytes of a row are those of `parallel.dispatch.WireFormat`.
    all_to_all form b with equal room for each GPU: for all tokens of a GPU, or for `room` times
               the mean d, in one round.

For the GPUs of one host, the page compares these equations with what `parallel.py` measured
(`--one-host`). No input comes from those measurements.

The latency of sums grows with log2 of the number of hosts, because sums go up and down a tree. The
latency of exchanges grows with the number of GPUs in other hosts, because each gets a message. Form
c exists only if it cuts no block of 16. Writes
``benchmarks/results/parallel_prediction.{json,md}``.
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
FEW = 64  # up to this many tokens, memory alone bounds a layer


@dataclasses.dataclass(frozen=True)
class Input:
    """One input of the prediction.

    Attributes:
      value: the number.
      unit: its unit.
      kind: "measured elsewhere", "measured here", "model of NCCL" or "chosen".
      source: where the number comes from.
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
    """One layer as measured on one H200.

    Attributes:
      case: sizes of the layer.
      copy_tb_per_s: copy bandwidth of that GPU.
      matmul_tflop_per_s: rate of a large matmul on that GPU.
      start: microseconds above the floor at one token.
      memory: best fraction of the floor at few tokens.
      tensor: fraction of the floor at the most tokens.
    """

    case: Case
    copy_tb_per_s: float
    matmul_tflop_per_s: float
    start: float
    memory: float
    tensor: float


@dataclasses.dataclass(frozen=True)
class Cost:
    """The cost of one layer on the busiest GPU.

    Attributes:
      nvlink: bytes that it sends over NVLink.
      infiniband: bytes that it sends over InfiniBand.
      products: microseconds of the GEMMs.
      wire: microseconds of the exchange.
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
    """Return the number of physical experts; replicas fill up GPUs if these outnumber experts."""
    return -(-max(case.experts, gpus) // gpus) * gpus


def products_us(layer: Layer, tokens: int, shares: int, cut: int) -> float:
    """Return the time of the GEMMs, without `imbalance`.

    Experts are sharded over `shares` GPUs, and each expert is cut into `cut` parts.
    """
    case, physical = layer.case, physical_experts(layer.case, shares)
    active = physical / shares * -math.expm1(tokens * math.log1p(-case.top_k / physical))
    # With few tokens, many GPUs have no active expert, but the busiest one has at least one.
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
    """Return the microseconds of an all-reduce of no data."""
    if gpus <= HOST:
        return INPUTS["sum_in_host"].value
    doublings = math.log2(gpus / HOST) - 1
    return INPUTS["sum_two_hosts"].value + doublings * INPUTS["sum_doubling"].value


def psum(layer: Layer, tokens: int, gpus: int, cut: int) -> Cost:
    """Return the cost of forms a (cut 1), c (cut `gpus`) and a x c: one float32 all-reduce."""
    sent = 2 * (gpus - 1) / gpus * tokens * layer.case.hidden * 4
    far = gpus > HOST
    bus = INPUTS["bus_hosts" if far else "bus_nvlink"].value
    # A ring through all hosts uses the 8 ports of each host, with an eighth of the bytes each.
    return Cost(
        sent, sent / HOST if far else 0.0, products_us(layer, tokens, gpus // cut, cut),
        sent / bus * 1e-3 + sum_latency(gpus),
    )  # fmt: skip


def hit_chance(case: Case, gpus: int) -> float:
    """Return the probability that a GPU has one of the k experts of a token."""
    physical = physical_experts(case, gpus)
    own = physical // gpus
    missed = (max(physical - own - j, 0) / (physical - j) for j in range(case.top_k))
    return 1 - math.prod(missed)


def ragged(layer: Layer, tokens: int, gpus: int, wire: WireFormat) -> Cost:
    """Return the cost of form b with exact sizes: each token goes to the GPUs of its experts."""
    rows = -(-tokens // gpus) * hit_chance(layer.case, gpus) * INPUTS["imbalance"].value
    return _exchanged(layer, tokens, gpus, rows, wire)


def all_to_all(layer: Layer, tokens: int, gpus: int, room: float | None) -> Cost:
    """Return the cost of form b with equal room for each GPU.

    The room is `room` times the mean; None means room for all tokens.
    """
    own = -(-tokens // gpus)
    rows = own if room is None else math.ceil(own * hit_chance(layer.case, gpus) * room)
    return _exchanged(layer, tokens, gpus, min(rows, own), WireFormat())


def _exchanged(layer, tokens, gpus, rows, how):
    """Return the cost of sending `rows` rows to each other GPU, and back in bfloat16."""
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
    """Return whether `cut` parts of an expert have whole blocks, and `cut` divides `gpus`."""
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
    """Return the forms that these sizes allow. The form a x c needs several hosts."""
    legal = [name for name in FORMS if fits(case, gpus, _CUTS.get(name, lambda _: 1)(gpus))]
    return [name for name in legal if gpus > HOST or name != "a x c psum, cut in hosts"]


def crossover(layer: Layer, gpus: int, first: str, second: str) -> int | None:
    """Return the fewest tokens from which on form `second` is the faster one, or None.

    The search goes through powers of two up to `MOST_TOKENS`, and then by halving.
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


# The prediction of each form that parallel.py measures.
_ONE_HOST = {
    "psum": lambda layer, tokens, gpus: psum(layer, tokens, gpus, 1),
    "tensor": lambda layer, tokens, gpus: psum(layer, tokens, gpus, gpus),
    "all_to_all": lambda layer, tokens, gpus: all_to_all(layer, tokens, gpus, None),
    "ragged": lambda layer, tokens, gpus: ragged(layer, tokens, gpus, WireFormat()),
}


def compare(layers: list[Layer], rows: list[dict]) -> list[dict]:
    """Return prediction and measurement of each row of `parallel.py`, in microseconds.

    Args:
      layers: the layers that `read_layer` returns.
      rows: results of `parallel.py`. Rows of other cases and schemes are left out.
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
        f"This table compares the same equations and inputs with measurements on GPUs of one host "
        f"({measured['device']}, commit {measured['commit']}, `{measured['file']}`). Each cell has "
        "microseconds of the layer and, in brackets, of its exchange alone. Nothing was fitted to "
        "these measurements. A measured exchange includes the kernels around it. "
        f"{measured['note']}".strip(),
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
        "Nothing on this page was measured on more than one host. The last table compares the "
        "prediction with measurements on one host. `python benchmarks/parallel_prediction.py` "
        "computes this page; the docstring of that program has the equations.",
        "## Inputs",
        _table(("input", "value", "kind", "source"), inputs),
        f"GEMMs of a layer, as measured on one H200 (`{result['measured']}`):",
        _table(("case", "start, us", "memory", "tensor"), layers),
        "With these numbers, the equation gives 0.82 to 1.12 times each measured time of one GPU, "
        "from 1 to 8192 tokens.",
        "Each cell of the following tables has the microseconds of the layer on the busiest GPU. "
        "In brackets are the microseconds of the exchange, and the megabytes that this GPU sends "
        "over NVLink + InfiniBand. Tokens are those of all GPUs together. The fastest form is "
        "bold.",
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
    parser.add_argument("--commit", help="commit to record; default: what git reports")
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
