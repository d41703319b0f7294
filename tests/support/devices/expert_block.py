"""A small block of experts with biases, which tests make on one device and over meshes."""

import functools

import jax
import jax.numpy as jnp
from flax import nnx
from support.ops.expert_layer import with_biases, with_one_scale

from jax_nvfp4_moe import NVFP4MoE
from jax_nvfp4_moe.numerics.activations import find_activation
from jax_nvfp4_moe.testing import random_moe_params

LAYER = {"num_experts": 16, "hidden": 64, "intermediate": 128}


@functools.cache
def weights(activation="silu"):
    """Return the weights of the block."""
    row = find_activation(activation).row
    params = random_moe_params(jax.random.key(0), **LAYER, gated=row.gated)
    params = with_one_scale(params) if row.interleaved else params
    return with_biases(params, jax.random.split(jax.random.key(1), 2), 1 / 8)


def block(**changes):
    """Return a function that makes the block, over a mesh if `changes` has one."""
    options = {
        "top_k": 4,
        "params": weights(changes.get("activation", "silu")),
        "dtype": jnp.float32,
        "checkpoint_scheme": "w4a4",
    } | changes
    return functools.partial(make_block, **options)


def make_block(**options):
    return NVFP4MoE(**LAYER, **options, rngs=nnx.Rngs(0))
