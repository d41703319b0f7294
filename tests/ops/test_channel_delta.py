"""Test the delta rule with a decay for each channel against its recurrence, token by token."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.ops.recurrent_rules import check_gradients

from jax_nvfp4_moe.ops.recurrent.channel_delta import channel_delta_chunks, channel_delta_step
from jax_nvfp4_moe.testing import assert_as_accurate_as

# Batch, key heads, value heads of each, key channels, value channels.
B, M, R, D, E = 2, 2, 3, 16, 8
CHUNK = 8
by_chunks = jax.jit(functools.partial(channel_delta_chunks, chunk=CHUNK))


def case(t, fade=1.0):
    """Return random tokens and a state; `fade` scales the logarithms of the decays."""
    normal = functools.partial(np.random.default_rng(t).standard_normal, dtype=np.float32)
    q, k = (normal((B, t, M, D)) for _ in range(2))
    q, k = (x / np.linalg.norm(x, axis=-1, keepdims=True) for x in (q, k))
    v = normal((B, t, M, R, E))
    g = -fade * np.log1p(np.exp(3 * normal((B, t, M, R, D))))
    beta = 1 / (1 + np.exp(-2 * normal((B, t, M, R))))
    return (q, k, v, g, beta), normal((B, M, R, D, E))


def recurrence(tokens, state):
    """Compute ``S = A S + beta k (v - k.T A S)`` and ``y = q.T S`` token by token in float64."""
    q, k, v, g, beta = (np.asarray(x, np.float64) for x in tokens)
    state, results = np.asarray(state, np.float64), []
    for i in range(q.shape[1]):
        state = state * np.exp(g[:, i])[..., None]
        missing = v[:, i] - np.einsum("bmd,bmrde->bmre", k[:, i], state)
        state = state + np.einsum("bmd,bmr,bmre->bmrde", k[:, i], beta[:, i], missing)
        results.append(np.einsum("bmd,bmrde->bmre", q[:, i], state))
    return np.stack(results, axis=1), state


@jax.jit
def by_steps(tokens, state):
    def body(state, token):
        y, state = channel_delta_step(*(x[:, None] for x in token), state)
        return state, y[:, 0]

    state, y = jax.lax.scan(body, state, tuple(jnp.moveaxis(x, 1, 0) for x in tokens))
    return jnp.moveaxis(y, 0, 1), state


def assert_is_the_recurrence(actual, tokens, state):
    expected, steps = recurrence(tokens, state), by_steps(tokens, state)
    for got, want, yardstick in zip(actual, expected, steps, strict=True):
        # The factor is 4, as chunks sum in another order.
        assert_as_accurate_as(got, yardstick, want, factor=4.0)


@pytest.mark.parametrize("fade", [0.01, 1.0, 30.0])
@pytest.mark.parametrize("t", [9, 31])
def test_chunks_are_the_recurrence(t, fade):
    tokens, state = case(t, fade)
    assert_is_the_recurrence(by_chunks(*tokens, state), tokens, state)


@pytest.mark.parametrize("fault", range(5))
def test_the_bounds_catch_one_wrong_token(fault):
    """The last token of a chunk has a query, key, value, decay or rate off by a thousandth."""
    tokens, state = case(9)
    wrong = list(tokens)
    wrong[fault] = wrong[fault].copy()
    wrong[fault][:, CHUNK - 1] *= 1.001
    with pytest.raises(AssertionError):
        assert_is_the_recurrence(by_chunks(*wrong, state), tokens, state)


def test_a_small_decay_after_large_ones_stays_exact():
    """The first four tokens of a chunk forget everything, and the others almost nothing.

    Differences of sums from the start of the chunk would round each exponent to the ulp of 80,000.
    """
    (q, k, v, g, beta), state = case(CHUNK)
    g[:, : CHUNK // 2], g[:, CHUNK // 2 :] = -20000.0, -1e-3
    tokens = (q, k, v, g, beta)
    assert_is_the_recurrence(by_chunks(*tokens, state), tokens, state)
    total = np.cumsum(g[0, :, 0, 0, 0], dtype=np.float32)
    assert abs(np.exp(total[7] - total[5]) / np.exp(-2e-3) - 1) > 1e-4


def test_tokens_without_rate_and_decay_change_nothing():
    (q, k, v, g, beta), state = case(2 * CHUNK)
    _, same = by_chunks(q, k, v, np.zeros_like(g), np.zeros_like(beta), state)
    np.testing.assert_array_equal(same, state)


def test_gradients_are_those_of_the_steps():
    check_gradients(by_chunks, by_steps, *case(9))
