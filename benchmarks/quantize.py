"""Time the quantizer of activations on this device.

    python benchmarks/quantize.py [--tokens N ...] [--k N ...] [--dtype NAME] [--output FILE]

One row is `quantize_nvfp4` of one array ``[tokens, k]``. The global scale is given, or the
quantizer finds it; block scales have one of two layouts. Each row has two comparisons. The first is
`numerics.nvfp4.quantize`, which makes the same bytes by plain XLA, with linear scales. The second
is the floor: the time that a copy of as many bytes takes. These are the bytes of the values (twice
if the scale comes from them), of the codes and of the scales.

Prints a table and writes ``benchmarks/results/quantize.DEVICE.json``.
"""

import argparse
import functools
import itertools
import json
import pathlib
import sys

import jax
import jax.numpy as jnp
from provenance import provenance
from rich.console import Console
from rich.table import Table

import jax_nvfp4_moe as nvfp4
from jax_nvfp4_moe.cli.timing import measure_copy, time_program
from jax_nvfp4_moe.numerics import nvfp4 as formats

HERE = pathlib.Path(__file__).resolve().parent
# The global scale, and the layout of the block scales.
CASES = {
    "given": (1e-3, "linear"),
    "given, swizzled": (1e-3, "swizzle_128x4"),
    "found": (None, "linear"),
    "found, swizzled": (None, "swizzle_128x4"),
}
_BYTES_IN_FLIGHT, _MOST_CALLS = 1 << 28, 4  # one small array alone would stay in the L2 cache


def moved_bytes(tokens, k, dtype, *, given):
    """Return the bytes that must be read and written."""
    reads = 1 if given else 2  # the largest magnitude must be known before the first code
    return tokens * k * (reads * jnp.dtype(dtype).itemsize + 1 / 2 + 1 / 16)


def time_calls(quantize, arrays):
    """Return the figures of one call of `quantize`, timed on all `arrays` in one program."""

    @functools.partial(jax.jit, donate_argnums=0)
    def step(state):
        arrays, _ = state
        return arrays, [quantize(x) for x in arrays]

    arrays = [x.copy() for x in arrays]
    outputs = jax.tree.map(jnp.zeros_like, [quantize(x) for x in arrays])
    figures = time_program(step, (arrays, outputs))
    share = figures.pop("host_share")
    return {name: us / len(arrays) for name, us in figures.items()} | {"host_share": share}


def measure(case, tokens, k, dtype, copy_tb_per_s):
    """Time one case and plain XLA, and return the row."""
    given, layout = CASES[case]
    size = tokens * k * jnp.dtype(dtype).itemsize
    calls = max(1, min(_MOST_CALLS, _BYTES_IN_FLIGHT // size))
    keys = jax.random.split(jax.random.key(0), calls)
    arrays = [jax.random.normal(key, (tokens, k), dtype) for key in keys]
    scale = None if given is None else jnp.float32(given)

    def ours(x):
        tensor = nvfp4.ops.quantize_nvfp4(x, global_scale=scale, scale_layout=layout)
        return tensor.packed, tensor.block_scale, tensor.global_scale

    def plain(x):
        return formats.quantize(x, scale)

    row = {"case": case, "tokens": tokens, "k": k, "dtype": dtype, **time_calls(ours, arrays)}
    moved = moved_bytes(tokens, k, dtype, given=given is not None)
    xla = time_calls(plain, arrays)["us"]
    return row | {
        "gb_per_s": moved / row["us"] / 1e3,
        "of_floor": moved / copy_tb_per_s * 1e-6 / row["us"],
        "xla_us": xla,
        "times_xla": xla / row["us"],
    }


def main():
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--case", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--tokens", nargs="+", type=int, default=[256, 4096, 32768])
    parser.add_argument("--k", nargs="+", type=int, default=[2048, 7168])
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float16", "float32"])
    parser.add_argument("--copy-gibibytes", type=float, default=4.0)
    parser.add_argument("--commit", help="commit to record; default: what git reports")
    parser.add_argument("--output", type=pathlib.Path, help="default: results/quantize.DEVICE.json")
    arguments = parser.parse_args()
    device = jax.devices()[0].device_kind
    copy = measure_copy(arguments.copy_gibibytes)
    rows = []
    for case, k, tokens in itertools.product(arguments.case, arguments.k, arguments.tokens):
        rows.append(measure(case, tokens, k, arguments.dtype, copy))
        print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
    title = f"{device}, copy {1e3 * copy:.0f} GB/s"
    table = Table(
        "case", "tokens", "k", "us", "GB/s", "of copy", "XLA us", "times XLA", title=title
    )
    for row in rows:
        table.add_row(
            row["case"],
            str(row["tokens"]),
            str(row["k"]),
            f"{row['us']:.1f}",
            f"{row['gb_per_s']:.0f}",
            f"{row['of_floor']:.2f}",
            f"{row['xla_us']:.1f}",
            f"{row['times_xla']:.2f}",
        )
    Console().print(table)
    output = arguments.output or HERE / "results" / f"quantize.{device.replace(' ', '-')}.json"
    facts = {**provenance(arguments.commit), "device": device, "copy_tb_per_s": copy}
    output.write_text(json.dumps({**facts, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
