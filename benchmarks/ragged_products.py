"""Time `ragged_dot` of this package beside those of JAX and of tokamax, in one run.

    python benchmarks/ragged_products.py [--case qwen3-30b-a3b] [--tokens 16 256 4096]

Prints a table and writes it to ``benchmarks/results/ragged_products.DEVICE.json`` and ``.md``. A
cell is the time of an expert layer: sort the tokens, multiply, activate, multiply, and add up. Only
`ragged_dot` and the form of the weights differ:

- `nvfp4`: weights that `prepare` has converted.
- `nvfp4_qarray`: an array of Qwix, which each call converts.
- `xla`: `jax.lax.ragged_dot` on bfloat16 weights, which are four times as large.
- `tokamax`: the kernel of tokamax for this device, on bfloat16 weights.

A contestant that cannot run has the reason in place of a time. `--folder` names a folder with
tokamax and qwix, if they are not installed.
"""

import argparse
import collections
import functools
import importlib
import pathlib
import sys

import jax
import jax.numpy as jnp
from moe_cases import CASES
from peers.ragged_layer import random_weights, time_layer
from provenance import provenance, write_page

import jax_nvfp4_moe as nvfp4

HERE = pathlib.Path(__file__).parent
# Has the fields of a `qwix.QArray`, so that Qwix need not be installed.
Array = collections.namedtuple("Array", ["qvalue", "scale", "zero_point", "qtype"])


def pack(weights):
    return [nvfp4.prepare(nvfp4.quantize(weight.mT)).mT for weight in weights]


def pack_qarrays(weights):
    """Return codes and scales ``[e, k, n]`` and ``[e, k/16, n]``, with a global scale of 1."""
    tensors = [nvfp4.quantize(w.mT, jnp.ones(w.shape[0], jnp.float32)) for w in weights]
    return [(tensor.codes.mT, tensor.block_scale.mT) for tensor in tensors]


def multiply_qarray(rows, weight, sizes):
    # Without the barrier, XLA would convert the weights once, before the loop of calls.
    rows, weight = jax.lax.optimization_barrier((rows, weight))
    return nvfp4.ragged_dot(rows, Array(*weight, None, "nvfp4"), sizes)


def load_tokamax():
    dot = importlib.import_module("tokamax").ragged_dot
    return functools.partial(dot, implementation="mosaic")


# Name -> function that makes the weights from bfloat16, and one that returns the `ragged_dot`.
CONTESTANTS = {
    "nvfp4": (pack, lambda: nvfp4.ragged_dot),
    "nvfp4_qarray": (pack_qarrays, lambda: multiply_qarray),
    "xla": (lambda weights: weights, lambda: jax.lax.ragged_dot),
    "tokamax": (lambda weights: weights, load_tokamax),
}


def time_cell(name, case, tokens):
    """Return the figures of a cell, or the reason why there are none."""
    make_weights, load = CONTESTANTS[name]
    try:
        return time_layer(case, load(), make_weights(random_weights(case)), tokens)
    except Exception as error:  # a peer may fail in any way; the others must still run
        return {"error": f"{type(error).__name__}: {error}".splitlines()[0][:200]}


def page(result):
    """Return the result as Markdown."""
    lines = [
        f"# ragged_dot in an expert layer, {result['device']}",
        "",
        f"{result['date']}, commit {result['commit']}, `{result['command']}`. Microseconds; in "
        "parentheses the fastest and the slowest round.",
        "",
        f"| case | tokens | {' | '.join(CONTESTANTS)} |",
        f"|---|---|{'---|' * len(CONTESTANTS)}",
    ]
    for row in result["rows"]:
        cells = [
            found.get("error") or f"{found['us']:.1f} ({found['low']:.1f}, {found['high']:.1f})"
            for found in (row[name] for name in CONTESTANTS)
        ]
        lines.append(f"| {row['case']} | {row['tokens']} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--case", nargs="+", default=["qwen3-30b-a3b"], choices=CASES)
    parser.add_argument("--tokens", nargs="+", type=int, default=[16, 256, 4096])
    parser.add_argument("--folder", help="folder with tokamax and qwix")
    parser.add_argument("--commit", help="commit to record; asks git by default")
    parser.add_argument("--output", type=pathlib.Path, help="path of the JSON file")
    arguments = parser.parse_args()
    if arguments.folder:
        sys.path.append(arguments.folder)
    device = jax.devices()[0].device_kind.replace(" ", "-")
    output = arguments.output or HERE / "results" / f"ragged_products.{device}.json"
    rows = [
        {
            "case": case,
            "tokens": tokens,
            **{name: time_cell(name, CASES[case], tokens) for name in CONTESTANTS},
        }
        for case in arguments.case
        for tokens in arguments.tokens
    ]
    result = {**provenance(arguments.commit), "device": device, "rows": rows}
    write_page(output.with_suffix(""), result, page(result))


if __name__ == "__main__":
    main()
