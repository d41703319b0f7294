"""Arguments for exported programs, here and in the process that runs the programs again."""

import jax
import jax.numpy as jnp
from flax import nnx
from support.files.given import EXAMPLE

import jax_nvfp4_moe as nvfp4
from jax_nvfp4_moe.testing import random_moe_params, random_routing


def layer_arguments():
    keys = jax.random.split(jax.random.key(0), 3)
    params = random_moe_params(keys[0], num_experts=4, hidden=64, intermediate=48)
    x = jax.random.normal(keys[1], (5, 64), jnp.bfloat16)
    return x, nvfp4.prepare(params, scheme="w4a4"), *random_routing(keys[2], 5, 4, 2)


def step_arguments():
    """Return the weights as a list, one token for each of two rows, and a cache for 16 tokens."""
    model = nvfp4.load_model(EXAMPLE)
    return jax.tree.leaves(nnx.state(model)), jnp.array([[7], [9]]), model.init_cache(2, 16)
