"""The expert layer that the JAX peers share; each peer gives its own `ragged_dot`."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from moe_cases import Case, draw_ids

from jax_nvfp4_moe.cli.timing import time_program

TOKENS = (1, 16, 128, 1024, 8192)  # only these, because compiling takes long


def random_weights(case: Case) -> list[jax.Array]:
    """Return gate_up ``[e, h, rows]`` and down ``[e, i, h]`` in bfloat16."""
    e, h, i = case.experts, case.hidden, case.intermediate
    shapes = (e, h, case.gate_up_rows), (e, i, h)
    keys = jax.random.split(jax.random.key(0))
    return [_normal(key, shape) for key, shape in zip(keys, shapes, strict=True)]


@functools.partial(jax.jit, static_argnums=1)
def _normal(key, shape):
    """Draw one expert at a time, which bounds the memory of the generator."""
    scale = jnp.bfloat16(shape[1] ** -0.5)
    keys = jax.random.split(key, shape[0])
    return jax.lax.map(lambda key: jax.random.normal(key, shape[1:], jnp.bfloat16) * scale, keys)


def run_layer(case: Case, ragged_dot: Callable, x, ids, weights):
    """Return the output of the layer.

    Args:
      case: sizes of the layer.
      ragged_dot: ``(rows sorted by expert, one of `weights`, group sizes) -> rows``.
      x: tokens ``[t, h]``.
      ids: expert ids ``[t, top_k]``.
      weights: gate_up and down.
    """
    order = jnp.argsort(ids.reshape(-1))
    token = order // case.top_k
    sizes = jnp.bincount(ids.reshape(-1), length=case.experts).astype(jnp.int32)
    u = ragged_dot(x[token], weights[0], sizes)
    if case.gated:
        gate, up = jnp.split(u, 2, axis=1)
        active = jax.nn.silu(gate) * up
    else:
        active = jnp.square(jax.nn.relu(u))
    y = ragged_dot(active.astype(x.dtype), weights[1], sizes).astype(x.dtype)
    return jnp.zeros_like(x).at[token].add(y) * jnp.asarray(1 / case.top_k, x.dtype)


def time_layer(case: Case, ragged_dot: Callable, weights: Any, tokens: int) -> dict[str, float]:
    """Time the layer: several calls in one loop on the device, each fed by the one before."""
    ids = jnp.asarray(draw_ids(case, tokens))

    @functools.partial(jax.jit, donate_argnums=0)
    def program(x, ids, weights):
        def call(x, chosen):
            y = run_layer(case, ragged_dot, x, chosen, weights).astype(jnp.float32)
            return (y / (1e-3 + jnp.max(jnp.abs(y)))).astype(x.dtype), None

        return jax.lax.scan(call, x, ids)[0]

    x = jax.random.normal(jax.random.key(1), (tokens, case.hidden), jnp.bfloat16)
    figures = time_program(lambda x: program(x, ids, weights), x)
    return figures | {name: figures[name] / len(ids) for name in ("us", "low", "high")}
