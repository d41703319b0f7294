"""Measure the error of each algorithm that rounds weights.

    python benchmarks/rounding.py                                  # random weights alone
    python benchmarks/rounding.py BF16_FOLDER --text heldout.txt   # and a model that we quantize

Random weights have the shapes of real models. Their error is the NRMSE of normal and of Student-t
values (4 degrees of freedom), at two ranges of block scales. It is computed without weights and
with weights by the importance of channels (log-normal, sigma 1).

A trained model: its experts and linears are quantized with the first 4096 tokens of the text as
calibration, and judged on the windows after these. The figures are mean cross-entropy, and the
NRMSE of the experts of each layer on the inputs of the original. The direction in which single
weights round changes the cross-entropy at random, and the global scale decides it. Each algorithm
therefore runs with several global scales (``--largest``), and the table has a mean with its
standard error.

Prints tables and writes ``benchmarks/results/rounding.json``.
"""

import argparse
import dataclasses
import json
import math
import pathlib
import tempfile
import time

import jax
import jax.numpy as jnp
import numpy as np
from provenance import provenance
from rich.console import Console
from rich.progress import track

import jax_nvfp4_moe as nvfp4
from jax_nvfp4_moe.cli.output import table
from jax_nvfp4_moe.inference.evaluation import standard_error
from jax_nvfp4_moe.inference.tokenizer import load_tokenizer
from jax_nvfp4_moe.numerics import nvfp4 as formats
from jax_nvfp4_moe.numerics import rounding
from jax_nvfp4_moe.quantization.layer_errors import measure_errors
from jax_nvfp4_moe.quantization.pipeline import quantize_model

HERE = pathlib.Path(__file__).resolve().parent
# Rows and columns of the matrices of one expert.
SHAPES = {
    "Qwen3-30B-A3B gate, up": (768, 2048),
    "Qwen3-30B-A3B down": (2048, 768),
    "DeepSeek-V3 gate, up": (2048, 7168),
    "DeepSeek-V3 down": (7168, 2048),
}
DISTRIBUTIONS = {
    "normal": lambda rng, shape: rng.standard_normal(shape, np.float32),
    "student-t 4": lambda rng, shape: rng.standard_t(4, shape),
}
SCHEMES = ("w4a16", "w4a4")
CALIBRATION = 4096  # tokens


def variant(name, largest):
    """Register an algorithm with another range of block scales, and return its name."""
    key = f"{name} at {largest:g}"
    row = dataclasses.replace(rounding.ALGORITHMS[name], largest=float(largest))
    rounding.ALGORITHMS[key] = row  # the table of the package has one range for each algorithm
    return key


@jax.jit
def nrmse(x, quantized, importance):
    """Return ``|w - x| / |x|``, with errors weighted by the importance of channels."""
    packed, block_scale, g = quantized
    error = formats.dequantize(packed, formats.decode_scale(block_scale) * g) - x
    weighted = [jnp.sum(jnp.square(v) * importance[None, :]) for v in (error, x)]
    return jnp.sqrt(weighted[0] / weighted[1])


def measure_weights(names, ranges):
    """Yield the errors of random weights: one record for each algorithm, range and matrix."""
    cases = [(shape, kind) for shape in SHAPES for kind in DISTRIBUTIONS]
    for shape, kind in track(cases, "weights", console=Console(stderr=True)):
        rng = np.random.default_rng(0)
        x = jnp.asarray(DISTRIBUTIONS[kind](rng, SHAPES[shape]), jnp.bfloat16)
        importance = jnp.asarray(rng.lognormal(size=x.shape[-1:]), jnp.float32)
        for name in names:
            weighs = rounding.ALGORITHMS[name].needs_importance
            for largest in ranges:
                arguments = {"algorithm": variant(name, largest)}
                if weighs:
                    arguments["importance"] = importance
                start = time.perf_counter()
                found = jax.block_until_ready(rounding.quantize_weight(x, **arguments))
                seconds = time.perf_counter() - start
                wide = x.astype(jnp.float32)
                yield {
                    "matrix": shape,
                    "values": kind,
                    "algorithm": name,
                    "largest": largest,
                    "nrmse": float(nrmse(wide, found, jnp.ones_like(importance))),
                    "weighted_nrmse": float(nrmse(wide, found, importance)),
                    "weights_per_second": x.size / seconds,
                }


def measure_model(source, ids, name, largest, windows, layers):
    """Quantize once; return cross-entropies by scheme and, if `layers` is set, errors by layer."""
    with tempfile.TemporaryDirectory() as folder:
        folder = pathlib.Path(folder) / "quantized"
        algorithm = variant(name, largest)
        quantize_model(
            source, folder, token_ids=ids[:CALIBRATION], scheme="w4a4", algorithm=algorithm
        )
        record = {"algorithm": name, "largest": largest}
        for scheme in SCHEMES:
            model = nvfp4.load_model(folder, scheme=scheme, dtype="float32")
            arguments = {"skip_tokens": CALIBRATION, "max_windows": windows}
            result = nvfp4.evaluate(model, ids, **arguments)
            record[scheme] = result["mean_cross_entropy"]
        if layers:
            some = ids[CALIBRATION : CALIBRATION + 512]
            errors = measure_errors(folder, some, original=source, dtype="float32")
            record["layers"] = {
                scheme: [error.nrmse for error in errors if error.scheme == scheme]
                for scheme in SCHEMES
            }
    return record


def measure_original(source, ids, windows):
    model = nvfp4.load_model(source, dtype="float32")
    return nvfp4.evaluate(model, ids, skip_tokens=CALIBRATION, max_windows=windows)


def weight_rows(records, names, ranges):
    """Yield a row for each algorithm and range: means over matrices, by distribution."""
    of = [(kind, error) for kind in DISTRIBUTIONS for error in ("nrmse", "weighted_nrmse")]
    yield "algorithm", "range", *(f"{kind} {error}" for kind, error in of), "M weights/s"
    for name in names:
        for largest in ranges:
            some = [r for r in records if (r["algorithm"], r["largest"]) == (name, largest)]
            cells = [np.mean([r[e] for r in some if r["values"] == kind]) for kind, e in of]
            speed = max(r["weights_per_second"] for r in some) / 1e6  # slower calls compiled

            yield name, f"{largest:g}", *(f"{cell:.5f}" for cell in cells), f"{speed:.0f}"


def model_rows(records, names, original):
    """Yield a row for each algorithm: cross-entropies over the ranges, and errors of layers."""
    yield "algorithm", *(f"{s} {of}" for s in SCHEMES for of in ("nats", "+-", "lost", "layers"))
    for name in names:
        some = [record for record in records if record["algorithm"] == name]
        layers = next(record["layers"] for record in some if "layers" in record)
        cells = []
        for scheme in SCHEMES:
            losses = [record[scheme] for record in some]
            mean, error = np.mean(losses), standard_error(losses)
            cells += [f"{mean:.5f}", "" if error is None else f"{error:.5f}"]
            cells += [
                f"{mean - original:.5f}",
                f"{math.sqrt(np.mean(np.square(layers[scheme]))):.4f}",
            ]
        yield name, *cells


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("source", type=pathlib.Path, nargs="?", help="BF16 checkpoint")
    parser.add_argument("--text", type=pathlib.Path, help="text for calibration and evaluation")
    parser.add_argument("--algorithms", nargs="+", default=list(rounding.ALGORITHMS))
    parser.add_argument(
        "--ranges",
        nargs="+",
        type=float,
        default=[448, 256],
        help="ranges of block scales for random weights",
    )
    parser.add_argument("--largest", nargs="+", type=float, default=[256, 352, 448])
    parser.add_argument("--windows", type=int, default=48)
    parser.add_argument("--commit", help="commit to record; default: what git reports")
    parser.add_argument("--output", type=pathlib.Path, default=HERE / "results" / "rounding.json")
    arguments = parser.parse_args()
    names = arguments.algorithms
    figures = provenance(arguments.commit)
    figures["weights"] = list(measure_weights(names, arguments.ranges))
    print("\n".join(table(weight_rows(figures["weights"], names, arguments.ranges))), flush=True)
    if arguments.source is not None:
        if arguments.text is None:
            parser.error("a model needs --text")
        text = arguments.text.read_text(encoding="utf-8")
        ids = load_tokenizer(arguments.source).encode(text)
        original = measure_original(arguments.source, ids, arguments.windows)
        figures |= {"original": original["mean_cross_entropy"], "models": []}
        runs = [(n, at) for at in arguments.largest for n in names]
        for name, largest in track(runs, "models", console=Console(stderr=True)):
            first = largest == arguments.largest[0]
            run = measure_model(
                arguments.source, ids, name, largest, arguments.windows, layers=first
            )
            figures["models"].append(run)
            arguments.output.write_text(json.dumps(figures, indent=1) + "\n")
        rows = model_rows(figures["models"], names, figures["original"])
        print(f"\noriginal: {figures['original']:.5f} nats")
        print("\n".join(table(rows)))
    arguments.output.write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    main()
