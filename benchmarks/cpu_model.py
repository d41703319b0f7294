"""Time a whole model on a CPU, beside llama.cpp: prefill, and decoding at several batch sizes.

    python benchmarks/cpu_model.py [--llama-python PYTHON] [--layers 8] [--prompts 512 2048]
        [--batches 1 8] [--output FILE]

The model has the sizes of Qwen3-30B-A3B with fewer layers, and random weights: linears and experts
in NVFP4, embedding and head in bfloat16. `--llama-python` is a Python that has ``llama-cpp-python``
and ``gguf`` (`peers/llama_model.py`), which times a model of the same sizes and formats. Without it
there is no peer.

The time of a prefill is that of `generate` for one token. The time of a step is the time for all
new tokens, minus that for the first, divided by the number of steps. The floor of a step is the
time to read the weights that its tokens touch, at the read bandwidth measured in the same run.
Prints a table and writes ``benchmarks/results/cpu_model.json``.
"""

import argparse
import json
import os
import pathlib
import subprocess
import tempfile
import time

import jax
import numpy as np
from cpu_moe import measure_peaks
from provenance import provenance
from rich.console import Console
from rich.table import Table

import jax_nvfp4_moe as nvfp4
from jax_nvfp4_moe.backends import _ffi
from jax_nvfp4_moe.checkpoint.writing.synthetic import SyntheticSizes, write_synthetic

HERE = pathlib.Path(__file__).resolve().parent


def time_generate(model, prompt, new):
    """Return the seconds of one call of `generate`."""
    start = time.perf_counter()
    jax.block_until_ready(nvfp4.generate(model, prompt, max_new_tokens=new, stop_ids=()))
    return time.perf_counter() - start


def time_prefill(model, arguments, tokens, vocab):
    prompt = np.random.default_rng(0).integers(0, vocab, (1, tokens), np.int32)
    return [time_generate(model, prompt, 1) for _ in range(arguments.rounds + 1)][1:]


def time_decoding(model, arguments, batch, vocab):
    prompt = np.random.default_rng(0).integers(0, vocab, (batch, arguments.prompt), np.int32)
    steps, seconds = arguments.steps, []
    for _ in range(arguments.rounds + 1):
        first, all_tokens = (time_generate(model, prompt, new) for new in (1, steps + 1))
        seconds.append((all_tokens - first) / steps)
    return seconds[1:]


def step_bytes(sizes, batch):
    """Return the bytes of weights that a step reads, if routing is uniform."""
    touched = sizes.num_experts * (1 - (1 - sizes.top_k / sizes.num_experts) ** batch)
    linears = 2 * sizes.hidden * sizes.head_dim * (sizes.heads + sizes.kv_heads)
    quantized = touched * 3 * sizes.hidden * sizes.intermediate + linears
    router = 2 * sizes.num_experts * sizes.hidden
    return sizes.layers * (quantized * 9 / 16 + router) + 2 * sizes.vocab * sizes.hidden


def time_llama(config, arguments):
    """Return the seconds that `peers/llama_model.py` measures, or none without `--llama-python`."""
    if arguments.llama_python is None:
        return {"prefill": {}, "decode": {}}
    command = [arguments.llama_python, HERE / "peers" / "llama_model.py", config]
    command += ["--threads", str(arguments.threads), "--prompt", str(arguments.prompt)]
    command += ["--rounds", str(arguments.rounds), "--steps", str(arguments.steps)]
    command += ["--prompts", *map(str, arguments.prompts)]
    command += ["--batches", *map(str, arguments.batches)]
    done = subprocess.run(list(map(str, command)), check=True, capture_output=True, text=True)
    return json.loads(done.stdout)


def make_rows(ours, theirs, sizes, gigabytes_per_s):
    """Return the rows of the table. The fastest of all rounds counts, for us and for llama.cpp."""
    rows = []
    for kind, times in ours.items():
        for size, seconds in times.items():
            best = min(seconds)
            row = {"what": kind, "size": size, "ms": best * 1e3, "slowest_ms": max(seconds) * 1e3}
            row["tokens_per_s"] = size / best
            if kind == "decode":
                floor = step_bytes(sizes, size) / gigabytes_per_s / 1e9
                row["over_floor"] = best / floor
            if peer := theirs[kind].get(str(size)):
                row["llama_ms"] = min(peer) * 1e3
                row["times_llama"] = min(peer) / best
            rows.append(row)
    return rows


def print_table(rows):
    table = Table(title="One model on a CPU")
    for heading in ("", "tokens", "ms", "tokens/s", "over floor", "llama.cpp ms", "times as fast"):
        table.add_column(heading, justify="right")
    for row in rows:
        number = {name: f"{value:.2f}" for name, value in row.items() if isinstance(value, float)}
        table.add_row(
            row["what"],
            str(row["size"]),
            number["ms"],
            f"{row['tokens_per_s']:.0f}",
            *(number.get(name, "-") for name in ("over_floor", "llama_ms", "times_llama")),
        )
    Console(width=100).print(table)


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--llama-python", type=pathlib.Path, help="default: no peer")
    parser.add_argument("--prompts", type=int, nargs="*", default=[512, 2048])
    parser.add_argument("--batches", type=int, nargs="*", default=[1, 8])
    parser.add_argument("--prompt", type=int, default=128, help="tokens before the timed steps")
    parser.add_argument("--steps", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--vocab", type=int, default=151936)
    parser.add_argument("--hidden", type=int, default=2048)
    parser.add_argument("--experts", type=int, default=128)
    parser.add_argument("--commit", help="commit to record; default: what git reports")
    parser.add_argument("--output", type=pathlib.Path, default=HERE / "results" / "cpu_model.json")
    return parser.parse_args()


def main():
    arguments = parse_arguments()
    if reason := _ffi.why_unavailable("_nvfp4_cpu"):
        raise SystemExit(reason)
    sizes = SyntheticSizes(
        layers=arguments.layers,
        num_experts=arguments.experts,
        top_k=8,
        hidden=arguments.hidden,
        intermediate=768,
        vocab=arguments.vocab,
        heads=32,
        kv_heads=4,
        head_dim=128,
    )
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        peaks = measure_peaks(folder, arguments.threads)
        write_synthetic(folder / "model", sizes, algorithm="W4A16_NVFP4")
        model = nvfp4.load_model(folder / "model")
        vocab = sizes.vocab
        ours = {
            "prefill": {n: time_prefill(model, arguments, n, vocab) for n in arguments.prompts},
            "decode": {n: time_decoding(model, arguments, n, vocab) for n in arguments.batches},
        }
        del model  # the two models need not be in memory together
        theirs = time_llama(folder / "model" / "config.json", arguments)
    rows = make_rows(ours, theirs, sizes, peaks["read_gbps"])
    print_table(rows)
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    result = {
        **provenance(arguments.commit),
        "threads": arguments.threads,
        "layers": arguments.layers,
        "isa": _ffi.load("_nvfp4_cpu").isa_levels()[0],
        "peaks": peaks,
        "rows": rows,
    }
    arguments.output.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
