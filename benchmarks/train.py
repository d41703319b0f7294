"""Time training steps of LoRA on whole models with random weights, and say what memory they take.

    python benchmarks/train.py [--model qwen3-30b-a3b ...] [--layers N] [--tokens 4096]
        [--batch 1] [--rank 16] [--targets mixers experts] [--remat yes no] [--format nvfp4]
        [--compile-only] [--commit C] [--output FILE]

A step is a forward and a backward pass, and the update of AdamW. It is a function of the state of
the model and of the optimizer (`nnx.split`), which it donates. A function of the modules
(`nnx.jit`) would walk over all of them in each call. The loss is that of `model.score`, which has
the logits of 512 tokens in memory at a time. "forward" is the loss alone. Times are medians of
several calls. `whole_model.py` has the models. With ``--remat yes``, a backward pass computes each
layer again. Four figures say what memory a step takes:

- "weights" and "temp": the arguments of the compiled step, and what it takes beside them, as XLA
  says (`memory_analysis`). They are those of this device and its kernels.
- "kept": what the forward pass keeps for the backward pass, from the shapes alone. Kernels of other
  devices keep the same.
- "peak": the peak of the device, where it counts one. A peak never shrinks, so that rows with
  ``--remat yes`` come first. A row that does not raise the peak of the rows before it has none.

On a CPU, "temp" hardly falls with ``--remat yes``, because XLA may merge the two computations of a
layer again. "kept" says what remat leaves.

On a GPU, "device" of the JSON has the longest kernels of a step.

With ``--compile-only``, nothing runs, and rows have no times. Two runs with one layer and two
layers at the true sizes then say what each further layer adds. Prints a table and writes
``benchmarks/results/train.DEVICE.json``.
"""

import argparse
import functools
import json
import pathlib
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
from decode import describe_device, profile_device
from flax import nnx
from provenance import provenance
from whole_model import FORMATS, MODELS, build_model

import jax_nvfp4_moe as nvfp4

HERE = pathlib.Path(__file__).resolve().parent
ROUNDS, FEW_TOKENS = 3, 16
GIGA = 1e9


def loss(model, ids, remat):
    """Return the mean cross-entropy of token ids ``[b, t + 1]``."""
    scores = model.score(ids[:, :-1], ids[:, 1:], remat=remat)
    return -scores.log_probability.mean()


def step(model, optimizer, ids, remat):
    """Do a step of the optimizer; return the loss before it."""
    wrt = nnx.DiffState(0, nnx.LoRAParam)
    value, gradients = nnx.value_and_grad(loss, argnums=wrt)(model, ids, remat)
    optimizer.update(model, gradients)
    return value


def count_bytes(tree) -> int:
    """Return the bytes of all arrays, abstract ones too."""
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def kept_bytes(model, batch, tokens, remat) -> int:
    """Return the bytes that a forward pass keeps for the backward pass, beside the weights.

    A pass over a few tokens keeps the same weights, and almost nothing else.
    """
    graph, adapters, rest = nnx.split(model, nnx.LoRAParam, ...)

    def kept(tokens):
        ids = jax.ShapeDtypeStruct((batch, tokens + 1), jnp.int32)

        def forward(adapters, rest, ids):
            def run(adapters):
                return loss(nnx.merge(graph, adapters, rest), ids, remat)

            return jax.vjp(run, adapters)[1]

        return count_bytes(jax.eval_shape(forward, adapters, rest, ids))

    return kept(tokens) - kept(FEW_TOKENS)


def time_calls(call) -> float:
    """Return the median of the milliseconds of calls, after one that compiles."""
    jax.block_until_ready(call())
    times = []
    for _ in range(ROUNDS):
        begin = time.perf_counter()
        jax.block_until_ready(call())
        times.append((time.perf_counter() - begin) * 1e3)
    return float(np.median(times))


def peak_bytes() -> int | None:
    """Return the peak of the device's memory, or None where the device counts none."""
    return (jax.devices()[0].memory_stats() or {}).get("peak_bytes_in_use")


def measure(model, arguments, remat, vocabulary) -> dict:
    """Return the row of a model with adapters."""
    batch, tokens = arguments.batch, arguments.tokens
    optimizer = nnx.Optimizer(model, optax.adamw(1e-4), wrt=nnx.LoRAParam)
    shape = batch, tokens + 1
    ids = jnp.asarray(np.random.default_rng(0).integers(0, vocabulary, shape, np.int32))
    graph, state = nnx.split((model, optimizer))

    @functools.partial(jax.jit, donate_argnums=0)
    def run(state, ids):
        model, optimizer = nnx.merge(graph, state)
        value = step(model, optimizer, ids, remat)
        return value, nnx.state((model, optimizer))

    @jax.jit
    def forward(state, ids):
        return loss(nnx.merge(graph, state)[0], ids, remat)

    begin = time.perf_counter()
    compiled = run.lower(state, ids).compile()
    compile_s = time.perf_counter() - begin
    print(f"the step compiled in {compile_s:.0f} s", file=sys.stderr, flush=True)
    memory = compiled.memory_analysis()
    row = {
        "batch": batch,
        "tokens": tokens,
        "rank": arguments.rank,
        "targets": arguments.targets,
        "remat": remat,
        "compile_s": compile_s,
        "adapter_parameters": sum(
            leaf.size for leaf in jax.tree.leaves(nnx.state(model, nnx.LoRAParam))
        ),
        "weights_gb": memory.argument_size_in_bytes / GIGA,
        "temp_gb": memory.temp_size_in_bytes / GIGA,
        "kept_gb": kept_bytes(model, batch, tokens, remat) / GIGA,
    }
    if arguments.compile_only:
        return row
    before = peak_bytes()

    def run_step():
        nonlocal state
        value, state = compiled(state, ids)
        jax.block_until_ready(value)

    step_ms = time_calls(run_step)
    peak = peak_bytes()
    print(f"a step takes {step_ms:.0f} ms, peak {peak or 0} bytes", file=sys.stderr, flush=True)
    forward_ms = time_calls(lambda: forward(state, ids))
    device = describe_device(*profile_device(run_step))
    nnx.update((model, optimizer), state)  # in place of the donated arrays
    return row | {
        "forward_ms": forward_ms,
        "step_ms": step_ms,
        "over_forward": step_ms / forward_ms,
        "tokens_per_s": batch * tokens / step_ms * 1e3,
        "peak_gb": None if peak is None or peak == before else peak / GIGA,
        "device": device,
    }


def show(rows) -> str:
    """Return the rows as a table in Markdown."""
    columns = ("model", "layers", "tokens", "rank", "remat", "forward_ms", "step_ms")
    columns += ("tokens_per_s", "weights_gb", "temp_gb", "kept_gb", "peak_gb")
    lines = [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    for row in rows:
        cells = (row.get(name) for name in columns)
        texts = (f"{cell:.3f}" if isinstance(cell, float) else str(cell) for cell in cells)
        lines.append(f"| {' | '.join(texts)} |")
    return "\n".join(lines)


def parse_arguments():
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    add = parser.add_argument
    add("--model", nargs="+", choices=MODELS, default=["qwen3-30b-a3b"])
    add("--layers", type=int, help="default: all")
    add("--tokens", type=int, default=4096)
    add("--batch", type=int, default=1)
    add("--rank", type=int, default=16)
    add("--targets", nargs="+", default=["mixers", "experts"])
    add("--remat", nargs="+", choices=("yes", "no"), default=["yes", "no"])
    add("--format", choices=FORMATS, default="nvfp4", help="of linear layers beside the experts")
    add("--compile-only", action="store_true", help="say what memory a step takes, and run none")
    add("--commit", help="commit to record; default: what git reports")
    add("--output", type=pathlib.Path, help="path of the JSON file")
    return parser.parse_args()


def main():
    arguments, rows = parse_arguments(), []
    device = jax.devices()[0].device_kind
    path = arguments.output or HERE / "results" / f"train.{device.replace(' ', '-')}.json"
    result = {"device": device, **provenance(arguments.commit), "rows": rows}
    for name in arguments.model:
        whole = MODELS[name].cut(arguments.layers)
        model = build_model(whole, arguments.format).model
        nvfp4.add_lora(model, arguments.rank, targets=arguments.targets, rngs=nnx.Rngs(0))
        for remat in sorted(arguments.remat, reverse=True):
            row = measure(model, arguments, remat == "yes", whole.config["vocab_size"])
            rows.append({"model": name, "layers": whole.layers, "format": arguments.format, **row})
            print(rows[-1], file=sys.stderr, flush=True)
            path.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(show(rows))


if __name__ == "__main__":
    main()
