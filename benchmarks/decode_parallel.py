"""Time loading and decoding of a model of the sizes of Qwen3-30B-A3B on several GPUs of one host.

    python benchmarks/decode_parallel.py [--mesh 1x1 2x1 1x2 4x1 2x2 1x4] [--batch 1 8 64]
        [--folder DIR] [--layers 48 ...] [--output FILE]

A mesh such as 1x2+peers adds up small arrays through the memory of the GPUs
(`parallel.connect_peers`).

If `--folder` has no checkpoint, one with random weights is written there. Each mesh of
EXPERTSxTENSOR devices runs in its own process. The process loads the checkpoint over the mesh and
decodes as `decode.py` does. The time of a step is the time of all new tokens minus that of the
first, divided by the number of steps. `efficiency` is the time of a step on 1x1, divided by n times
the time on n devices. Peak memory is that of the device with the largest peak. The first load finds
files that were written just before, so that most of them are in memory.

NVLink multicast stays off: the processes run with NCCL_NVLS_ENABLE=0. Those of a mesh with peers
also run with CUDA_MODULE_LOADING=EAGER (`connect_peers` says why). Writes
``benchmarks/results/decode_parallel.DEVICE.json``.
"""

import argparse
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import time

import jax
import numpy as np
from decode import ROUNDS, Compilations
from flax import nnx
from provenance import provenance
from rich.console import Console
from rich.table import Table

import jax_nvfp4_moe as nvfp4
from jax_nvfp4_moe.checkpoint.writing.synthetic import SyntheticSizes, write_synthetic
from jax_nvfp4_moe.parallel import connect_peers

HERE = pathlib.Path(__file__).resolve().parent


def time_generate(model, prompt, new) -> float:
    """Return the seconds that the generation of `new` tokens takes."""
    begin = time.perf_counter()
    jax.block_until_ready(nvfp4.generate(model, prompt, max_new_tokens=new, stop_ids=()))
    return time.perf_counter() - begin


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mesh", nargs="+", default=["1x1", "2x1", "1x2", "4x1", "2x2", "1x4"])
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8, 64])
    parser.add_argument("--prompt", type=int, default=128, help="tokens of each prompt")
    parser.add_argument("--new", type=int, default=64, help="new tokens, at least 2")
    parser.add_argument("--folder", type=pathlib.Path, help="folder of the checkpoint")
    add_sizes(parser)
    parser.add_argument("--commit", help="commit to record; default: what git reports")
    parser.add_argument("--output", type=pathlib.Path)
    parser.add_argument("--measure", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args()


def add_sizes(parser):
    """Add the options that `sizes_of` reads. The defaults are the sizes of Qwen3-30B-A3B."""
    for option, value in (
        ("layers", 48),
        ("experts", 128),
        ("top-k", 8),
        ("hidden", 2048),
        ("intermediate", 768),
        ("vocab", 151936),
        ("heads", 32),
        ("kv-heads", 4),
        ("head-dim", 128),
    ):
        parser.add_argument(f"--{option}", type=int, default=value)


def sizes_of(arguments) -> SyntheticSizes:
    return SyntheticSizes(
        layers=arguments.layers,
        num_experts=arguments.experts,
        top_k=arguments.top_k,
        hidden=arguments.hidden,
        intermediate=arguments.intermediate,
        vocab=arguments.vocab,
        heads=arguments.heads,
        kv_heads=arguments.kv_heads,
        head_dim=arguments.head_dim,
    )


def measure(arguments):
    """Print a line of JSON for each batch, on the one mesh of this process."""
    compilations = Compilations()
    sizes, _, peers = arguments.mesh[0].partition("+")
    shape = tuple(map(int, sizes.split("x")))
    devices = jax.devices()[: shape[0] * shape[1]]
    mesh = jax.make_mesh(shape, ("expert", "tensor"), devices=devices) if shape != (1, 1) else None
    mesh = connect_peers(mesh, timeout=60.0) if peers else mesh
    begin = time.perf_counter()
    model = nvfp4.load_model(arguments.folder, mesh=mesh)
    jax.block_until_ready(nnx.state(model))
    seconds = time.perf_counter() - begin
    peaks = [(device.memory_stats() or {}).get("peak_bytes_in_use", 0) for device in devices]
    facts = {"mesh": arguments.mesh[0], "devices": len(devices), "kind": devices[0].device_kind}
    for batch in arguments.batch:
        rng = np.random.default_rng(batch)
        shape = batch, arguments.prompt
        prompt = rng.integers(0, model.config.vocab_size, shape, np.int32)
        for new in (1, arguments.new):
            time_generate(model, prompt, new)
        compiled = compilations.count
        firsts, alls = np.array(
            [
                [time_generate(model, prompt, new) for new in (1, arguments.new)]
                for _ in range(ROUNDS)
            ]
        ).T
        times = (alls - firsts) / (arguments.new - 1) * 1e6
        row = {
            "load_s": seconds,
            "peak_bytes": max(peaks),
            "batch": batch,
            "step_us": float(np.median(times)),
            "low": float(min(times)),
            "high": float(max(times)),
            "first_token_ms": float(np.median(firsts)) * 1e3,
            "compilations": compilations.count - compiled,
        }
        print(json.dumps(facts | row), flush=True)


def run(arguments):
    """Yield the rows of all meshes; a child process measures each mesh."""
    environment = {**os.environ, "NCCL_NVLS_ENABLE": "0"}
    given = sys.argv[1:]
    for mesh in arguments.mesh:
        # If an option is given twice, the second one counts.
        own = ["--mesh", mesh, "--folder", str(arguments.folder), "--measure"]
        command = [sys.executable, __file__, *given, *own]
        loading = {"CUDA_MODULE_LOADING": "EAGER"} if mesh.endswith("+peers") else {}
        done = subprocess.run(command, stdout=subprocess.PIPE, env=environment | loading, text=True)
        found = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
        if done.returncode:
            found.append({"mesh": mesh, "failed": done.returncode})
        yield from found


def save(arguments, rows):
    """Write the file of results and return the name of the device."""
    name = next((row["kind"] for row in rows if "kind" in row), "unknown")
    result = {
        "device": name,
        **provenance(arguments.commit),
        "sizes": vars(sizes_of(arguments)),
        "prompt": arguments.prompt,
        "new": arguments.new,
        "rows": rows,
    }
    stem = f"decode_parallel.{name.replace(' ', '-')}.json"
    path = arguments.output or HERE / "results" / stem
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    return name


def make_table(rows, title):
    table = Table(title=title)
    for heading in ("mesh", "batch", "tokens/s", "us a step", "efficiency", "load s", "peak GB"):
        table.add_column(heading, justify="right")
    one = {row["batch"]: row["step_us"] for row in rows if row.get("devices") == 1}
    for row in rows:
        if "failed" in row:
            table.add_row(row["mesh"], f"failed: status {row['failed']}")
            continue
        alone = one.get(row["batch"])
        efficiency = alone / row["step_us"] / row["devices"] if alone else None
        table.add_row(
            row["mesh"],
            f"{row['batch']}",
            f"{row['batch'] / row['step_us'] * 1e6:.0f}",
            f"{row['step_us']:.0f}",
            "-" if efficiency is None else f"{efficiency:.2f}",
            f"{row['load_s']:.1f}",
            f"{row['peak_bytes'] / 1e9:.2f}",
        )
    return table


def main():
    arguments = parse_arguments()
    if arguments.measure:
        measure(arguments)
        return
    with tempfile.TemporaryDirectory() as temporary:
        arguments.folder = arguments.folder or pathlib.Path(temporary) / "checkpoint"
        if not (arguments.folder / "config.json").exists():
            arguments.folder.mkdir(parents=True, exist_ok=True)
            write_synthetic(arguments.folder, sizes_of(arguments))
        rows, name = [], "unknown"
        for row in run(arguments):
            rows.append(row)
            print(json.dumps(row), file=sys.stderr, flush=True)
            name = save(arguments, rows)
    title = f"decoding over meshes of {name}, {arguments.prompt} tokens of prompt"
    Console(width=None if sys.stdout.isatty() else 120).print(make_table(rows, title))
    sys.exit(1 if any("failed" in row or row["compilations"] for row in rows) else 0)


if __name__ == "__main__":
    main()
