"""Time sums of small arrays over the GPUs of one host, and count wrong ones.

    python benchmarks/all_reduce.py [--devices 2] [--kb 4 64 512] [--check 1000000]

A program runs many sums, each of which waits for the one before. `peers` are sums through each
other's memory (`parallel.connect_peers`). `nccl` are those of XLA in float32. Both run by turns.
The time is that of a sum, with the multiplication by a constant that keeps its size. The loop of
`peers` is one CUDA graph. That of `nccl` is not, so that the host reads after each iteration
whether it goes on. An iteration therefore has several sums.

`--check` then runs so many sums of integers, with random delays of each GPU, and counts the wrong
ones. XLA makes CUDA graphs in the first two calls of a program, so that the sums are those of
several calls. Start the program with NCCL_NVLS_ENABLE=0, so that NVLink multicast stays off, and
with CUDA_MODULE_LOADING=EAGER, so that CUDA loads no kernel while a GPU waits in a sum. Writes
``benchmarks/results/all_reduce.DEVICE.json``.
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
from jax.sharding import AxisType
from provenance import provenance

from jax_nvfp4_moe.inference.generation import _ONE_GRAPH
from jax_nvfp4_moe.parallel import ExpertMesh, connect_peers, find_expert_mesh
from jax_nvfp4_moe.parallel.expert_mesh import TENSOR
from jax_nvfp4_moe.parallel.whole_steps import from_first_device

HERE = pathlib.Path(__file__).resolve().parent
STEPS, SUMS, ROUNDS = 50, 20, 7  # iterations of the loop, sums of each, and runs
CALLS = 4  # of the program that checks sums
TIMEOUT = 60.0  # seconds that a GPU waits for another one


def on_each(mesh: ExpertMesh, body):
    """Return a compiled function of rows, each of which is on one GPU."""
    rows = mesh.spec(TENSOR)
    mapped = mesh.shard_map(body, (rows,), rows)

    def run(x):
        return mapped(x * from_first_device(jnp.ones((), x.dtype), mesh))

    return jax.jit(run, compiler_options=_ONE_GRAPH)


def chain_sums(mesh: ExpertMesh, x):
    """Return `x` after all sums, each divided by the number of terms."""
    scale = jnp.asarray(1 / mesh.tensor, x.dtype)

    def step(_, x):
        for _ in range(SUMS):
            x = mesh.add_up(x, TENSOR) * scale
        return x

    return jax.lax.fori_loop(0, STEPS, step, x)


def measure(meshes, nbytes):
    """Return the median time of a sum in microseconds, by the name of the mesh."""
    runs = {
        name: on_each(mesh, functools.partial(chain_sums, mesh)) for name, mesh in meshes.items()
    }
    mesh = meshes["peers"]
    x = jax.device_put(jnp.ones((mesh.tensor, nbytes // 2), jnp.bfloat16), mesh.sharding(TENSOR))
    times = {name: [] for name in runs}
    for repeat in range(ROUNDS + 1):
        for name, run in runs.items():
            begin = time.perf_counter()
            run(x).block_until_ready()
            if repeat:  # the first one compiles
                times[name].append((time.perf_counter() - begin) / STEPS / SUMS * 1e6)
    return {name: float(np.median(each)) for name, each in times.items()}


def count_wrong(mesh: ExpertMesh, sums: int) -> list[int]:
    """Return how many sums were wrong on each GPU. Each GPU is late at random moments."""
    sizes = (4, 2048, 4100, 65536)

    def body(delays):
        rank = jax.lax.axis_index(mesh.name(TENSOR))
        ranks = mesh.tensor * (mesh.tensor + 1) // 2

        def step(i, carry):
            wrong, last = carry
            late = delays[0, i % delays.shape[1]]
            last = jax.lax.fori_loop(0, late, lambda _, x: jnp.sqrt(x + 1.0), last)
            for size in sizes:
                value = (jnp.arange(size, dtype=jnp.int32) + i) % 1009
                term = value.astype(jnp.float32) * (rank + 1) + jnp.minimum(last, 0.0)
                total = mesh.add_up(term, TENSOR)
                wrong += jnp.sum(total != (value * ranks).astype(jnp.float32))
                last = jnp.abs(total[0])
            return wrong, last

        start = jnp.int32(0), jnp.float32(0)
        steps = -(-sums // (CALLS * len(sizes)))
        return jax.lax.fori_loop(0, steps, step, start)[0].reshape(1)

    run, rng, shape = on_each(mesh, body), np.random.default_rng(0), (mesh.tensor, 997)
    wrong = np.zeros(mesh.tensor, np.int64)
    for _ in range(CALLS):
        delays = rng.integers(0, 100, shape) * (rng.random(shape) < 0.1)
        wrong += np.asarray(run(jnp.asarray(delays, jnp.int32)))
    return wrong.tolist()


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--devices", type=int, default=2)
    parser.add_argument("--kb", type=int, nargs="+", default=[4, 64, 512])
    parser.add_argument("--check", type=int, default=0, help="number of sums to check")
    parser.add_argument("--commit", help="commit to record; default: what git reports")
    arguments = parser.parse_args()
    devices = jax.devices()[: arguments.devices]
    kinds = (AxisType.Auto,)
    plain = jax.make_mesh((arguments.devices,), ("tensor",), kinds, devices=devices)
    meshes = {"peers": connect_peers(plain, timeout=TIMEOUT), "nccl": find_expert_mesh(plain)}
    rows = []
    for kb in arguments.kb:
        rows.append({"kb": kb, **measure(meshes, kb << 10)})
        print(json.dumps(rows[-1]), flush=True)
    wrong = count_wrong(meshes["peers"], arguments.check) if arguments.check else []
    result = {
        "device": devices[0].device_kind,
        "devices": arguments.devices,
        **provenance(arguments.commit),
        "us": rows,
        "checked": arguments.check,
        "wrong": wrong,
    }
    stem = f"all_reduce.{result['device'].replace(' ', '-')}.json"
    text = json.dumps(result, indent=1) + "\n"
    (HERE / "results" / stem).write_text(text, encoding="utf-8")
    print(text)
    sys.exit(1 if any(wrong) else 0)


if __name__ == "__main__":
    main()
