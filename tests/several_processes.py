"""One process of several, for `test_distributed`: sums over all in a loop, or a model's logits.

python several_processes.py ADDRESS PROCESSES INDEX PEER_TIMEOUT (sum | FOLDER MESH OUTPUT)
"""

import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from jax_nvfp4_moe import generate, load_model
from jax_nvfp4_moe.inference import balance
from jax_nvfp4_moe.parallel import processes as distributed
from jax_nvfp4_moe.parallel.placement import place


def add_up_for_ever(mesh):
    """Print the sum of all process numbers, again and again."""
    shape, sharding = (mesh.size,), NamedSharding(mesh, PartitionSpec("expert"))
    own = np.full(1, jax.process_index(), np.float32)
    x = jax.make_array_from_callback(shape, sharding, lambda _: own)
    total = jax.jit(lambda x: x.sum(), out_shardings=NamedSharding(mesh, PartitionSpec()))
    while True:
        print(float(total(x)), flush=True)
        time.sleep(0.05)


def run_model(folder, shape, output):
    """Save logits and greedy tokens; logits again after experts were copied and moved."""
    mesh = distributed.make_mesh(shape)
    model = load_model(folder, scheme="checkpoint", dtype=jnp.float32, mesh=mesh)
    ids = np.arange(12, dtype=np.int32).reshape(2, 6)
    logits = jax.jit(lambda model, ids: model(ids))(model, ids)
    results = {"logits": logits}
    devices = mesh.shape.get("expert")
    if devices is None:
        results["tokens"] = generate(model, ids, max_new_tokens=4)
    else:
        results["load"] = load = balance.count_experts(model, ids)
        copies = load.shape[1] + devices
        balance.place_model(model, [place(row, devices, copies) for row in load])
        results["placed"] = jax.jit(lambda model, ids: model(ids))(model, ids)
    if distributed.is_first():
        np.savez(output, **{name: np.asarray(value) for name, value in results.items()})


def main(address, processes, index, peer_timeout, what, *rest):
    *rest, pipe = rest
    distributed.be_supervised()
    limits = {"peer_timeout": int(peer_timeout), "start_timeout": 60}
    distributed.join(address, int(processes), int(index), **limits)
    distributed.report_joined(int(pipe))
    if what == "sum":
        add_up_for_ever(distributed.make_mesh())
    run_model(what, *(part for part in rest if part != distributed.SUPERVISED))


if __name__ == "__main__":
    if distributed.SUPERVISED in sys.argv:
        with distributed.leaving_at_once():
            main(*sys.argv[1:])
    else:
        sys.exit(distributed.supervise([sys.executable, *sys.argv], int(sys.argv[4]), 60))
