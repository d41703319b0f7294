"""Run one of several processes for `test_distributed`: a sum in a loop, a save, or a model.

    python several_processes.py ADDRESS PROCESSES INDEX PEER_TIMEOUT WHAT

WHAT is one of ``sum``, ``save FOLDER``, and ``FOLDER MESH OUTPUT``.
"""

import pathlib
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import NamedSharding, PartitionSpec

from jax_nvfp4_moe import generate, load_model, testing
from jax_nvfp4_moe.inference import balance
from jax_nvfp4_moe.nn.saving import saved_folder
from jax_nvfp4_moe.parallel import find_expert_mesh, shard_experts
from jax_nvfp4_moe.parallel import processes as distributed
from jax_nvfp4_moe.parallel.placement import balance_experts

SIZES = {"num_experts": 4, "hidden": 64, "intermediate": 32}


def add_up_for_ever(mesh):
    """Print the sum of all process numbers, again and again."""
    shape, sharding = (mesh.size,), NamedSharding(mesh, PartitionSpec("expert"))
    own = np.full(1, jax.process_index(), np.float32)
    x = jax.make_array_from_callback(shape, sharding, lambda _: own)
    total = jax.jit(lambda x: x.sum(), out_shardings=NamedSharding(mesh, PartitionSpec()))
    while True:
        print(float(total(x)), flush=True)
        time.sleep(0.05)


def save_with_others(folder):
    """Save sharded parameters to a folder that fills up meanwhile, then to one that stays free."""
    mesh = distributed.make_mesh()
    params = jax.tree.map(np.asarray, testing.random_moe_params(jax.random.key(0), **SIZES))
    experts = shard_experts(params, find_expert_mesh(mesh))
    if distributed.is_first():
        time.sleep(2)  # by now the other processes have seen that the folder is missing
        (folder / "used").mkdir(parents=True)
        (folder / "used" / "file").write_text("")
    try:
        saved_folder.save(folder / "used", experts)
    except ValueError as error:
        print(error, flush=True)
    if not distributed.is_first():
        delay(saved_folder, "_description", 1)
    saved_folder.save(folder / "free", experts)
    written = (folder / "free" / saved_folder.LAYOUTS).stat()
    multihost_utils.sync_global_devices("all have saved")
    assert (folder / "free" / saved_folder.LAYOUTS).stat().st_mtime_ns == written.st_mtime_ns
    restored = saved_folder.restore(folder / "free", experts)
    for new, old in zip(jax.tree.leaves(restored), jax.tree.leaves(experts), strict=True):
        for one, other in zip(new.addressable_shards, old.addressable_shards, strict=True):
            np.testing.assert_array_equal(one.data, other.data)


def delay(module, name, seconds):
    """Make the function `name` of `module` wait for `seconds` before it runs."""
    function = getattr(module, name)

    def late(*args):
        time.sleep(seconds)
        return function(*args)

    setattr(module, name, late)


def run_model(folder, shape, output):
    """Save logits, and greedy tokens or the logits after experts are replicated and moved."""
    mesh = distributed.make_mesh(shape)
    model = load_model(folder, scheme="checkpoint", dtype=jnp.float32, mesh=mesh)
    ids = np.arange(12, dtype=np.int32).reshape(2, 6)
    logits = jax.jit(lambda model, ids: model(ids))(model, ids)
    results = {"logits": logits}
    devices = mesh.shape.get("expert")
    if devices is None:
        results["tokens"] = generate(model, ids, max_new_tokens=4, stop_ids=())
    else:
        results["load"] = load = balance.count_experts(model, ids)
        copies = load.shape[1] + devices
        balance.place_model(model, [balance_experts(row, devices, copies) for row in load])
        results["placed"] = jax.jit(lambda model, ids: model(ids))(model, ids)
    if distributed.is_first():
        np.savez(output, **{name: np.asarray(value) for name, value in results.items()})


def main(address, processes, index, peer_timeout, what, *rest):
    *rest, pipe = rest
    distributed.be_supervised()
    limits = {"peer_timeout": int(peer_timeout), "start_timeout": 60}
    distributed.join(address, int(processes), int(index), **limits)
    distributed.report_joined(int(pipe))
    rest = [part for part in rest if part != distributed.SUPERVISED]
    if what == "sum":
        add_up_for_ever(distributed.make_mesh())
    elif what == "save":
        save_with_others(pathlib.Path(*rest))
    else:
        run_model(what, *rest)


if __name__ == "__main__":
    if distributed.SUPERVISED in sys.argv:
        with distributed.leaving_at_once():
            main(*sys.argv[1:])
    else:
        sys.exit(distributed.supervise([sys.executable, *sys.argv], int(sys.argv[4]), 60))
