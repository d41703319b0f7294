"""Time decoding of whole models with random weights, on one GPU.

    python benchmarks/decode.py [--model qwen3-30b-a3b ...] [--format nvfp4 bfloat16 ...]
        [--cells 1x128 1x32768 16x128 64x1024] [--new 64] [--layers N] [--backend NAME]
        [--fp8-cache] [--llama FOLDER] [--transformers] [--output FILE]
        [--draft mtp|guess] [--draft-tokens 1 2 3 5 7] [--draft-head exact nvfp4 fp8]
        [--at-once 5]

A cell is BATCHxPROMPT. `--format` is that of the linear layers beside the experts; `whole_model.py`
has the models. With `--fp8-cache`, caches are in FP8 instead of bfloat16. Prompts are run once.
Each round then copies their cache and runs the decoding loop of `generate` for all new tokens but
the first. The time of a step is that of the loop, divided by its number of steps. The floor of a
step is the sum of four parts: the floor of its expert layers (`moe_cases.floor_us`), for the number
of experts that uniform routing touches; the time to read each other weight once; the time to read
the filled part of the cache; and the time to read and write recurrent states. The bandwidth is that
of a copy, measured in the same run.

A profile of a loop with one step tells what a step does on the device. It has the number of
kernels, their time, and the share of that time outside our kernels. Kernels that overlap count
twice. It also has the number of copies to the host, each of which is a wait. No program may compile
after the first round; otherwise the exit status is 1. XLA_FLAGS take effect and are recorded. A row
has a digest of its new tokens, which says whether two runs had equal results. For such runs add
``--xla_gpu_autotune_level=0`` to XLA_FLAGS: otherwise XLA chooses its own products by their time.

With `--draft`, steps with drafts are timed in the same cells: "mtp" drafts with random drafting
layers, and "guess" with tokens that take no time, so that a step is that of verifying alone. The
drafts of random weights are hardly ever right. So the second table has the time of a step, and the
tokens a second that it gives at published acceptances (`STATED`), which were not measured here.
The programs of a cell are compiled side by side, `--at-once` of them, each with states of its own
on the GPU. With "mtp", `--draft-head` lists the heads that make drafts, as for `load_model`:
"exact", or a copy in NVFP4 or FP8. By default it is the copy in NVFP4.

`--llama` and `--transformers` time the same cells with llama.cpp and with transformers
(`model_peers.py`). The table then says how many times as fast as each of them a step is. Writes
``benchmarks/results/decode.DEVICE.json``.
"""

import argparse
import collections
import concurrent.futures
import functools
import hashlib
import json
import os
import pathlib
import re
import sys
import tempfile
import time

import jax
import jax.numpy as jnp
import model_peers
import numpy as np
from compilations import Compilations
from moe_cases import Ceilings
from provenance import provenance
from rich.console import Console
from rich.table import Table
from whole_model import FORMATS, MODELS, build_model, step_floor

from jax_nvfp4_moe.cli.timing import measure_ceilings
from jax_nvfp4_moe.inference import drafting
from jax_nvfp4_moe.inference.drafting import Drafting
from jax_nvfp4_moe.inference.generation import decode, start_decoding
from jax_nvfp4_moe.inference.sampling import make_sampling
from jax_nvfp4_moe.models.draft_head import DRAFT_HEADS, set_draft_head

HERE = pathlib.Path(__file__).resolve().parent
ROUNDS = 5
# Accepted tokens of a step, with the token that each step yields, by the number of drafts:
# Qwen3.5-397B-NVFP4 with its drafting layers, coding prompts with thinking, in vLLM. Source:
# `golden_al_distribution` of InferenceX.
STATED = {1: 1.93, 2: 2.73, 3: 3.39, 5: 4.41, 8: 5.21}
OUR_KERNELS = "nvfp4"  # the C++ namespace of our kernels, in mangled names too
KINDS = (  # kinds of other kernels, by name; the first match counts
    ("copy", re.compile(r"memcpy|memset|copy|transpose", re.IGNORECASE)),
    ("matmul", re.compile(r"gemm|gemv|nvjet|cutlass|cublas|xmma|dot", re.IGNORECASE)),
    ("other", re.compile("")),
)


class FilledCache:
    """The state of the decoding loop after a prompt.

    Attributes:
      first_token_s: seconds until the first new token, the second time that the prompt was run.
    """

    def __init__(self, model, prompt, new: int):
        """Run the prompt, with room for `new` tokens. The first time, programs are compiled."""
        self._sampling = make_sampling(0.0, None, 1.0, (), None)
        self._state = None
        for _ in range(2):
            self._state = None  # before the next cache is made
            begin = time.perf_counter()
            started = start_decoding(model, prompt, None, new, self._sampling, None)
            self._model, self._state = jax.block_until_ready(started)
            self.first_token_s = time.perf_counter() - begin

    def copy(self):
        """Return a copy of the state. The loop takes its memory."""
        return jax.block_until_ready(jax.tree.map(jnp.copy, self._state))

    def run_steps(self, state, count: int):
        """Run `count` steps from the copy `state` on, and return the state after them."""
        state = decode(self._model, self._sampling, state, np.int32(1 + count))
        return jax.block_until_ready(state)

    def new_tokens(self, count: int) -> np.ndarray:
        """Return the tokens after the prompt and `count` steps, ``[b, 1 + count]``."""
        return np.asarray(self.run_steps(self.copy(), count).tokens)[:, : 1 + count]

    def time_steps(self, count: int) -> float:
        """Return the seconds that `count` steps take."""
        state = self.copy()
        begin = time.perf_counter()
        self.run_steps(state, count)
        return time.perf_counter() - begin


def profile_device(run) -> tuple[collections.Counter, collections.Counter]:
    """Return how often each kernel or copy runs on the GPU in a call, and for how many ns.

    The call waits for its result. Of a loop in a CUDA graph, only the first step is seen.
    """
    counts, nanoseconds = collections.Counter(), collections.Counter()
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0  # events of the host are not used
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder, profiler_options=options):
            run()
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


def describe_device(counts, nanoseconds) -> dict:
    """Return what a call does on the device, from its profile."""
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


def measure(whole, built, cell, arguments, ceilings, compilations) -> dict:
    """Return the row of one cell, ``(batch, tokens of the prompt)``."""
    batch, length = cell
    prompt = np.random.default_rng(batch).integers(0, whole.config["vocab_size"], cell, np.int32)
    steps = arguments.new - 1
    cache = FilledCache(built.model, prompt, arguments.new)
    for count in (1, steps):
        cache.time_steps(count)
    compiled = compilations.count
    times = [cache.time_steps(steps) / steps * 1e6 for _ in range(ROUNDS)]
    compiled = compilations.count - compiled
    step_us = float(np.median(times))
    floor = step_floor(whole, built, batch, length + arguments.new / 2, ceilings)
    state = cache.copy()
    return {
        "batch": batch,
        "prompt": length,
        "step_us": step_us,
        "low": float(min(times)),
        "high": float(max(times)),
        "tokens_per_s": batch / step_us * 1e6,
        "first_token_ms": cache.first_token_s * 1e3,
        "floor_us": floor,
        "over_floor": step_us / floor["sum"],
        "compilations": compiled,
        "tokens_sha256": hashlib.sha256(cache.new_tokens(steps).tobytes()).hexdigest(),
        "device": describe_device(*profile_device(functools.partial(cache.run_steps, state, 1))),
    }


class Guess:
    """A drafter for `DRAFTERS` that takes no time: it guesses the same tokens in each step."""

    NEEDS_HIDDEN = False

    def begin(self, ids, lengths, room):
        del ids, room
        return lengths

    def record(self, memory, new, emitted, hidden):
        del new, emitted, hidden
        return memory

    def propose(self, model, memory, count):
        del model
        return jnp.broadcast_to(jnp.arange(count, dtype=jnp.int32), (len(memory), count)), memory


def measure_drafts(whole, built, cell, arguments, plain_us) -> list[dict]:
    """Return the time of a step for each head that drafts and each number of drafts."""
    if arguments.draft != "mtp":
        return measure_draft_counts(whole, built.model, cell, arguments, plain_us)
    rows = []
    for head in arguments.draft_head:
        set_draft_head(built.model, head, built.settings)
        found = measure_draft_counts(whole, built.model, cell, arguments, plain_us)
        rows += [{**row, "draft_head": head} for row in found]
    return rows


def measure_draft_counts(whole, model, cell, arguments, plain_us) -> list[dict]:
    """Return the time of a step for each number of drafts.

    The programs of all numbers are compiled, several side by side, before the first one is timed.
    """
    prompt = np.random.default_rng(cell[0]).integers(0, whole.config["vocab_size"], cell, np.int32)

    def start(count):
        how = Drafting(arguments.draft, count, False)
        return start_drafts(model, prompt, arguments.new, how)

    with concurrent.futures.ThreadPoolExecutor(arguments.at_once) as threads:
        list(threads.map(lambda count: time_loop(start(count)), arguments.draft_tokens))
    return [draft_row(arguments.draft, count, start, plain_us) for count in arguments.draft_tokens]


def start_drafts(model, prompt, new: int, how: Drafting):
    """Run a prompt for a loop with drafts. Return a function of the number of tokens to stop at.

    The function runs the loop, which takes the memory of the state, and returns its last state.
    """
    sampling = make_sampling(0.0, None, 1.0, (), None)
    started = start_decoding(model, prompt, None, new, sampling, None, how)
    flat, state = jax.block_until_ready(started)

    def run(tokens=new):
        return jax.block_until_ready(decode(flat, sampling, state, np.int32(tokens)))

    return run


def time_loop(run):
    """Return the seconds of a loop that `start_drafts` started, and its last state."""
    begin = time.perf_counter()
    state = run()
    return time.perf_counter() - begin, state


def draft_row(draft: str, count: int, start, plain_us: float) -> dict:
    """Return the row of a number of drafts, whose programs have run once."""
    time_loop(start(count))  # the second run of a program makes its CUDA graph
    times = []
    for _ in range(ROUNDS):
        seconds, state = time_loop(start(count))
        times.append(seconds / (int(state.steps.max()) - 1) * 1e6)
    step_us = float(np.median(times))
    batch = len(state.steps)
    stated = STATED.get(count)
    one_step = functools.partial(start(count), 2)  # the prompt has made the first token
    return {
        "draft": draft,
        "drafts": count,
        "step_us": step_us,
        "low": min(times),
        "high": max(times),
        "over_plain_step": step_us / plain_us,
        "accepted": float(state.accepted.sum() / state.steps.sum()),
        "stated_tokens_a_step": stated,
        "tokens_per_s_as_stated": None if stated is None else batch * stated / step_us * 1e6,
        "device": describe_device(*profile_device(one_step)),
    }


def make_draft_table(result, title):
    table = Table(title=title)
    headings = ("model", "batch", "prompt", "head", "drafts", "us a step", "over a plain step")
    for heading in (*headings, "tokens/s plain", "tokens/s at the stated acceptance"):
        table.add_column(heading, justify="right")
    for row in result["rows"]:
        for each in row["drafts"]:
            stated = each["tokens_per_s_as_stated"]
            table.add_row(
                row["model"],
                f"{row['batch']}",
                f"{row['prompt']}",
                each.get("draft_head", "-"),
                f"{each['drafts']}",
                f"{each['step_us']:.0f}",
                f"{each['over_plain_step']:.2f}",
                f"{row['tokens_per_s']:.0f}",
                "-" if stated is None else f"{stated:.0f} ({each['stated_tokens_a_step']})",
            )
    return table


def make_table(result, title):
    peers, rows = result["peers"], result["rows"]
    table = Table(title=title, caption=model_peers.caption(peers))
    headings = ("model", "format", "batch", "prompt", "tokens/s", "us a step", "floor us")
    headings += ("over floor", "device busy us", "outside our kernels", "launches")
    headings += ("copies to host", "compiled", *model_peers.headings(peers))
    for heading in headings:
        table.add_column(heading, justify="right")
    for row in rows:
        device = row["device"]
        outside = device["outside_our_kernels"]
        table.add_row(
            row["model"],
            row["format"],
            f"{row['batch']}",
            f"{row['prompt']}",
            f"{row['tokens_per_s']:.0f}",
            f"{row['step_us']:.0f}",
            f"{row['floor_us']['sum']:.0f}",
            f"{row['over_floor']:.2f}",
            f"{device['busy_us']:.0f}",
            "-" if outside is None else f"{outside:.0%}",
            f"{device['launches']:.0f}",
            f"{device['copies_to_host']:.2f}",
            f"{row['compilations']}",
            *model_peers.cells_of(peers, row),
        )
    return table


def read_cell(text: str) -> tuple[int, int]:
    """Return batch and length of the prompt of a cell such as "16x128"."""
    batch, length = map(int, text.split("x"))
    return batch, length


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_models(parser)
    cells = [(1, 128), (1, 32768), (16, 128), (64, 1024)]
    parser.add_argument("--cells", type=read_cell, nargs="+", default=cells, metavar="BATCHxPROMPT")
    parser.add_argument("--new", type=int, default=64, help="new tokens, at least 2")
    parser.add_argument("--draft", choices=("mtp", "guess"), help="default: no drafts")
    parser.add_argument("--draft-tokens", type=int, nargs="+", default=[1, 2, 3, 5, 7])
    parser.add_argument("--draft-head", nargs="+", choices=DRAFT_HEADS, default=["nvfp4"])
    parser.add_argument("--at-once", type=int, default=5, help="programs compiled side by side")
    parser.add_argument("--output", type=pathlib.Path, help="default: results/decode.DEVICE.json")
    return parser.parse_args()


def add_models(parser):
    """Add the options that `prefill.py` has too."""
    model_peers.add_peers(parser)
    parser.add_argument("--model", nargs="+", choices=MODELS, default=["qwen3-30b-a3b"])
    parser.add_argument("--format", nargs="+", choices=FORMATS, default=["nvfp4", "bfloat16"])
    parser.add_argument("--layers", type=int, help="default: all")
    parser.add_argument("--backend", help="default: the backend for this device")
    parser.add_argument("--fp8-cache", action="store_true", help="keys and values in FP8")
    parser.add_argument("--commit", help="commit to record; default: what git reports")
    parser.add_argument("--small-ceilings", action="store_true", help=argparse.SUPPRESS)


def start_result(arguments, peers) -> dict:
    """Return the facts of this run, with the ceilings that it measures, and no rows of ours."""
    small = {"gibibytes": 1 / 64, "side": 256} if arguments.small_ceilings else {}
    return {
        "device": jax.devices()[0].device_kind,
        **provenance(arguments.commit),
        "xla_flags": os.environ.get("XLA_FLAGS", ""),
        "ceilings": measure_ceilings(**small),
        "peers": peers,
        "rows": [],
    }


def each_model(arguments):
    """Yield a model, the format of its linear layers, and the model with its weights."""
    for name in arguments.model:
        for linear_format in arguments.format:
            whole = MODELS[name].cut(arguments.layers)
            options = {"backend": arguments.backend, "fp8_cache": arguments.fp8_cache}
            options["drafts"] = getattr(arguments, "draft", None) == "mtp"
            yield whole, linear_format, build_model(whole, linear_format, **options)


def main():
    arguments, compilations = parse_arguments(), Compilations()
    drafting.DRAFTERS = {**drafting.DRAFTERS, "guess": Guess()}
    peers = model_peers.time_peers(arguments, arguments.cells, arguments.new)
    result = start_result(arguments, peers)
    name = result["device"]
    path = arguments.output or HERE / "results" / f"decode.{name.replace(' ', '-')}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    ceilings = Ceilings(**result["ceilings"])
    for whole, linear_format, built in each_model(arguments):
        for cell in arguments.cells:
            row = measure(whole, built, cell, arguments, ceilings, compilations)
            head = {"model": whole.name, "layers": whole.layers, "format": linear_format}
            head |= {"fp8_cache": arguments.fp8_cache}
            times = model_peers.times_as_fast(
                peers, whole.name, *cell, row["step_us"] / 1e6, "step_s"
            )
            drafts = []
            if arguments.draft:
                drafts = measure_drafts(whole, built, cell, arguments, row["step_us"])
            result["rows"].append(head | row | {"times": times, "drafts": drafts})
            path.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
        del built  # its memory, before the next model is made
    table = make_table(result, f"decoding on {name}, {arguments.new} new tokens")
    console = Console(width=None if sys.stdout.isatty() else 160)
    console.print(table)
    if arguments.draft:
        console.print(make_draft_table(result, f"steps with drafts ({arguments.draft}) on {name}"))
    sys.exit(1 if any(row["compilations"] for row in result["rows"]) else 0)


if __name__ == "__main__":
    main()
