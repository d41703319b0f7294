"""Predict the time of the W4A4 expert layer on Blackwell GPUs, none of which has run it.

    python benchmarks/blackwell.py [--measured benchmarks/results/moe_w4a4.NVIDIA-H200.json]

The result is a PREDICTION. It uses three bounds of the two GEMMs of a layer:

    memory   the bytes of active experts, of quantized activations and of outputs, at the published
             bandwidth
    tensor   the multiplications, at the published dense FP4 rate, with rows rounded up to a
             multiple of 8
    issue    for 12.x: the instructions for each tensor instruction, counted in the machine code of
             the extension, at one instruction per cycle and scheduler

The longest of the three is the floor. The expected time lies between two estimates. The first adds
to the floor the time that kernels take to start and end. This is the time of one token on an H200,
with a scale for each token, minus its floor. (With calibrated scales, Hopper runs one kernel for
few slots, which 10.x and 12.x do not have.) The second divides the floor by the fraction of its own
floor that the layer reaches on an H200. That fraction is for the same tokens in W4A4, from
`--measured`.

Needs cuobjdump. Writes ``benchmarks/results/blackwell_prediction.{json,md}``.
"""

import argparse
import dataclasses
import importlib.util
import json
import pathlib
import re
import subprocess

from moe_cases import CASES, REAL_CASES, Case, active_experts
from provenance import provenance, write_page

HERE = pathlib.Path(__file__).resolve().parent
TOKENS = (1, 16, 64, 256, 1024, 8192)
FLOPS_OF_OMMA = 2 * 16 * 8 * 64
BYTES_PER_VALUE = 0.5625  # of NVFP4, with the block scales
MEASURED = "moe_w4a16_sm90 w4a4"
SEVERAL_KERNELS = "moe_w4a16_sm90 w4a4_token_scale"  # runs several kernels for one token too


@dataclasses.dataclass(frozen=True)
class Device:
    """Published figures of one GPU.

    Attributes:
      name: name of the GPU.
      capability: its compute capability.
      tb_per_s: memory bandwidth in TB/s.
      fp4_tflop_per_s: rate of dense NVFP4 in TFLOP/s. It is half of the figure with sparsity that
        data sheets give.
      multiprocessors: number of multiprocessors; used for 12.x only.
      ghz: boost clock in GHz; used for 12.x only.
      source: where the figures come from.
    """

    name: str
    capability: str
    tb_per_s: float
    fp4_tflop_per_s: float
    multiprocessors: int
    ghz: float
    source: str


DEVICES = (
    Device("B200", "10.0", 8.0, 9000, 148, 1.85, "NVIDIA DGX B200 data sheet, an eighth"),
    Device("B300", "10.3", 8.0, 13500, 148, 1.9, "NVIDIA DGX B300 data sheet, an eighth"),
    Device("RTX PRO 6000", "12.0", 1.792, 2000, 188, 2.6, "NVIDIA RTX PRO 6000 data sheet"),
    Device("RTX 5090", "12.0", 1.792, 1676, 170, 2.41, "NVIDIA RTX Blackwell white paper"),
    Device("DGX Spark", "12.1", 0.273, 500, 48, 2.55, "NVIDIA DGX Spark data sheet"),
)


def disassemble(extension: str, architecture: str) -> dict[str, list[str]]:
    """Return the instructions of each kernel, with their modifiers, in order."""
    command = ["cuobjdump", "--dump-sass", "--gpu-architecture", architecture, extension]
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    kernels, current = {}, []
    for line in text.splitlines():
        if found := re.match(r"\s*Function : (\S+)", line):
            current = kernels.setdefault(found[1], [])
        elif found := re.match(r"\s*/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+ )?([A-Z][A-Z0-9_.]*)", line):
            current.append(found[1])
    return kernels


def straight_runs(instructions):
    """Yield the instructions between branches and barriers."""
    run = []
    for name in instructions:
        if name.split(".")[0] in ("BRA", "BRX", "BAR", "EXIT", "WARPSYNC", "BSYNC"):
            yield run
            run = []
        else:
            run.append(name)
    yield run


def largest_run(instructions, stem):
    """Return the length of the run with most `stem` instructions, and their number."""
    counted = [
        (len(run), sum(name.startswith(stem) for name in run))
        for run in straight_runs(instructions)
    ]
    return max(counted, key=lambda pair: (pair[1], -pair[0]), default=(0, 0))


def count_omma(extension: str) -> list[dict]:
    """Return a row for each ExpertGemmSm120: the instructions that a warp issues in a full step."""
    rows = []
    for name, instructions in disassemble(extension, "sm_120f").items():
        found = re.search(r"ExpertGemmSm120I(\d+)(\w+?)NS0_6ConfigILi(\d+)E", name)
        if not found:
            continue
        products, omma = largest_run(instructions, "OMMA")
        copies, ldgsts = largest_run(instructions, "LDGSTS")
        rows.append(
            {
                "rows": int(found[3]),
                "dtype": "float16" if "half" in found[2] else "bfloat16",
                "omma": omma,
                "instructions_with_them": products,
                "copies": ldgsts,
                "instructions_with_copies": copies,
                "issued_per_omma": (products + copies) / omma,
            }
        )
    return sorted(rows, key=lambda row: (row["dtype"], row["rows"]))


def count_utcomma(extension: str) -> list[dict]:
    """Return a row for each kernel for sm_100f that uses tcgen05 MMAs."""
    rows = []
    for name, instructions in disassemble(extension, "sm_100f").items():
        count = sum(i.startswith("UTCOMMA") for i in instructions)
        if count:
            rows.append(
                {
                    "multiprocessors": 2 if "2x1SM" in name else 1,  # of a tile
                    "utcomma": count,
                    "instructions": len(instructions),
                }
            )
    return rows


def moved_bytes(case: Case, tokens: int) -> float:
    """Return the bytes that a layer moves: weights, x, both quantized operands, outputs, and y."""
    slots = tokens * case.top_k
    quantized = 2 * slots * (case.hidden + case.intermediate) * BYTES_PER_VALUE
    outputs = 2 * slots * case.hidden * 2 + 2 * tokens * case.hidden * 2
    return case.packed_bytes(active_experts(case, tokens)) + quantized + outputs


def padded_flops(case: Case, tokens: int, multiple: int) -> float:
    """Return the FLOPs, with the mean rows of each active expert rounded up to `multiple`."""
    active = active_experts(case, tokens)
    rows = -(-tokens * case.top_k / active // multiple) * multiple
    return 2 * active * rows * case.expert_weights


def issued_per_omma(counts, case: Case, tokens: int) -> float:
    """Return the instructions for each OMMA, in the kernel for this mean number of rows."""
    mean = tokens * case.top_k / active_experts(case, tokens)
    own = [row for row in counts if row["dtype"] == "bfloat16"]
    fitting = [row for row in own if row["rows"] >= mean] or own[-1:]
    return fitting[0]["issued_per_omma"]


def predict(device: Device, counts, case: Case, tokens: int, measured) -> dict:
    """Return the bounds of one cell, in microseconds."""
    flops = padded_flops(case, tokens, 8)
    bounds = {
        "memory": moved_bytes(case, tokens) / device.tb_per_s * 1e-6,
        "tensor": flops / device.fp4_tflop_per_s * 1e-6,
    }
    if device.capability.startswith("12"):
        issued = flops / FLOPS_OF_OMMA * issued_per_omma(counts, case, tokens)
        bounds["issue"] = issued / (device.multiprocessors * 4 * device.ghz * 1e3)
    floor = max(bounds.values())
    expected = ()
    if (case.name, tokens) in measured:
        one, own = measured[case.name, "starts"], measured[case.name, tokens]
        ends = floor + one["us"] - one["floor_us"], floor / own["of_floor"]
        expected = min(ends), max(ends)
    return {
        "device": device.name,
        "case": case.name,
        "tokens": tokens,
        **bounds,
        "floor": floor,
        "bound": max(bounds, key=bounds.__getitem__),
        "expected": expected,
    }


def read_measured(path: pathlib.Path) -> dict[tuple[str, int | str], dict]:
    """Return the measured rows of our W4A4 layer.

    The keys are (case, tokens), and (case, "starts") for one token with a scale for each token.
    """
    if not path.exists():
        return {}
    rows = json.loads(path.read_text(encoding="utf-8"))["rows"]
    found = {(row["case"], row["tokens"]): row for row in rows if row["contestant"] == MEASURED}
    return found | {
        (row["case"], "starts"): row
        for row in rows
        if row["contestant"] == SEVERAL_KERNELS and row["tokens"] == 1
    }


def table(headings, rows):
    """Return a Markdown table."""
    lines = ["| " + " | ".join(headings) + " |", "|" + "---|" * len(headings)]
    return "\n".join([*lines, *("| " + " | ".join(map(str, row)) + " |" for row in rows)])


def describe_cell(cell):
    expected = " ({:.0f} to {:.0f})".format(*cell["expected"]) if cell["expected"] else ""
    return f"{cell['floor']:.1f} {cell['bound'][0]}{expected}"


def make_page(result) -> str:
    """Return the page as Markdown."""
    cells = {(c["device"], c["case"], c["tokens"]): c for c in result["cells"]}
    parts = [
        "# Blackwell: a prediction",
        "Nothing on this page was measured on a Blackwell GPU. `python benchmarks/blackwell.py` "
        "computes it from published rates and from the machine code at commit "
        f"{result['commit']}. The docstring of that program explains the method.",
        "## Published rates",
        table(
            ("GPU", "TB/s", "dense FP4 TFLOP/s", "multiprocessors", "GHz", "source"),
            [
                (d.name, d.tb_per_s, d.fp4_tflop_per_s, d.multiprocessors, d.ghz, d.source)
                for d in DEVICES
            ],
        ),
        "## Machine code of `moe_w4a4_sm120`",
        "A tile of 64 x 64 weights has 2304 bytes. It takes 8192 FLOP for each row of "
        "activations, and such a row has 36 bytes. A tensor instruction (16 x 8 x 64) is 16384 "
        "FLOP and takes 16 cycles at the published rate. A scheduler issues one instruction per "
        "cycle. With fewer than 16 instructions for each tensor instruction, the tensor cores are "
        "therefore the bound. The table counts one full step of a warp.",
        table(
            (
                "rows of a tile",
                "dtype",
                "OMMA",
                "instructions",
                "of copies",
                "issued for each OMMA",
            ),
            [
                (
                    r["rows"],
                    r["dtype"],
                    r["omma"],
                    r["instructions_with_them"],
                    r["instructions_with_copies"],
                    f"{r['issued_per_omma']:.1f}",
                )
                for r in result["omma"]
            ],
        ),
    ]
    if result["utcomma"]:
        parts += [
            "## Machine code of `moe_w4a4_sm100`",
            "One thread issues UTCOMMA for a whole tile. The kernels are those of CUTLASS.",
            table(
                ("multiprocessors of a tile", "UTCOMMA", "instructions"),
                [
                    (r["multiprocessors"], r["utcomma"], r["instructions"])
                    for r in result["utcomma"]
                ],
            ),
        ]
    parts += [
        "## Microseconds of a layer",
        "Each cell has the floor and its bound (m memory, t tensor cores, i issue). The range in "
        "brackets is the expected time. One end is the floor plus the time that kernels take to "
        "start and end on an H200. The other end is the floor divided by the fraction of its "
        "floor that the layer reaches on an H200.",
    ]
    for case in REAL_CASES:
        rows = [
            (d.name, *(describe_cell(cells[d.name, case, tokens]) for tokens in TOKENS))
            for d in DEVICES
        ]
        parts += [f"### {case}", table(("GPU", *(f"{n} tokens" for n in TOKENS)), rows)]
    return "\n\n".join(parts) + "\n"


def main():
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    default = HERE / "results" / "moe_w4a4.NVIDIA-H200.json"
    parser.add_argument("--measured", type=pathlib.Path, default=default)
    parser.add_argument(
        "--extension", help="file of the CUDA extension; default: the installed one"
    )
    parser.add_argument("--commit", help="commit to record; default: what git reports")
    parser.add_argument("--output", type=pathlib.Path, default=HERE / "results")
    arguments = parser.parse_args()
    spec = None if arguments.extension else importlib.util.find_spec("jax_nvfp4_moe._nvfp4_cuda")
    if not arguments.extension and (spec is None or spec.origin is None):
        parser.error("--extension: the CUDA extension is not installed; give its file")
    extension = arguments.extension or spec.origin  # pyright: ignore[reportOptionalMemberAccess]
    counts, measured = count_omma(extension), read_measured(arguments.measured)
    facts = provenance(arguments.commit)
    result = {
        "kind": "prediction",
        "commit": facts["commit"],
        "measured": arguments.measured.name if measured else None,
        "devices": [dataclasses.asdict(device) for device in DEVICES],
        "omma": counts,
        "utcomma": count_utcomma(extension),
        "cells": [
            predict(device, counts, CASES[case], tokens, measured)
            for device in DEVICES
            for case in REAL_CASES
            for tokens in TOKENS
        ],
    }
    write_page(arguments.output / "blackwell_prediction", result, make_page(result))


if __name__ == "__main__":
    main()
