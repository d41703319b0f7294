"""Time decoding of a whole model with the sizes of Qwen3-30B-A3B and random weights, on one GPU.

    python benchmarks/decode.py [--batch 1 8 64] [--prompt 128] [--new 64] [--backend NAME]
        [--layers 48 ...] [--output FILE]

The model is made on the device. Its experts are random bytes, and the rest is bfloat16. The time of
a step is the time of `generate` for all new tokens, minus that for the first token, divided by the
number of steps. The floor of a step is the sum of two parts. The first is the floor of its expert
layers (`moe_cases.floor_us`), for the number of experts that uniform routing touches. The second is
the time to read each dense weight, and the keys and values, once. The bandwidth is that of a copy,
measured in the same run.

A profile of one more token tells what one step does on the device. It has the number of kernels,
their time, and the share of that time outside our kernels. Kernels that overlap count twice. It
also has the number of copies to the host, each of which is a wait. No program may compile after the
first round; otherwise the exit status is 1. XLA_FLAGS take effect and are recorded. Writes
``benchmarks/results/decode.DEVICE.json``.
"""

import argparse
import collections
import json
import os
import pathlib
import re
import sys
import tempfile
import time

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from layer import random_params
from moe_cases import Case, Ceilings, floor_us
from provenance import provenance
from rich.console import Console
from rich.table import Table

import jax_nvfp4_moe as nvfp4
from jax_nvfp4_moe.checkpoint import LinearWeights, Source
from jax_nvfp4_moe.checkpoint.synthetic import SyntheticSizes
from jax_nvfp4_moe.cli.timing import measure_ceilings
from jax_nvfp4_moe.models import qwen3_moe
from jax_nvfp4_moe.nn.building import Builder
from jax_nvfp4_moe.nn.filling import fill
from jax_nvfp4_moe.nn.settings import Settings
from jax_nvfp4_moe.scheme import Scheme

HERE = pathlib.Path(__file__).resolve().parent
ROUNDS = 5
# JAX reports this event once for each program that it compiles.
COMPILED = "/jax/core/compile/backend_compile_duration"
OUR_KERNELS = "nvfp4"  # the C++ namespace of our kernels, in mangled names too
KINDS = (  # kinds of other kernels, by name; the first match counts
    ("copy", re.compile(r"memcpy|memset|copy|transpose", re.IGNORECASE)),
    ("matmul", re.compile(r"gemm|gemv|nvjet|cutlass|cublas|xmma|dot", re.IGNORECASE)),
    ("other", re.compile("")),
)


class RandomWeights:
    """A `WeightTable` of a model of random values, which are made on the device."""

    def __init__(self, case: Case, dtype=jnp.bfloat16):
        self._case = case
        self._dtype = dtype
        self._arrays = 0

    def has_under(self, prefix):
        """Return True: every weight exists."""
        return True

    def array(self, name, shape, *, dtype=None, stored=None):
        shape, dtype = tuple(shape), jnp.dtype(dtype or self._dtype)
        self._arrays += 1
        seed = self._arrays

        def make():
            if len(shape) == 1:  # a norm
                return jnp.ones(shape, dtype)
            return _normal(jax.random.key(seed), shape, dtype)

        return _source(name, make)

    def linear(self, prefix, n, k, *, bias=False):
        del bias  # this model has no biases
        weight = self.array(prefix, (n, k))
        return _source(prefix, lambda: LinearWeights(weight.read(None)))

    def experts(self, prefix, num_experts, hidden, intermediate):
        del num_experts, hidden, intermediate  # the case has the same sizes
        layer = int(re.findall(r"\d+", prefix)[0])
        return _source(prefix, lambda: random_params(self._case, seed=layer), Scheme.W4A16)

    def ignore(self, prefix, reason):
        """Do nothing: no weight is left over."""

    def raise_problems(self):
        """Do nothing: values that are made here have no faults."""


def _source(name, make, scheme=None):
    return Source(name, jax.eval_shape(make), lambda reader: make(), scheme)


def _normal(key, shape, dtype):
    values = jax.jit(jax.random.normal, static_argnums=(1, 2))(key, shape, dtype)
    return values * jnp.asarray(shape[1] ** -0.5, dtype)


def build_model(sizes: SyntheticSizes, backend: str | None):
    """Make the model, one layer after the other."""
    config = qwen3_moe.read_config(sizes.config())
    settings = Settings(nvfp4.Target.current(), backend=backend)
    weights = RandomWeights(expert_case(sizes))
    make = Builder(weights, qwen3_moe.KEYS, settings)
    model = nnx.eval_shape(lambda: qwen3_moe.build_model(config, make))
    fill(model, "", make.parts, weights, settings)
    jax.block_until_ready(nnx.state(model))
    return model


def expert_case(sizes: SyntheticSizes) -> Case:
    return Case("decode", sizes.hidden, sizes.intermediate, sizes.num_experts, sizes.top_k)


def expected_active(case: Case, tokens: int) -> float:
    """Return the mean number of experts that uniform routing touches."""
    return case.experts * (1 - (1 - case.top_k / case.experts) ** tokens)


def dense_bytes(model) -> int:
    """Return the bytes of weights that a step reads whole: not experts, and not the embedding."""
    leaves = jax.tree.leaves(nnx.state(model, nnx.Param))
    return sum(leaf.nbytes for leaf in leaves) - model.embedding.get_value().nbytes


def cache_bytes(sizes: SyntheticSizes, batch: int, length: float) -> float:
    """Return the bytes of keys and values of `length` tokens in each row, in bfloat16."""
    return 2 * 2 * sizes.layers * batch * length * sizes.kv_heads * sizes.head_dim


def step_floor(sizes, batch, length, dense, ceilings) -> dict[str, float]:
    """Return the lower bounds of the time of a step, in microseconds, by their causes."""
    case = expert_case(sizes)
    layer = floor_us(case, batch, expected_active(case, batch), ceilings)
    bandwidth = ceilings.copy_tb_per_s * 1e6  # bytes per microsecond
    parts = {
        "experts": sizes.layers * layer,
        "dense": dense / bandwidth,
        "cache": cache_bytes(sizes, batch, length) / bandwidth,
    }
    return parts | {"sum": sum(parts.values())}


class Compilations:
    """Counts the programs that JAX compiles."""

    def __init__(self):
        self.count = 0
        jax.monitoring.register_event_duration_secs_listener(self._listen)

    def _listen(self, event, _seconds, **_):
        self.count += event == COMPILED


def time_generate(model, prompt, new) -> float:
    """Return the seconds that the generation of `new` tokens takes."""
    begin = time.perf_counter()
    jax.block_until_ready(nvfp4.generate(model, prompt, max_new_tokens=new))
    return time.perf_counter() - begin


def profile_generate(model, prompt, new) -> tuple[collections.Counter, collections.Counter]:
    """Return how often each kernel or copy ran on the GPU, and for how many nanoseconds."""
    counts, nanoseconds = collections.Counter(), collections.Counter()
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0  # events of the host are not used
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder, profiler_options=options):
            time_generate(model, prompt, new)
        for path in pathlib.Path(folder).rglob("*.xplane.pb"):
            for name, duration in _gpu_events(jax.profiler.ProfileData.from_file(str(path))):
                counts[name] += 1
                nanoseconds[name] += duration
    return counts, nanoseconds


def _gpu_events(profile):
    """Yield the name and the duration of each event on the streams of GPUs."""
    for plane in profile.planes:
        for line in plane.lines if plane.name.startswith("/device:GPU") else []:
            if line.name.startswith("Stream"):  # other lines repeat the same time, by operation
                for event in line.events:
                    yield event.name, event.duration_ns


def kind_of(name: str) -> str:
    """Return "ours", or the kind of another kernel or copy."""
    if OUR_KERNELS in name:
        return "ours"
    return next(kind for kind, pattern in KINDS if pattern.search(name))


def describe_step(two, one) -> dict:
    """Return what one step does on the device, from profiles of runs for two tokens and for one."""
    counts, nanoseconds = (
        {name: longer[name] - shorter[name] for name in longer}
        for longer, shorter in zip(two, one, strict=True)
    )
    by_kind = collections.Counter()
    for name, duration in nanoseconds.items():
        by_kind[kind_of(name)] += duration / 1e3
    busy = sum(by_kind.values())
    top = sorted(nanoseconds, key=nanoseconds.__getitem__, reverse=True)[:20]
    return {
        "busy_us": busy,
        "outside_our_kernels": 1 - by_kind["ours"] / busy if busy else None,
        "us_by_kind": dict(by_kind),
        "launches": sum(counts.values()),
        "copies_to_host": sum(count for name, count in counts.items() if "D2H" in name),
        "longest": [
            {"name": name, "us": nanoseconds[name] / 1e3, "count": counts[name]} for name in top
        ],
    }


def measure(model, sizes, batch, arguments, ceilings, compilations) -> dict:
    """Return the row of `batch` prompts."""
    rng = np.random.default_rng(batch)
    prompt = rng.integers(0, sizes.vocab, (batch, arguments.prompt), np.int32)
    steps = arguments.new - 1
    for new in (1, 2, arguments.new):
        time_generate(model, prompt, new)
    compiled = compilations.count
    firsts, alls = np.array(
        [[time_generate(model, prompt, new) for new in (1, arguments.new)] for _ in range(ROUNDS)]
    ).T
    compiled = compilations.count - compiled
    times = (alls - firsts) / steps * 1e6
    step_us = float(np.median(times))
    length = arguments.prompt + arguments.new / 2
    floor = step_floor(sizes, batch, length, dense_bytes(model), ceilings)
    # If a loop is one CUDA graph, the profiler sees only its first iteration.
    two, one = (profile_generate(model, prompt, new) for new in (2, 1))
    return {
        "batch": batch,
        "step_us": step_us,
        "low": float(min(times)),
        "high": float(max(times)),
        "tokens_per_s": batch / step_us * 1e6,
        "first_token_ms": float(np.median(firsts)) * 1e3,
        "floor_us": floor,
        "over_floor": step_us / floor["sum"],
        "compilations": compiled,
        "device": describe_step(two, one),
    }


def make_table(rows, title):
    table = Table(title=title)
    headings = ("batch", "tokens/s", "us a step", "floor us", "over floor", "device busy us")
    for heading in (*headings, "outside our kernels", "launches", "copies to host", "compiled"):
        table.add_column(heading, justify="right")
    for row in rows:
        device = row["device"]
        outside = device["outside_our_kernels"]
        table.add_row(
            f"{row['batch']}",
            f"{row['tokens_per_s']:.0f}",
            f"{row['step_us']:.0f}",
            f"{row['floor_us']['sum']:.0f}",
            f"{row['over_floor']:.2f}",
            f"{device['busy_us']:.0f}",
            "-" if outside is None else f"{outside:.0%}",
            f"{device['launches']:.0f}",
            f"{device['copies_to_host']:.2f}",
            f"{row['compilations']}",
        )
    return table


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8, 64])
    parser.add_argument("--prompt", type=int, default=128, help="tokens of each prompt")
    parser.add_argument("--new", type=int, default=64, help="new tokens, at least 2")
    parser.add_argument("--backend", help="default: the backend for this device")
    add_sizes(parser)
    parser.add_argument("--commit", help="commit to record; default: what git reports")
    parser.add_argument("--output", type=pathlib.Path, help="default: results/decode.DEVICE.json")
    parser.add_argument("--small-ceilings", action="store_true", help=argparse.SUPPRESS)
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


def main():
    arguments = parse_arguments()
    sizes, compilations = sizes_of(arguments), Compilations()
    small = {"gibibytes": 1 / 64, "side": 256} if arguments.small_ceilings else {}
    ceilings = measure_ceilings(**small)
    model = build_model(sizes, arguments.backend)
    name = jax.devices()[0].device_kind
    result = {
        "device": name,
        **provenance(arguments.commit),
        "xla_flags": os.environ.get("XLA_FLAGS", ""),
        "sizes": vars(sizes),
        "prompt": arguments.prompt,
        "new": arguments.new,
        "ceilings": ceilings,
        "rows": [],
    }
    path = arguments.output or HERE / "results" / f"decode.{name.replace(' ', '-')}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    for batch in arguments.batch:
        row = measure(model, sizes, batch, arguments, Ceilings(**ceilings), compilations)
        result["rows"].append(row)
        path.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    table = make_table(result["rows"], f"decoding on {name}, {arguments.prompt} tokens of prompt")
    Console(width=None if sys.stdout.isatty() else 160).print(table)
    sys.exit(1 if any(row["compilations"] for row in result["rows"]) else 0)


if __name__ == "__main__":
    main()
