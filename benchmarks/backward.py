"""Time the forward and the backward pass of expert layers, and their memory, in one run.

    python benchmarks/backward.py [--case qwen3-30b-a3b ...] [--tokens 1024 8192]
        [--contestant nvfp4 xla tokamax] [--folder FOLDER] [--commit C] [--output FILE]

A backward pass gives the gradients to tokens and expert weights; the matrices are frozen. The
column "both" is the time of a forward and a backward pass, and "ratio" divides it by that of the
forward pass. "MB" is the memory that both take beside their arguments and results. On a CPU, times
are those that all cores spend, because other programs may use the cores too. Contestants:

- `nvfp4`: `ops.moe_mlp` on packed weights.
- `xla`: `jax.lax.ragged_dot` on bfloat16 weights, which are four times as large.
- `tokamax`: the kernel of tokamax for this device, on bfloat16 weights.

`--folder` names a folder with tokamax and qwix, if they are not installed. A contestant that cannot
run has the reason in place of a time. Prints a table and writes it to
``benchmarks/results/backward.DEVICE.json`` and ``.md``.
"""

import argparse
import functools
import importlib
import pathlib
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
from layer import random_params
from moe_cases import CASES, REAL_CASES, draw_ids
from peers.ragged_layer import random_weights, run_layer
from provenance import provenance, write_page

import jax_nvfp4_moe as nvfp4
from jax_nvfp4_moe.cli.timing import time_program
from jax_nvfp4_moe.ops.preparation import prepare_donated

HERE = pathlib.Path(__file__).parent
ROUNDS, SLOW_US = 7, 10e6  # a program that takes longer on a CPU is timed once


def make_packed(case):
    """Return the packed weights, and the layer as a function of them, tokens, ids and weights."""
    params = prepare_donated(random_params(case), scheme="w4a16", top_k=case.top_k)
    run = functools.partial(nvfp4.ops.moe_mlp, scheme="w4a16", activation=case.activation)
    return params, lambda params, x, ids, weights: run(x, params, ids, weights)


def make_ragged(load, case):
    """Return the same on bfloat16 weights; the weights of experts are 1 / k."""
    dot = load()
    return random_weights(case), lambda given, x, ids, _: run_layer(case, dot, x, ids, given)


def load_tokamax():
    dot = importlib.import_module("tokamax").ragged_dot
    return functools.partial(dot, implementation="mosaic")


# Name -> function that makes the weights and the layer of a case.
CONTESTANTS = {
    "nvfp4": make_packed,
    "xla": functools.partial(make_ragged, lambda: jax.lax.ragged_dot),
    "tokamax": functools.partial(make_ragged, load_tokamax),
}


def time_on_cores(step, state):
    """Return the microseconds that all cores spend on ``state = step(state)``."""

    def run(state):
        begin = time.process_time()
        state = jax.block_until_ready(step(state))
        return state, (time.process_time() - begin) * 1e6

    state, first = run(state)
    times = []
    for _ in range(ROUNDS if first < SLOW_US else 1):
        state, us = run(state)
        times.append(us)
    return {"us": float(np.median(times)), "low": min(times), "high": max(times)}


def time_pass(case, layer, given, tokens, backward):
    """Time calls in one loop on the device, each fed by the one before; return us and bytes."""
    ids = jnp.asarray(draw_ids(case, tokens))
    weights = jnp.full((tokens, case.top_k), 1 / case.top_k, jnp.float32)

    @functools.partial(jax.jit, donate_argnums=0)
    def program(x, ids, weights, given):
        def call(x, chosen):
            if backward:
                run = functools.partial(layer, given)
                y, back = jax.vjp(lambda x, weights: run(x, chosen, weights), x, weights)
                x_bar, weights_bar = back(y)
                y = x_bar.astype(jnp.float32) + 1e-9 * jnp.sum(weights_bar)
            else:
                y = layer(given, x, chosen, weights).astype(jnp.float32)
            return (y / (1e-3 + jnp.max(jnp.abs(y)))).astype(x.dtype), None

        return jax.lax.scan(call, x, ids)[0]

    x = jax.random.normal(jax.random.key(1), (tokens, case.hidden), jnp.bfloat16)
    memory = program.lower(x, ids, weights, given).compile().memory_analysis()
    time_it = time_on_cores if jax.default_backend() == "cpu" else time_program
    figures = time_it(lambda x: program(x, ids, weights, given), x)
    times = {name: figures[name] / len(ids) for name in ("us", "low", "high")}
    return times | {"temp_bytes": memory.temp_size_in_bytes}


def time_cell(name, case, tokens):
    """Return the figures of both passes, or the reason why there are none."""
    try:
        given, layer = CONTESTANTS[name](case)
        forward, both = (time_pass(case, layer, given, tokens, way) for way in (False, True))
    except Exception as error:  # a peer may fail in any way; the others must still run
        return {"error": f"{type(error).__name__}: {error}".splitlines()[0][:200]}
    return {"forward": forward, "both": both}


def page(result):
    """Return the result as Markdown."""
    lines = [
        f"# Forward and backward pass of an expert layer, {result['device']}",
        "",
        f"{result['date']}, commit {result['commit']}, `{result['command']}`. Microseconds.",
        "",
        "| case | tokens | contestant | forward | both | ratio | MB |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in result["rows"]:
        cells = [row["case"], str(row["tokens"]), row["contestant"]]
        if "error" in row:
            cells += [row["error"], "", "", ""]
        else:
            forward, both = row["forward"]["us"], row["both"]["us"]
            megabytes = row["both"]["temp_bytes"] / 1e6
            cells += [f"{forward:.0f}", f"{both:.0f}", f"{both / forward:.2f}", f"{megabytes:.0f}"]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--case", nargs="+", default=REAL_CASES, choices=CASES)
    parser.add_argument("--tokens", nargs="+", type=int, default=[1024, 8192])
    parser.add_argument("--contestant", nargs="+", default=["nvfp4"], choices=CONTESTANTS)
    parser.add_argument("--folder", help="folder with tokamax and qwix")
    parser.add_argument("--commit", help="commit to record; asks git by default")
    parser.add_argument("--output", type=pathlib.Path, help="path of the JSON file")
    arguments = parser.parse_args()
    if arguments.folder:
        sys.path.append(arguments.folder)
    device = jax.devices()[0].device_kind.replace(" ", "-")
    output = arguments.output or HERE / "results" / f"backward.{device}.json"
    rows = []
    for case in arguments.case:
        for tokens in arguments.tokens:
            for name in arguments.contestant:
                found = time_cell(name, CASES[case], tokens)
                rows.append({"case": case, "tokens": tokens, "contestant": name, **found})
                print(rows[-1], file=sys.stderr, flush=True)
    result = {**provenance(arguments.commit), "device": device, "rows": rows}
    write_page(output.with_suffix(""), result, page(result))


if __name__ == "__main__":
    main()
