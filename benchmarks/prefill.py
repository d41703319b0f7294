"""Time the prefill of whole models with random weights, and its memory, on one GPU.

    python benchmarks/prefill.py [--model qwen3-30b-a3b ...] [--format nvfp4 bfloat16 ...]
        [--tokens 2048 8192 32768 131072] [--batch 1] [--lengths 4096 512 512 512]
        [--layers N] [--chunk N] [--fp8-cache] [--llama FOLDER] [--transformers] [--output FILE]

The time is that of `generate` for one new token, the median of several calls. The floor is the sum
of two parts: the floor of the expert layers (`moe_cases.floor_us`), and the FLOPs of the other
linear layers and of causal attention at the rate of a matmul of the same run. The memory is the
peak beyond the weights and the cache. A peak never shrinks, so that lengths are measured from short
to long. A row that does not raise the peak of the rows before it has no memory.

Leave ``--xla_gpu_autotune_level=0`` out of XLA_FLAGS, unlike in `decode.py`. XLA computes the
layers that are not quantized, such as the gated delta nets of Qwen3.6-27B. If it does not time its
own products, it divides some of them into tiles of 16 by 8 outputs, which takes most of the
prefill.

`--lengths` also times one batch of prompts with these lengths, in a second table. It compares

- the batch with its `lengths`, of which only true tokens are computed,
- the same batch as if all prompts were as long as the longest,
- the prompts alone, one after the other,
- a single prompt with as many tokens as all of them together. Its attention has more to do.

`whole_model.py` has the models. `--llama` and `--transformers` time the same prompts with llama.cpp
and with transformers (`model_peers.py`). Writes ``benchmarks/results/prefill.DEVICE.json``.
"""

import argparse
import json
import pathlib
import sys
import time

import jax
import model_peers
import numpy as np
from decode import add_models, each_model, start_result
from moe_cases import Ceilings
from rich.console import Console
from rich.table import Table
from whole_model import cache_bytes, prefill_floor

import jax_nvfp4_moe as nvfp4

HERE = pathlib.Path(__file__).resolve().parent
ROUNDS = 3


def read_memory() -> dict:
    """Return the bytes in use on the device and their peak; nothing where it counts none."""
    return jax.devices()[0].memory_stats() or {}


def time_prefill(model, prompt, chunk, lengths=None) -> float:
    """Return the seconds until the first new token of each prompt."""
    begin = time.perf_counter()
    given = {"max_new_tokens": 1, "prefill_chunk": chunk, "lengths": lengths, "stop_ids": ()}
    jax.block_until_ready(nvfp4.generate(model, prompt, **given))
    return time.perf_counter() - begin


def measure(whole, built, tokens, arguments, ceilings) -> dict:
    """Return the row of one length."""
    rng = np.random.default_rng(tokens)
    prompt = rng.integers(0, whole.config["vocab_size"], (arguments.batch, tokens), np.int32)
    weights, before = (read_memory().get(key) for key in ("bytes_in_use", "peak_bytes_in_use"))
    time_prefill(built.model, prompt, arguments.chunk)
    times = [time_prefill(built.model, prompt, arguments.chunk) * 1e3 for _ in range(ROUNDS)]
    floor = prefill_floor(whole, built, arguments.batch, tokens, ceilings)
    peak = read_memory().get("peak_bytes_in_use")
    kept = sum(cache_bytes(built.model, arguments.batch, tokens))
    return {
        "batch": arguments.batch,
        "tokens": tokens,
        "ms": float(np.median(times)),
        "low": min(times),
        "high": max(times),
        "tokens_per_s": arguments.batch * tokens / float(np.median(times)) * 1e3,
        "floor_us": floor,
        "over_floor": float(np.median(times)) * 1e3 / floor["sum"],
        "cache_gb": kept / 1e9,
        "memory_gb": None if peak == before else (peak - weights - kept) / 1e9,
    }


def measure_ragged(whole, built, lengths, chunk) -> list[dict]:
    """Return the rows of one batch of prompts with unequal lengths; see the top of this file."""
    vocabulary, total = whole.config["vocab_size"], sum(lengths)
    shape = len(lengths), max(lengths)
    prompts = np.random.default_rng(total).integers(0, vocabulary, shape, np.int32)
    alone = [(prompts[row : row + 1, :count], None) for row, count in enumerate(lengths)]
    runs = {
        "unequal lengths": (total, [(prompts, np.array(lengths, np.int32))]),
        "all as long as the longest": (prompts.size, [(prompts, None)]),
        "one after the other": (total, alone),
        "a single prompt": (total, [(np.resize(prompts, (1, total)), None)]),
    }

    def time_all(calls):
        return sum(time_prefill(built.model, ids, chunk, lengths) for ids, lengths in calls) * 1e3

    rows = []
    for name, (tokens, calls) in runs.items():
        time_all(calls)  # compiles
        times = [time_all(calls) for _ in range(ROUNDS)]
        row = {"prompts": name, "lengths": lengths, "tokens": tokens, "ms": float(np.median(times))}
        rows.append(row | {"low": min(times), "high": max(times)})
    return rows


def make_ragged_table(rows):
    table = Table(title="prompts of unequal length")
    for heading in ("model", "format", "lengths", "prompts", "tokens", "ms", "us a token"):
        table.add_column(heading, justify="right")
    for row in rows:
        table.add_row(
            row["model"],
            row["format"],
            ", ".join(map(str, row["lengths"])),
            row["prompts"],
            f"{row['tokens']}",
            f"{row['ms']:.1f}",
            f"{row['ms'] * 1e3 / row['tokens']:.1f}",
        )
    return table


def head_of(whole, linear_format, fp8_cache) -> dict:
    """Return the facts about a model that each of its rows has."""
    head = {"model": whole.name, "layers": whole.layers, "format": linear_format}
    return head | {"fp8_cache": fp8_cache}


def make_table(result, title):
    peers, rows = result["peers"], result["rows"]
    table = Table(title=title, caption=model_peers.caption(peers))
    headings = ("model", "format", "batch", "tokens", "ms", "tokens/s", "floor ms", "over floor")
    for heading in (*headings, "cache GB", "further GB", *model_peers.headings(peers)):
        table.add_column(heading, justify="right")
    for row in rows:
        table.add_row(
            row["model"],
            row["format"],
            f"{row['batch']}",
            f"{row['tokens']}",
            f"{row['ms']:.1f}",
            f"{row['tokens_per_s']:.0f}",
            f"{row['floor_us']['sum'] / 1e3:.1f}",
            f"{row['over_floor']:.2f}",
            f"{row['cache_gb']:.2f}",
            "-" if row["memory_gb"] is None else f"{row['memory_gb']:.2f}",
            *model_peers.cells_of(peers, row),
        )
    return table


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_models(parser)
    parser.add_argument("--tokens", type=int, nargs="*", default=[2048, 8192, 32768, 131072])
    parser.add_argument("--batch", type=int, default=1, help="number of prompts")
    parser.add_argument("--lengths", type=int, nargs="+", help="of prompts in one batch")
    parser.add_argument("--chunk", type=int, help="`prefill_chunk` of `generate`")
    parser.add_argument("--output", type=pathlib.Path, help="default: results/prefill.DEVICE.json")
    return parser.parse_args()


def main():
    arguments = parse_arguments()
    cells = [(arguments.batch, tokens) for tokens in sorted(arguments.tokens)]
    peers = model_peers.time_peers(arguments, cells, new=1)
    result = {**start_result(arguments, peers), "ragged": []}
    name = result["device"]
    path = arguments.output or HERE / "results" / f"prefill.{name.replace(' ', '-')}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    for whole, linear_format, built in each_model(arguments):
        head = head_of(whole, linear_format, arguments.fp8_cache)
        for cell in cells:
            tokens = cell[1]
            row = measure(whole, built, tokens, arguments, Ceilings(**result["ceilings"]))
            times = model_peers.times_as_fast(
                peers, whole.name, *cell, row["ms"] / 1e3, "first_token_s"
            )
            result["rows"].append(head | row | {"times": times})
            path.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
        if arguments.lengths:
            rows = measure_ragged(whole, built, arguments.lengths, arguments.chunk)
            result["ragged"] += [head | row for row in rows]
            path.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
        del built  # its memory, before the next model is made
    console = Console(width=None if sys.stdout.isatty() else 140)
    console.print(make_table(result, f"prefill on {name}"))
    if result["ragged"]:
        console.print(make_ragged_table(result["ragged"]))


if __name__ == "__main__":
    main()
