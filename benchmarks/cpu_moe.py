"""Time the CPU expert layer against the floor of this machine and against ggml.

    python benchmarks/cpu_moe.py [--ggml FOLDER --ggml-include FOLDER] [--tokens 1 4 16 64 256]

Prints a table and writes it to ``benchmarks/results/cpu_moe.json``. The sizes are those of
Qwen3-30B-A3B with 16 of its 128 experts: hidden size 2048, intermediate size 768, top 8, gated
SiLU, bfloat16. Calls cycle through several layers, so that weights come from memory and not from a
cache.

The floor of a row is the longer of two times. One is the time to read the weights that its tokens
touch, at the measured read bandwidth. The other is the time of its arithmetic, at the measured peak
of the instruction set. Both are measured in the same run.

`--ggml` is the folder with libggml.so, libggml-cpu.so and libggml-base.so, and `--ggml-include` the
folder of its headers. The source is in the ``llama-cpp-python`` sdist, in the folder
``vendor/llama.cpp/ggml``:

    cmake -S ggml -B build -DCMAKE_BUILD_TYPE=Release -DGGML_NATIVE=ON && cmake --build build
"""

import argparse
import json
import os
import pathlib
import platform
import subprocess
import tempfile
import time

import jax
import jax.numpy as jnp
import numpy as np

from jax_nvfp4_moe.backends import _ffi
from jax_nvfp4_moe.backends.launch_facts import workspace_bytes_of_rows
from jax_nvfp4_moe.numerics.layouts import find_layout, to_layout
from jax_nvfp4_moe.testing import random_moe_params, random_routing

HERE = pathlib.Path(__file__).parent
HIDDEN, INTERMEDIATE, EXPERTS, TOP_K = 2048, 768, 16, 8
EXPERT_BYTES = 3 * HIDDEN * INTERMEDIATE * 9 // 16
# The measured peaks of each instruction set; the largest bounds its arithmetic.
PEAKS = {
    "amx": ("amx_gflops",),
    "avx512": ("fma512_gflops", "bf16_gflops"),
    "avx2": ("fma256_gflops",),
    "scalar": ("fma256_gflops",),
}


def measure_peaks(folder, threads):
    """Compile and run ``peers/cpu_peaks.cc``; return its figures in GB/s and GFLOP/s."""
    program = folder / "cpu_peaks"
    source = HERE / "peers" / "cpu_peaks.cc"
    subprocess.run(["g++", "-O3", "-march=native", "-pthread", source, "-o", program], check=True)
    peaks = {}
    for _ in range(3):  # the best run counts: other programs on the machine only slow runs down
        lines = subprocess.run(
            [program, str(threads), "300"], check=True, capture_output=True, text=True
        ).stdout.split()
        for name, value in zip(lines[::2], map(float, lines[1::2]), strict=True):
            peaks[name] = max(value, peaks.get(name, 0.0))
    return peaks


def measure_ggml(folder, library, include, tokens, layers, threads, rounds):
    """Compile and run ``peers/ggml_moe.c``; return microseconds by number of tokens."""
    program = folder / "ggml_moe"
    source = HERE / "peers" / "ggml_moe.c"
    libraries = ["-lggml", "-lggml-cpu", "-lggml-base", f"-Wl,-rpath,{library}"]
    subprocess.run(
        ["gcc", "-O2", f"-I{include}", source, f"-L{library}", *libraries, "-o", program],
        check=True,
    )
    sizes = (HIDDEN, INTERMEDIATE, EXPERTS, TOP_K, layers, threads, rounds, *tokens)
    lines = subprocess.run(
        [program, *map(str, sizes)], check=True, capture_output=True, text=True
    ).stdout.split()
    return {int(t): float(us) for t, us in zip(lines[::2], lines[1::2], strict=True)}


def make_layer(seed):
    """Return the weight operands of one layer in the layout of the CPU kernels."""
    params = random_moe_params(
        jax.random.key(seed), num_experts=EXPERTS, hidden=HIDDEN, intermediate=INTERMEDIATE
    )
    layout = find_layout("cpu_16x16")
    no_scale, no_bias = jnp.zeros(0, jnp.float32), jnp.zeros((0, 0), jnp.float32)
    gate_up = to_layout(params.gate_up.packed, params.gate_up.block_scale, layout)
    down = to_layout(params.down.packed, params.down.block_scale, layout)
    return (
        *gate_up,
        params.gate_up.global_scale,
        no_scale,
        no_bias,
        *down,
        params.down.global_scale[:, None],
        no_scale,
        no_bias,
    )


def layer_call(tokens, isa):
    """Return the jitted expert layer ``(x, weights, ids, expert_weights) -> y``."""
    sizes = TOP_K, EXPERTS, HIDDEN, INTERMEDIATE, True, 2
    size = workspace_bytes_of_rows("nvfp4_moe_w4a16_cpu", tokens, *sizes)
    outputs = (
        jax.ShapeDtypeStruct((tokens, HIDDEN), jnp.bfloat16),
        jax.ShapeDtypeStruct((size,), jnp.uint8),
    )

    @jax.jit
    def call(x, weights, ids, expert_weights):
        return jax.ffi.ffi_call("nvfp4_moe_w4a16_cpu", outputs)(
            x,
            *weights,
            ids,
            expert_weights,
            activation="silu",
            alpha=np.float32(1),
            beta=np.float32(0),
            limit=np.float32(np.inf),
            activation_scale="none",
            weight_on_input=False,
            intermediate=np.int64(INTERMEDIATE),
            isa=isa,
        )[0]

    return call


def time_layer(layers, tokens, isa, rounds):
    """Return (microseconds of the best round's mean call, mean number of experts touched)."""
    keys = jax.random.split(jax.random.key(tokens), len(layers))
    routing = [random_routing(key, tokens, EXPERTS, TOP_K) for key in keys]
    x = jax.random.normal(keys[0], (tokens, HIDDEN), jnp.bfloat16)
    call, best = layer_call(tokens, isa), np.inf
    for _ in range(rounds + 1):  # the first round compiles
        begin = time.perf_counter()
        for weights, (ids, expert_weights) in zip(layers, routing, strict=True):
            call(x, weights, ids, expert_weights).block_until_ready()
        best = min(best, (time.perf_counter() - begin) / len(layers))
    return best * 1e6, np.mean([len(np.unique(ids)) for ids, _ in routing])


def describe(isa, tokens, microseconds, experts, peaks, ggml):
    """Return one row of the table."""
    read = experts * EXPERT_BYTES
    flops = 6 * HIDDEN * INTERMEDIATE * TOP_K * tokens
    peak = max(peaks.get(name, 0.0) for name in PEAKS[isa])
    floor = 1e-3 * max(read / peaks["read_gbps"], flops / peak)
    row = {
        "isa": isa,
        "tokens": tokens,
        "us": round(microseconds, 1),
        "gb_per_s": round(read / microseconds / 1e3, 2),
        "gflop_per_s": round(flops / microseconds / 1e3, 1),
        "floor_us": round(floor, 1),
        "of_floor": round(floor / microseconds, 3),
    }
    if tokens in ggml:
        row |= {"ggml_us": ggml[tokens], "over_ggml": round(ggml[tokens] / microseconds, 2)}
    return row


def provenance(peaks, arguments):
    """Return the facts that make figures reproducible: machine, versions and commit."""
    cpuinfo = pathlib.Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    names = [line for line in cpuinfo if "model name" in line]
    commit = subprocess.run(
        ["git", "rev-parse", "HEAD"], cwd=HERE, capture_output=True, text=True, check=False
    )
    return {
        "device": names[0].split(":")[1].strip() if names else platform.processor(),
        "threads": arguments.threads,
        "layers": arguments.layers,
        "peaks": peaks,
        "jax": jax.__version__,
        "jaxlib": jax.lib.__version__,
        "python": platform.python_version(),
        "commit": commit.stdout.strip(),
    }


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 4, 16, 64, 256])
    parser.add_argument(
        "--isa", nargs="+", default=None, help="default: all of this CPU, except scalar"
    )
    parser.add_argument(
        "--layers", type=int, default=6, help="number of layers, of 42 MB of weights each"
    )
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--ggml", type=pathlib.Path, help="folder of libggml*.so")
    parser.add_argument("--ggml-include", type=pathlib.Path, help="folder of ggml.h")
    parser.add_argument("--out", type=pathlib.Path, default=HERE / "results" / "cpu_moe.json")
    return parser.parse_args()


def main():
    arguments = parse_arguments()
    if reason := _ffi.why_unavailable("_nvfp4_cpu"):
        raise SystemExit(reason)
    isas = _ffi.load("_nvfp4_cpu").isa_levels()
    layers = [jax.block_until_ready(make_layer(seed)) for seed in range(arguments.layers)]
    with tempfile.TemporaryDirectory() as folder:
        peaks = measure_peaks(pathlib.Path(folder), arguments.threads)
        ggml = {}
        if arguments.ggml:
            ggml = measure_ggml(
                pathlib.Path(folder),
                arguments.ggml.resolve(),
                arguments.ggml_include,
                arguments.tokens,
                arguments.layers,
                arguments.threads,
                arguments.rounds,
            )
    print(*(f"{name} {value:.1f}" for name, value in peaks.items()), sep=", ")
    rows = []
    for isa in arguments.isa or [isa for isa in isas if isa != "scalar"]:
        for tokens in arguments.tokens:
            timed = time_layer(layers, tokens, isa, arguments.rounds)
            rows.append(describe(isa, tokens, *timed, peaks, ggml))
            if len(rows) == 1:
                print(*(f"{name:>11}" for name in rows[0]))
            print(*(f"{value:>11}" for value in rows[-1].values()), flush=True)
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    result = {**provenance(peaks, arguments), "rows": rows}
    arguments.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
