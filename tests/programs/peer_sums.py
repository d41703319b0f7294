"""Run sums of connected GPUs for `test_cuda_all_reduce.py`.

    python peer_sums.py processes ADDRESS INDEX
    python peer_sums.py alone INDEX

With ``processes``, this is one of two processes, each of which has one GPU. It prints "equal" if
1000 sums are right. With ``alone``, one GPU of two runs a sum, and waits in vain for the other one.
The program prints why the sum has failed, and the error of JAX.
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


def run_processes(address, index):
    join(address, 2, int(index))
    mesh = connect_peers(jax.make_mesh((2,), ("tensor",), (AxisType.Auto,)))
    rows = mesh.spec(TENSOR)

    def body(x):
        def step(_, x):
            return mesh.add_up(x, TENSOR) * 0.5

        return jax.lax.fori_loop(0, 1000, step, x)

    own = np.full((1, 4096), 1 + 2 * int(index), np.float32)
    sharding = mesh.sharding(TENSOR)
    x = jax.make_array_from_process_local_data(sharding, own)
    run = jax.jit(mesh.shard_map(body, (rows,), rows), compiler_options=generation._ONE_GRAPH)
    (found,) = (np.asarray(shard.data) for shard in run(x).addressable_shards)
    print("equal" if (found == 2).all() else f"wrong: {found}", flush=True)


def run_alone():
    devices = jax.make_mesh((2,), ("tensor",), (AxisType.Auto,), devices=jax.devices()[:2])
    mesh = connect_peers(devices, timeout=2.0)
    peers = dict(mesh.peers)[TENSOR,]
    lower = op.ALL_REDUCE_CUDA.lower["all_reduce"]
    extension = _ffi.load("_nvfp4_cuda")
    assert extension is not None

    def report():
        while not extension.peer_failure():
            time.sleep(0.1)
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
    else:
        run_alone()
