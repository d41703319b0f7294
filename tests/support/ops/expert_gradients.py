"""Gradients of an expert layer: those of the package, of plain XLA, and of float64."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from support.ops.expert_layer import E, expert_layer

import jax_nvfp4_moe as nvfp4
from jax_nvfp4_moe.testing import assert_as_accurate_as, moe_mlp_xla

NAMES = ("x", "expert_weights", "gate_up_bias", "down_bias")


layer = functools.cache(functools.partial(expert_layer, biased=True))


def normal(seed, *shape):
    return np.random.default_rng(seed).standard_normal(shape, np.float32)


def cotangent(x):
    return normal(7, *x.shape).astype(x.dtype)


def gradients(run, x, params, weights, bar=None):
    """Return the gradients of ``sum(y * bar)``, by name; `bar` is `cotangent(x)` by default."""
    bar = cotangent(x) if bar is None else bar

    def total(x, weights, *biases):
        given = dataclasses.replace(params, gate_up_bias=biases[0], down_bias=biases[1])
        y = run(x, given, weights)
        return jnp.sum(y.astype(jnp.float32) * bar.astype(jnp.float32))

    biases = params.gate_up_bias, params.down_bias
    return dict(zip(NAMES, jax.grad(total, range(4))(x, weights, *biases), strict=True))


def ours(x, params, ids, weights, **options):
    options = {"scheme": "w4a16", "activation": "silu", "backend": None, **options}
    return _ours(x, params, ids, weights, tuple(options.items()))


@functools.partial(jax.jit, static_argnums=4)
def _ours(x, params, ids, weights, options):
    def run(x, params, weights):
        return nvfp4.ops.moe_mlp(x, params, ids, weights, **dict(options))

    return gradients(run, x, params, weights)


@functools.partial(jax.jit, static_argnums=4)
def of_xla(x, params, ids, weights, call, bar=None):
    """Return the yardstick: gradients of plain XLA on dequantized weights, in the dtype of x."""

    def run(x, params, weights):
        return moe_mlp_xla(x, params, ids, weights, call, x.dtype)

    return gradients(run, x, params, weights, bar)


def exact(x, params, ids, weights, call, *, on_input=False, rounded=None, bar=None):
    """Return gradients of the dequantized model in float64; `rounded` counts as the identity."""
    matrices = (params.gate_up.dequantize(), params.down.dequantize())
    bar = cotangent(x) if bar is None else bar
    operands = (x, weights, params.gate_up_bias, params.down_bias, *matrices, bar)
    operands = [np.asarray(a, np.float64) for a in operands]
    with jax.enable_x64(True):
        found = _exact(*operands, np.asarray(ids), call=call, on_input=on_input, rounded=rounded)
        return dict(zip(NAMES, map(np.asarray, found), strict=True))


@functools.partial(jax.jit, static_argnames=("call", "on_input", "rounded"))
def _exact(x, weights, first, second, gate_up, down, bar, ids, *, call, on_input, rounded):
    def through(rows, expert, product):
        fixed = jax.lax.stop_gradient(rows)
        return rows if rounded is None else rows + rounded(fixed, expert, product) - fixed

    def activate(u):
        row = call.row
        if not row.gated:
            return row.function(jnp.minimum(u, call.limit), call.alpha)
        gate, up = (u[..., 0::2], u[..., 1::2]) if row.interleaved else jnp.split(u, 2, -1)
        gate, up = jnp.minimum(gate, call.limit), jnp.clip(up, -call.limit, call.limit)
        return row.function(gate, call.alpha) * (up + call.beta)

    def total(x, weights, first, second):
        def of_expert(expert, gate_up, down, first, second):
            weight = jnp.sum(jnp.where(ids == expert, weights, 0.0), -1, keepdims=True)
            rows = through(x * weight if on_input else x, expert, 0)
            u = rows @ gate_up.T + first[None]
            d = through(activate(u), expert, 1) @ down.T + second[None]
            hit = (ids == expert).any(-1, keepdims=True)
            return jnp.where(hit, d if on_input else d * weight, 0.0)

        each = jnp.arange(E, dtype=jnp.int32), gate_up, down, first, second
        return jnp.sum(jax.vmap(of_expert)(*each) * bar[None])

    return jax.grad(total, range(4))(x, weights, first, second)


def assert_accurate(actual, yardstick, truth):
    for name in NAMES:
        assert_as_accurate_as(actual[name], yardstick[name], truth[name])


def assert_as_the_model(actual, *operands):
    assert_accurate(actual, of_xla(*operands), exact(*operands))
