"""Time decoding of a whole model on several GPUs of one host.

    python benchmarks/decode_parallel.py [--mesh 1x1 2x1 1x2 4x1 2x2 1x4] [--batch 1 8 64]
        [--folder DIR] [--layers 48 ...] [--prefill 2048 ...] [--output FILE]
    python benchmarks/decode_parallel.py --model NAME [--format nvfp4] [--layers N] [--mesh ...]
        [--batch ...] [--prefill ...] [--output FILE]

Each mesh of EXPERTSxTENSOR devices runs in its own process, which makes a model over the mesh. A
mesh such as 1x2+peers adds up small arrays through the memory of the GPUs
(`parallel.connect_peers`).

- Without `--model`, the process loads a checkpoint of the sizes of Qwen3-30B-A3B, which other
  options change. If `--folder` has no checkpoint, one with random weights is written there. The
  first load finds files that were written just before, so that most of them are in memory.
- With `--model`, the model is one of `whole_model.py`, with random weights that are made on the
  devices. No file is read. The weights are equal on all meshes. `--layers` changes the number of
  layers; it may also be larger than that of deepseek-v3-4-layers. `--format` is the format of the
  linear layers beside the experts.

The process then decodes as `decode.py` does. The time of a step is the time of all new tokens minus
that of the first, divided by the number of steps. `efficiency` is the time of a step on 1x1,
divided by n times the time on n devices. `load_s` is the time to load the model or to make it. Peak
memory is that of the device with the largest peak, until the model is complete. With `--model`, it
includes all experts of one layer, which are made on one device before they are sharded.

`tokens_sha256` is the hash of all new tokens. "same text" says whether it is that of 1x1. Texts may
differ between meshes, because other meshes add up in another order.

With `--prefill`, the first token after one prompt of each length is timed too. Its rows are in the
list `prefill` of the result.

NVLink multicast stays off: the processes run with NCCL_NVLS_ENABLE=0. Those of a mesh with peers
also run with CUDA_MODULE_LOADING=EAGER (`connect_peers` says why). Writes
``benchmarks/results/decode_parallel.DEVICE.json``, or ``decode_parallel_NAME.DEVICE.json`` with
`--model`.
"""

import argparse
import hashlib
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import time

import jax
import numpy as np
from compilations import Compilations
from decode import ROUNDS
from flax import nnx
from provenance import provenance
from rich.console import Console
from rich.table import Table
from whole_model import FORMATS, MODELS, build_model

import jax_nvfp4_moe as nvfp4
from jax_nvfp4_moe.checkpoint.writing.synthetic import SyntheticSizes, write_synthetic
from jax_nvfp4_moe.parallel import connect_peers

HERE = pathlib.Path(__file__).resolve().parent


def draw_prompt(model, batch, tokens) -> np.ndarray:
    """Return random token ids ``[batch, tokens]``, which are equal in all processes."""
    rng = np.random.default_rng(batch)
    return rng.integers(0, model.config.vocab_size, (batch, tokens), np.int32)


def generate(model, prompt, new) -> jax.Array:
    """Return `new` tokens after each prompt."""
    made = nvfp4.generate(model, prompt, max_new_tokens=new, stop_ids=())
    return jax.block_until_ready(made)


def time_generate(model, prompt, new) -> float:
    """Return the seconds that the generation of `new` tokens takes."""
    begin = time.perf_counter()
    generate(model, prompt, new)
    return time.perf_counter() - begin


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mesh", nargs="+", default=["1x1", "2x1", "1x2", "4x1", "2x2", "1x4"])
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8, 64])
    parser.add_argument("--prompt", type=int, default=128, help="tokens of each prompt")
    parser.add_argument("--new", type=int, default=64, help="new tokens, at least 2")
    parser.add_argument("--prefill", type=int, nargs="+", default=[], help="lengths of prompts")
    parser.add_argument("--folder", type=pathlib.Path, help="folder of the checkpoint")
    parser.add_argument("--model", choices=MODELS, help="default: the checkpoint")
    parser.add_argument("--format", choices=FORMATS, default="nvfp4", help="only with --model")
    parser.add_argument("--layers", type=int, help="default: all of --model, or 48")
    add_sizes(parser)
    parser.add_argument("--commit", help="commit to record; default: what git reports")
    parser.add_argument("--output", type=pathlib.Path)
    parser.add_argument("--measure", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.model and arguments.folder:
        parser.error("--folder: expected no folder with --model, which reads no file")
    return arguments


def add_sizes(parser):
    """Add the sizes of the checkpoint but its layers. The defaults are those of Qwen3-30B-A3B."""
    for option, value in (
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
        layers=48 if arguments.layers is None else arguments.layers,
        num_experts=arguments.experts,
        top_k=arguments.top_k,
        hidden=arguments.hidden,
        intermediate=arguments.intermediate,
        vocab=arguments.vocab,
        heads=arguments.heads,
        kv_heads=arguments.kv_heads,
        head_dim=arguments.head_dim,
    )


def make_model(arguments, mesh):
    """Return the model over the mesh: one with random weights, or that of the checkpoint."""
    if arguments.model is None:
        return nvfp4.load_model(arguments.folder, mesh=mesh)
    whole = MODELS[arguments.model].cut(arguments.layers)
    return build_model(whole, arguments.format, mesh=mesh).model


def measure(arguments):
    """Print a line of JSON for each batch and for each prefill, on the one mesh of this process."""
    compilations = Compilations()
    sizes, _, peers = arguments.mesh[0].partition("+")
    shape = tuple(map(int, sizes.split("x")))
    devices = jax.devices()[: shape[0] * shape[1]]
    mesh = jax.make_mesh(shape, ("expert", "tensor"), devices=devices) if shape != (1, 1) else None
    mesh = connect_peers(mesh, timeout=60.0) if peers else mesh
    begin = time.perf_counter()
    model = make_model(arguments, mesh)
    jax.block_until_ready(nnx.state(model))
    seconds = time.perf_counter() - begin
    peaks = [(device.memory_stats() or {}).get("peak_bytes_in_use", 0) for device in devices]
    facts = {
        "model": arguments.model or "checkpoint",
        "layers": len(model.layers),
        "mesh": arguments.mesh[0],
        "devices": len(devices),
        "kind": devices[0].device_kind,
    }
    made = {"load_s": seconds, "peak_bytes": max(peaks)}
    for batch in arguments.batch:
        row = measure_steps(model, batch, arguments, compilations)
        print(json.dumps(facts | made | row), flush=True)
    for tokens in arguments.prefill:
        print(json.dumps(facts | measure_prefill(model, tokens, compilations)), flush=True)


def measure_steps(model, batch, arguments, compilations) -> dict:
    """Return the figures of the steps of one batch."""
    prompt = draw_prompt(model, batch, arguments.prompt)
    generate(model, prompt, 1)
    tokens = np.asarray(generate(model, prompt, arguments.new), np.int32)
    compiled = compilations.count
    firsts, alls = np.array(
        [[time_generate(model, prompt, new) for new in (1, arguments.new)] for _ in range(ROUNDS)]
    ).T
    times = (alls - firsts) / (arguments.new - 1) * 1e6
    return {
        "batch": batch,
        "step_us": float(np.median(times)),
        "low": float(min(times)),
        "high": float(max(times)),
        "first_token_ms": float(np.median(firsts)) * 1e3,
        "compilations": compilations.count - compiled,
        "tokens_sha256": hashlib.sha256(tokens.tobytes()).hexdigest(),
    }


def measure_prefill(model, tokens, compilations) -> dict:
    """Return the time of the first token after one prompt of some tokens."""
    prompt = draw_prompt(model, 1, tokens)
    generate(model, prompt, 1)
    compiled = compilations.count
    times = [time_generate(model, prompt, 1) for _ in range(ROUNDS)]
    return {
        "prefill": tokens,
        "first_token_ms": float(np.median(times)) * 1e3,
        "compilations": compilations.count - compiled,
    }


def run(arguments):
    """Yield the rows of all meshes; a child process measures each mesh."""
    environment = {**os.environ, "NCCL_NVLS_ENABLE": "0"}
    given = sys.argv[1:]
    for mesh in arguments.mesh:
        # If an option is given twice, the second one counts.
        folder = [] if arguments.model else ["--folder", str(arguments.folder)]
        own = ["--mesh", mesh, *folder, "--measure"]
        command = [sys.executable, __file__, *given, *own]
        loading = {"CUDA_MODULE_LOADING": "EAGER"} if mesh.endswith("+peers") else {}
        done = subprocess.run(command, stdout=subprocess.PIPE, env=environment | loading, text=True)
        found = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
        if done.returncode:
            found.append({"mesh": mesh, "failed": done.returncode})
        yield from found


def save(arguments, rows):
    """Write the file of results and return the name of the device."""
    whole = arguments.model and MODELS[arguments.model].cut(arguments.layers)
    name = next((row["kind"] for row in rows if "kind" in row), "unknown")
    result = {
        "device": name,
        **provenance(arguments.commit),
        "sizes": dict(whole.config) if whole else vars(sizes_of(arguments)),
        "format": arguments.format if whole else "nvfp4",
        "prompt": arguments.prompt,
        "new": arguments.new,
        "rows": [row for row in rows if "prefill" not in row],
        "prefill": [row for row in rows if "prefill" in row],
    }
    of_model = f"_{arguments.model}" if whole else ""
    stem = f"decode_parallel{of_model}.{name.replace(' ', '-')}.json"
    path = arguments.output or HERE / "results" / stem
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    return name


def make_table(rows, title):
    table = Table(title=title)
    figures = ("tokens/s", "us a step", "efficiency", "same text", "load s", "peak GB")
    for heading in ("mesh", "batch", *figures):
        table.add_column(heading, justify="right")
    rows = [row for row in rows if "prefill" not in row]
    one = {row["batch"]: row for row in rows if row.get("devices") == 1}
    for row in rows:
        if "failed" in row:
            table.add_row(row["mesh"], f"failed: status {row['failed']}")
            continue
        alone = one.get(row["batch"])
        same = alone and row["tokens_sha256"] == alone["tokens_sha256"]
        table.add_row(
            row["mesh"],
            f"{row['batch']}",
            f"{row['batch'] / row['step_us'] * 1e6:.0f}",
            f"{row['step_us']:.0f}",
            find_efficiency(row, alone, "step_us"),
            {None: "-", True: "yes", False: "no"}[same],
            f"{row['load_s']:.1f}",
            f"{row['peak_bytes'] / 1e9:.2f}",
        )
    return table


def make_prefill_table(rows, title):
    table = Table(title=title)
    for heading in ("mesh", "tokens", "first token ms", "efficiency"):
        table.add_column(heading, justify="right")
    rows = [row for row in rows if "prefill" in row]
    one = {row["prefill"]: row for row in rows if row["devices"] == 1}
    for row in rows:
        efficiency = find_efficiency(row, one.get(row["prefill"]), "first_token_ms")
        time_ms = f"{row['first_token_ms']:.1f}"
        table.add_row(row["mesh"], f"{row['prefill']}", time_ms, efficiency)
    return table


def find_efficiency(row, alone, figure) -> str:
    """Return the time on one device, divided by n times that on n; "-" if there is no `alone`."""
    return f"{alone[figure] / row[figure] / row['devices']:.2f}" if alone else "-"


def main():
    arguments = parse_arguments()
    if arguments.measure:
        measure(arguments)
        return
    with tempfile.TemporaryDirectory() as temporary:
        if not arguments.model:
            arguments.folder = arguments.folder or pathlib.Path(temporary) / "checkpoint"
            if not (arguments.folder / "config.json").exists():
                arguments.folder.mkdir(parents=True, exist_ok=True)
                write_synthetic(arguments.folder, sizes_of(arguments))
        rows, name = [], "unknown"
        for row in run(arguments):
            rows.append(row)
            print(json.dumps(row), file=sys.stderr, flush=True)
            name = save(arguments, rows)
    what = arguments.model or "checkpoint"
    title = f"{what}: decoding over meshes of {name}, {arguments.prompt} tokens of prompt"
    console = Console(width=None if sys.stdout.isatty() else 120)
    console.print(make_table(rows, title))
    if arguments.prefill:
        console.print(make_prefill_table(rows, f"{what}: the first token after one prompt"))
    sys.exit(1 if any("failed" in row or row["compilations"] for row in rows) else 0)


if __name__ == "__main__":
    main()
