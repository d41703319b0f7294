"""Time the conversion of experts into the layout of a backend, on this device.

    python benchmarks/layout.py [--backend moe_w4a16_sm90] [--case NAME ...] [--output FILE]

One row is a compiled `prepare` of the experts of one layer. It has the median time of seven
conversions of fresh arrays, and the bytes of codes and scales divided by that time. It also has the
scratch memory that the compiled program needs, if the canonical arrays are kept and if they are
donated.

Prints a table with the seconds for 20 GB, and writes ``benchmarks/results/layout.DEVICE.json``.
"""

import argparse
import json
import pathlib
import time

import jax
import numpy as np
from layer import random_params
from moe_cases import CASES
from provenance import provenance
from rich.console import Console
from rich.table import Table

from jax_nvfp4_moe import Target, prepare
from jax_nvfp4_moe.ops.preparation import prepare_donated

HERE = pathlib.Path(__file__).resolve().parent
CHECKPOINT_BYTES = 20e9


def scratch_bytes(params, *, give, **arguments):
    """Return the bytes of temporary memory of the compiled conversion."""
    convert = jax.jit(
        lambda params: prepare(params, **arguments), donate_argnums=(0,) if give else ()
    )
    return convert.lower(params).compile().memory_analysis().temp_size_in_bytes


def measure(name, backend):
    """Time one case and return its row."""
    case, arguments = CASES[name], {"target": Target.current(), "backend": backend}
    seconds = []
    for trial in range(8):
        params = jax.block_until_ready(random_params(case, trial))
        size = params.nbytes
        begin = time.perf_counter()
        jax.block_until_ready(prepare_donated(params, **arguments))
        seconds.append(time.perf_counter() - begin)
    median = float(np.median(seconds[1:]))
    params = random_params(case, 0)
    return {
        "case": name,
        "bytes": size,
        "seconds": median,
        "gb_per_s": size / median / 1e9,
        "compile_seconds": seconds[0] - median,
        "scratch_kept": scratch_bytes(params, give=False, **arguments),
        "scratch_given": scratch_bytes(params, give=True, **arguments),
    }


def main():
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--backend", default="moe_w4a16_sm90")
    parser.add_argument("--case", nargs="+", choices=sorted(CASES), default=["qwen3-30b-a3b"])
    parser.add_argument("--commit", help="commit to record; default: what git reports")
    parser.add_argument("--output", type=pathlib.Path)
    arguments = parser.parse_args()
    rows = [measure(name, arguments.backend) for name in arguments.case]
    device = jax.devices()[0].device_kind
    table = Table("case", "GB", "ms", "GB/s", "20 GB, s", "scratch MB, kept", "given", title=device)
    for row in rows:
        table.add_row(
            row["case"],
            f"{row['bytes'] / 1e9:.2f}",
            f"{row['seconds'] * 1e3:.2f}",
            f"{row['gb_per_s']:.0f}",
            f"{CHECKPOINT_BYTES / 1e9 / row['gb_per_s']:.2f}",
            f"{row['scratch_kept'] / 1e6:.0f}",
            f"{row['scratch_given'] / 1e6:.0f}",
        )
    Console().print(table)
    output = arguments.output or HERE / "results" / f"layout.{device.replace(' ', '-')}.json"
    facts = {**provenance(arguments.commit), "device": device, "backend": arguments.backend}
    output.write_text(json.dumps({**facts, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
