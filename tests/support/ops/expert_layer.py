"""Make a small expert layer with weights of `testing.random_moe_params`, and its tokens."""

import dataclasses

import jax
import jax.numpy as jnp

from jax_nvfp4_moe.numerics.activations import find_activation
from jax_nvfp4_moe.testing import random_moe_params, random_routing

E, H, I, K = 5, 64, 48, 3  # noqa: E741  the letters of the shapes


def expert_layer(tokens=9, *, activation="silu", biased=False, dtype=jnp.float32, seed=0):
    """Return tokens, experts whose rows suit the activation, ids, and weights."""
    keys = jax.random.split(jax.random.key(seed), 5)
    row = find_activation(activation).row
    params = random_moe_params(keys[0], num_experts=E, hidden=H, intermediate=I, gated=row.gated)
    if row.interleaved:
        params = with_one_scale(params)
    if biased:
        params = with_biases(params, keys[3:])
    x = jax.random.normal(keys[1], (tokens, H), dtype)
    return x, params, *random_routing(keys[2], tokens, E, K)


def with_one_scale(params):
    """Return the experts with one global scale each, the first, so that rows may have any order."""
    scale = params.gate_up.global_scale[:, 0]
    return dataclasses.replace(
        params, gate_up=dataclasses.replace(params.gate_up, global_scale=scale)
    )


def with_biases(params, keys, size=1.0):
    """Return the experts with normal biases of standard deviation `size`."""
    return dataclasses.replace(
        params,
        gate_up_bias=size * jax.random.normal(keys[0], params.gate_up.shape[:2]),
        down_bias=size * jax.random.normal(keys[1], params.down.shape[:2]),
    )
