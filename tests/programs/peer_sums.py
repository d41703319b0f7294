"""Run sums of connected GPUs for `test_cuda_all_reduce.py`.

    python peer_sums.py smoke INDEX
    python peer_sums.py processes ADDRESS INDEX
    python peer_sums.py alone INDEX

With ``smoke``, two GPUs run a sum of 16 bytes, and the same sum again many times. It prints
when each step has ended; INDEX has no effect. With ``processes``, this is one of two processes,
each of which has one GPU. It prints "equal" if 1000 sums are right. With ``alone``, one GPU of two
runs a sum, and waits in vain for the other one. The program prints why the sum has failed, and the
error of JAX.
"""

import os
import sys
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType

from jax_nvfp4_moe.backends import _ffi
from jax_nvfp4_moe.inference import generation
from jax_nvfp4_moe.ops import all_reduce as op
from jax_nvfp4_moe.parallel import connect_peers
from jax_nvfp4_moe.parallel.expert_mesh import TENSOR
from jax_nvfp4_moe.parallel.processes import join
from jax_nvfp4_moe.parallel.whole_steps import from_first_device


def average(mesh, sums):
    """Return a compiled function that takes the average of the rows of two GPUs, many times."""
    rows = mesh.spec(TENSOR)

    def body(x):
        def step(_, x):
            return mesh.add_up(x, TENSOR) * 0.5

        return jax.lax.fori_loop(0, sums, step, x)

    mapped = mesh.shard_map(body, (rows,), rows)

    def run(x):
        return mapped(x * from_first_device(jnp.ones((), x.dtype), mesh))

    return jax.jit(run, compiler_options=generation._ONE_GRAPH)


def two_gpus(timeout):
    axis = (AxisType.Auto,)
    mesh = jax.make_mesh((2,), ("tensor",), axis, devices=jax.devices()[:2])
    return connect_peers(mesh, timeout=timeout)


def run_smoke():
    begin = time.monotonic()
    mesh = two_gpus(timeout=5.0)
    print(f"connected after {time.monotonic() - begin:.1f} s", flush=True)
    x = jnp.stack([jnp.full(4, 1.0), jnp.full(4, 3.0)])
    for sums, calls in ((1, 1), (100, 4)):
        run = average(mesh, sums)
        for _ in range(calls):
            found = np.asarray(run(x))
            assert (found == 2).all(), found
        print(f"{sums * calls} sums after {time.monotonic() - begin:.1f} s", flush=True)


def run_processes(address, index):
    join(address, 2, int(index))
    mesh = connect_peers(jax.make_mesh((2,), ("tensor",), (AxisType.Auto,)), timeout=10.0)
    own = np.full((1, 4096), 1 + 2 * int(index), np.float32)
    sharding = mesh.sharding(TENSOR)
    x = jax.make_array_from_process_local_data(sharding, own)
    run = average(mesh, 250)
    for _ in range(4):
        (found,) = (np.asarray(shard.data) for shard in run(x).addressable_shards)
        assert (found == 2).all(), found
    print("equal", flush=True)


def run_alone():
    mesh = two_gpus(timeout=2.0)
    peers = dict(mesh.peers)[TENSOR,]
    lower = op.ALL_REDUCE_CUDA.lower["all_reduce"]
    extension = _ffi.load("_nvfp4_cuda")
    assert extension is not None

    def report():
        while not extension.peer_failure():
            time.sleep(0.001)  # JAX may end the process soon after
        print(extension.peer_failure(), flush=True)

    # JAX may end the process when it meets the error.
    reporter = threading.Thread(target=report)
    reporter.start()
    try:
        jax.jit(lambda x: lower(x, axis_names=(), peers=peers))(jnp.ones(1024)).block_until_ready()
    except Exception as error:  # of JAX, whose class depends on its version
        print(f"{type(error).__name__}: {error}", flush=True)
    reporter.join()
    os._exit(0)  # no call of CUDA would succeed any more


if __name__ == "__main__":
    if sys.argv[1] == "processes":
        run_processes(*sys.argv[2:4])
    elif sys.argv[1] == "smoke":
        run_smoke()
    else:
        run_alone()
