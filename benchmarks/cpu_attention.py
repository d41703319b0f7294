"""Time one layer of attention on a CPU, in bfloat16, by each record that can run it.

    python benchmarks/cpu_attention.py [--calls 1,512,512 8,1,156 ...] [--output FILE]

The heads are those of Qwen3-30B-A3B: 32 of queries and 4 of keys, with 128 channels. A call is
given as rows, queries and keys. Queries are the last of so many tokens, and the cache has room for
100 more. The time is the fastest of eight calls under ``jax.jit``. The rate counts the products of
the keys that queries see, beside the peak of bfloat16 products measured in the same run.

Prints a table and writes ``benchmarks/results/cpu_attention.json``.
"""

import argparse
import json
import os
import pathlib
import tempfile
import time

import jax
import jax.numpy as jnp
import numpy as np
from cpu_moe import measure_peaks
from provenance import provenance
from rich.console import Console
from rich.table import Table

from jax_nvfp4_moe.backends import _ffi
from jax_nvfp4_moe.ops import attention

HERE = pathlib.Path(__file__).resolve().parent
HEADS, KEY_HEADS, WIDTH, ROOM = 32, 4, 128, 100
CALLS = ("1,512,512", "1,2048,2048", "1,8192,8192", "1,1,156", "8,1,156", "1,1,3996")
RECORDS = ("attention_amx", "attention_avx512", "attention_cpu")


def time_call(backend, rows, queries, keys):
    """Return the seconds of the fastest of eight calls."""
    rng = np.random.default_rng(0)
    shapes = (rows, queries, HEADS, WIDTH), *[(rows, KEY_HEADS, keys + ROOM, WIDTH)] * 2
    operands = [
        jnp.asarray(rng.standard_normal(shape, np.float32), jnp.bfloat16) for shape in shapes
    ]
    positions = jnp.arange(keys - queries, keys, dtype=jnp.int32)[None]
    run = jax.jit(lambda q, k, v, at: attention(q, k, v, at, backend=backend))
    seconds = []
    for _ in range(9):
        start = time.perf_counter()
        run(*operands, positions).block_until_ready()
        seconds.append(time.perf_counter() - start)
    return min(seconds[1:])  # the first one compiles


def count_gflop(rows, queries, keys):
    seen = queries * (2 * keys - queries + 1) // 2
    return 4 * rows * HEADS * WIDTH * seen / 1e9


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--calls", nargs="*", default=CALLS, help="rows,queries,keys")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--commit", help="commit to record; default: what git reports")
    parser.add_argument(
        "--output", type=pathlib.Path, default=HERE / "results" / "cpu_attention.json"
    )
    arguments = parser.parse_args()
    lacking = dict(_ffi.missing(tuple(f"_nvfp4_cpu.{name}" for name in RECORDS[:-1])))
    records = [name for name in RECORDS if f"_nvfp4_cpu.{name}" not in lacking]
    with tempfile.TemporaryDirectory() as folder:
        peaks = measure_peaks(pathlib.Path(folder), arguments.threads)
    table = Table("rows", "queries", "keys", *(f"{name} ms" for name in records), "GFLOP/s")
    rows = []
    for call in arguments.calls:
        sizes = tuple(map(int, call.split(",")))
        seconds = {name: time_call(name, *sizes) for name in records}
        rate = count_gflop(*sizes) / seconds[records[0]]
        rows.append(
            {"sizes": sizes, "ms": {n: s * 1e3 for n, s in seconds.items()}, "gflops": rate}
        )
        table.add_row(
            *map(str, sizes), *(f"{s * 1e3:.2f}" for s in seconds.values()), f"{rate:.0f}"
        )
    console = Console(width=100)
    console.print(table)
    for name, why in lacking.items():
        console.print(f"{name}: {why}")
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    found = {**provenance(arguments.commit), "threads": arguments.threads, "peaks": peaks}
    arguments.output.write_text(
        json.dumps({**found, "rows": rows}, indent=1) + "\n", encoding="utf-8"
    )


if __name__ == "__main__":
    main()
