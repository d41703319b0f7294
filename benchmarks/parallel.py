"""Time an expert layer on several GPUs of one host: each form, and one GPU.

    python benchmarks/parallel.py [--devices 2 4] [--case deepseek-v3 qwen3-30b-a3b]
        [--tokens 1 16 256 4096] [--form psum tensor all_to_all ragged] [--scheme w4a16 w4a4]
        [--peers] [--smoke] [--output FILE]

In the form "psum", experts are sharded and tokens are replicated. In "tensor", each expert is cut
and tokens are replicated. In "all_to_all" and "ragged", experts and tokens are sharded. With
`--peers`, GPUs add up small arrays and share few tokens through each other's memory
(`parallel.connect_peers`).

A row is one call in bfloat16 under `jax.jit`, with random weights and uniform routing, as in
`moe.py`:

* `exchange_us` is the time of the same program without experts; it includes sorting rows.
* `wire_gb_per_s` is the bytes that a device sends (`sharded_layer.sent_bytes`) over that time.
* `efficiency` is the time on one device, from the same run, over n times the time on n devices.
* `difference` is the largest difference from the result of one device, over the largest value.

NVLink multicast stays off: the child processes run with NCCL_NVLS_ENABLE=0. With `--peers`, they
also run with CUDA_MODULE_LOADING=EAGER (`connect_peers` says why). `--smoke` runs
everything on two CPU devices, with small sizes and meaningless times; "ragged" cannot run there.

Prints a table for each case. Writes ``benchmarks/results/parallel.DEVICE.json`` after each row, so
that a run that is cut off keeps its rows.
"""

import argparse
import json
import os
import pathlib
import sys

from moe import run_contestant
from moe_cases import CASES, FORMS
from provenance import provenance
from rich.console import Console
from rich.table import Table

HERE = pathlib.Path(__file__).resolve().parent
# Few calls of so many tokens are timed together, so that the programs are small.
SMOKE = {"devices": [2], "case": ["tiny"], "tokens": [4097], "form": ["psum", "all_to_all"]}


def parse(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--devices", nargs="+", type=int, default=[2, 4])
    parser.add_argument(
        "--case", nargs="+", default=["deepseek-v3", "qwen3-30b-a3b"], choices=CASES
    )
    parser.add_argument("--tokens", nargs="+", type=int, default=[1, 16, 256, 4096])
    parser.add_argument("--form", nargs="+", default=FORMS, choices=FORMS)
    parser.add_argument("--scheme", nargs="+", default=["w4a16"])
    parser.add_argument("--peers", action="store_true", help="connect the memory of the GPUs")
    parser.add_argument("--smoke", action="store_true", help="two CPU devices, small sizes")
    parser.add_argument("--commit", help="commit to record; default: what git reports")
    parser.add_argument("--output", type=pathlib.Path)
    options = parser.parse_args(arguments)
    if options.smoke:
        vars(options).update(SMOKE)
    return options


def run(options):
    """Yield the name of the device and one row at a time; a child runs each number of devices."""
    os.environ["NCCL_NVLS_ENABLE"] = "0"  # the children inherit it
    if options.peers:
        os.environ["CUDA_MODULE_LOADING"] = "EAGER"
    device = "unknown"
    for count in options.devices:
        flags = ""
        if options.smoke:
            os.environ["JAX_PLATFORMS"] = "cpu"
            flags = f"--xla_force_host_platform_device_count={count}"
        arguments = ["--devices", count]
        for name in ("case", "tokens", "form", "scheme"):
            arguments += [f"--{name}", *getattr(options, name)]
        arguments += ["--peers"] * options.peers
        for line in run_contestant("sharded_layer", arguments, flags=flags):
            device = line.get("device", device)
            if "contestant" in line:
                yield device, {"devices": count, **line}


def save(options, device, rows):
    """Write the file of results."""
    results = {"device": device, **provenance(options.commit), "rows": rows}
    name = "smoke" if options.smoke else device.replace(" ", "-")
    output = options.output or HERE / "results" / f"parallel.{name}.json"
    output.write_text(json.dumps(results, indent=1) + "\n")


def print_tables(rows):
    for name in dict.fromkeys(row["case"] for row in rows if "us" in row):
        table = Table(title=name)
        for column in ("form", "tokens", "us", "one GPU", "efficiency", "exchange us", "GB/s"):
            table.add_column(column, justify="right")
        for row in (row for row in rows if row["case"] == name and "us" in row):
            figures = (row[key] for key in ("us", "one_device_us", "efficiency", "exchange_us"))
            cells = [f"{figure:.3g}" for figure in (*figures, row["wire_gb_per_s"])]
            table.add_row(row["contestant"], str(row["tokens"]), *cells)
        Console().print(table)


def main():
    options = parse()
    rows = []
    for device, row in run(options):
        rows.append(row)
        print(json.dumps(row), file=sys.stderr, flush=True)
        save(options, device, rows)
    print_tables(rows)
    for row in rows:
        if "error" in row:
            print(f"{row['contestant']} {row.get('case')}: {row['error']}", file=sys.stderr)
    sys.exit(any("error" in row for row in rows))


if __name__ == "__main__":
    main()
