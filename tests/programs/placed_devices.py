"""Place experts on a mesh of four host devices; `test_balance.py` starts this and judges.

python tests/programs/placed_devices.py      prints one line of JSON for each case
"""

import json
import os

if __name__ == "__main__":
    given = os.environ.get("XLA_FLAGS", "")
    os.environ["XLA_FLAGS"] = f"{given} --xla_force_host_platform_device_count=4"
    os.environ["JAX_PLATFORMS"] = "cpu"

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from jax_nvfp4_moe import NVFP4MoE
from jax_nvfp4_moe.inference.balance import count_experts, device_load, place_model
from jax_nvfp4_moe.parallel.placement import balance_experts
from jax_nvfp4_moe.testing import random_moe_params

KINDS = {"auto": AxisType.Auto, "explicit": AxisType.Explicit}
CASES = (
    ("auto", "psum", "w4a16"),
    ("auto", "all_to_all", "w4a4"),
    ("explicit", "psum", "w4a4"),
    ("explicit", "all_to_all", "w4a4"),
)


def make_block(scheme, **over):
    params = random_moe_params(jax.random.key(0), num_experts=8, hidden=64, intermediate=64)
    weight = jax.random.normal(jax.random.key(1), (8, 64), jnp.float32) / 8
    arguments = {"checkpoint_scheme": scheme, "scheme": scheme, "dtype": jnp.float32, **over}
    return NVFP4MoE(8, 64, 64, top_k=2, params=params, router_weight=weight, **arguments)


def measure(kind, dispatch, scheme):
    """Return how far a placed block is from one on one device, and its loads."""
    shape = (2, 2) if dispatch == "psum" else (4, 1)
    mesh = jax.make_mesh(shape, ("expert", "tensor"), axis_types=(KINDS[kind],) * 2)
    x = jax.random.normal(jax.random.key(2), (16, 64), jnp.float32)
    call = jax.jit(lambda block, x: block(x))
    expected = call(make_block(scheme), x)
    with jax.set_mesh(mesh):
        spec = PartitionSpec("expert" if dispatch == "all_to_all" else None)
        x = jax.device_put(x, NamedSharding(mesh, spec))
        block = make_block(scheme, mesh=mesh, dispatch=dispatch)
        load = count_experts(block, x)[0]
        placed = balance_experts(load, shape[0], 8 + shape[0])
        place_model(block, [placed])
        actual = np.asarray(call(block, x))
        return {
            "case": [kind, dispatch, scheme],
            "error": float(np.abs(actual - expected).max()),
            "copies": placed.copies.tolist(),
            "load": load.tolist(),
            "device_load": device_load(block, x, shape[0])[0].tolist(),
        }


if __name__ == "__main__":
    for case in CASES:
        print(json.dumps(measure(*case)))
