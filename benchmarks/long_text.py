"""Measure the memory and the time of long texts on a CPU: `evaluate`, `quantize_model`, `generate`.

    python benchmarks/long_text.py [--task evaluate quantize generate]
        [--tokens 2048 8192 16384 32768] [--new 32] [--dtype float32] [--output FILE]

The model is the example of the package, with as many positions as the text has. Each task gets one
text of random tokens as a single window or prompt, in a process of its own:

- evaluate: the mean cross-entropy of the text.
- quantize: calibration on the text, and writing in W4A4. The source is the example, dequantized.
- generate: a prefill of the text, and new tokens after it.

The peak is the largest resident memory of the process (``ru_maxrss``). The start is that memory
when the task begins: Python, JAX and, except for quantize, the model. The cache is the bytes of the
keys and values of all layers. Calibration holds the cache of one layer, and the inputs of a layer
for all windows. The time is that of one call and includes the compilation. Prints a table and
writes ``benchmarks/results/long_text.cpu.json``.
"""

import argparse
import json
import os
import pathlib
import resource
import subprocess
import sys
import tempfile
import time

from provenance import provenance
from rich.console import Console
from rich.table import Table

HERE = pathlib.Path(__file__).resolve().parent
TASKS = ("evaluate", "quantize", "generate")


def copy_example(folder, positions):
    """Copy the example to `folder`, as a model that takes `positions` tokens."""
    import jax_nvfp4_moe as nvfp4

    source = pathlib.Path(nvfp4.__file__).parent / "examples" / "tiny-python-moe"
    folder.mkdir()
    for path in source.iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    config = json.loads((source / "config.json").read_text(encoding="utf-8"))
    config["max_position_embeddings"] = positions
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")


def dequantize(source, folder):
    """Write the model of `source` to `folder` without quantization."""
    import numpy as np

    import jax_nvfp4_moe as nvfp4
    from jax_nvfp4_moe.checkpoint import read_config
    from jax_nvfp4_moe.checkpoint.export import write_checkpoint
    from jax_nvfp4_moe.checkpoint.safetensors import open_tensors

    weights = {}
    with open_tensors(source) as tensors:
        for name in tensors.names():
            if f"{name}_scale" in tensors:
                parts = [tensors.read(name + part) for part in ("", "_scale", "_scale_2")]
                tensor = nvfp4.NVFP4Tensor.from_packed(*parts)
                weights[name] = np.asarray(tensor.dequantize())
            elif not name.endswith(("_scale", "_scale_2")):
                weights[name] = tensors.read(name)
    write_checkpoint(folder, weights, read_config(source))


def peak_bytes():
    """Return the largest resident memory of this process so far (Linux)."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def measure(task, folder, tokens, new, dtype) -> dict:
    """Run a task in this process and return its figures."""
    import jax
    import numpy as np

    import jax_nvfp4_moe as nvfp4

    ids = np.random.default_rng(0).integers(0, 4096, tokens, np.int32)
    figures = {"task": task, "tokens": tokens}
    if task == "quantize":
        begin, start = time.perf_counter(), peak_bytes()
        nvfp4.quantize_model(
            folder, folder.with_name("nvfp4"), token_ids=ids, window=tokens, progress=False
        )
    else:
        model = nvfp4.load_model(folder, dtype=dtype)
        cache = jax.eval_shape(lambda: model.init_cache(1, tokens)).layers
        held = sum(entry.size * entry.dtype.itemsize for entry in jax.tree.leaves(cache))
        figures["cache_bytes"] = held
        begin, start = time.perf_counter(), peak_bytes()
        if task == "evaluate":
            result = nvfp4.evaluate(model, ids, window=tokens)
            figures["mean_cross_entropy"] = result["mean_cross_entropy"]
        else:
            tokens = nvfp4.generate(model, ids[None], max_new_tokens=new, stop_ids=())
            jax.block_until_ready(tokens)
    seconds, peak = time.perf_counter() - begin, peak_bytes()
    return figures | {"seconds": seconds, "start_bytes": start, "peak_bytes": peak}


def run(task, tokens, arguments) -> dict:
    """Measure a task in a new process, so that no other memory counts."""
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name) / "model"
        copy_example(folder, tokens + arguments.new)
        if task == "quantize":
            dequantize(folder, pathlib.Path(name) / "source")
            folder = pathlib.Path(name) / "source"
        command = [sys.executable, __file__, "--measure", str(folder), "--task", task]
        command += ["--tokens", str(tokens), "--new", str(arguments.new)]
        command += ["--dtype", arguments.dtype]
        done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    return json.loads(done.stdout)


def print_table(rows):
    table = Table(title="Long texts on a CPU")
    headings = ("task", "tokens", "seconds", "tokens/s", "peak MB", "at the start", "cache MB")
    for heading in headings:
        table.add_column(heading, justify="right")
    for row in rows:
        cache = row.get("cache_bytes")
        table.add_row(
            row["task"],
            str(row["tokens"]),
            f"{row['seconds']:.1f}",
            f"{row['tokens'] / row['seconds']:.0f}",
            f"{row['peak_bytes'] / 1e6:.0f}",
            f"{row['start_bytes'] / 1e6:.0f}",
            "-" if cache is None else f"{cache / 1e6:.0f}",
        )
    Console(width=100).print(table)


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--task", nargs="+", choices=TASKS, default=list(TASKS))
    parser.add_argument("--tokens", type=int, nargs="+", default=[2048, 8192, 16384, 32768])
    parser.add_argument("--new", type=int, default=32, help="new tokens of `generate`")
    parser.add_argument("--dtype", default="float32", help="of `evaluate` and `generate`")
    parser.add_argument("--commit", help="commit to record; default: what git reports")
    parser.add_argument(
        "--output", type=pathlib.Path, default=HERE / "results" / "long_text.cpu.json"
    )
    parser.add_argument("--measure", type=pathlib.Path, help=argparse.SUPPRESS)
    return parser.parse_args()


def main():
    arguments = parse_arguments()
    if arguments.measure:
        (task,), (tokens,) = arguments.task, arguments.tokens
        print(json.dumps(measure(task, arguments.measure, tokens, arguments.new, arguments.dtype)))
        return
    result = {
        **provenance(arguments.commit),
        "threads": len(os.sched_getaffinity(0)),
        "dtype": arguments.dtype,
        "new_tokens": arguments.new,
        "rows": [],
    }
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    for task in arguments.task:
        for tokens in arguments.tokens:
            result["rows"].append(run(task, tokens, arguments))
            arguments.output.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print_table(result["rows"])


if __name__ == "__main__":
    main()
