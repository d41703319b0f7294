"""Test latent attention with an indexer: what its cache holds, and where it begins to choose."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.devices.divided_attention import load_attention
from support.files.given import CHECKPOINTS

from jax_nvfp4_moe.models import deepseek_v32
from jax_nvfp4_moe.nn.attention.latent_attention import LatentAttention

TOKENS = 12


@pytest.fixture(scope="module")
def attention():
    return load_attention(CHECKPOINTS / "deepseek_v32-modelopt-w4a16", deepseek_v32, None)


@jax.jit
def run(attention, x, positions, entries):
    return attention(x, positions, entries)


@jax.jit
def run_without_indexer(attention, x, positions, entries):
    return LatentAttention.mix(attention, x, positions, entries)


def inputs(attention):
    x = jax.random.normal(jax.random.key(0), (2, TOKENS, attention.config.hidden))
    return x, jnp.broadcast_to(jnp.arange(TOKENS, dtype=jnp.int32)[None], (2, TOKENS))


def difference(actual, expected):
    return np.abs(actual - expected).max() / np.abs(expected).max()


def step_error(run, attention):
    """Return how far the last token of a call on all tokens is from a step with a cache."""
    x, positions = inputs(attention)
    whole, _ = run(attention, x, positions, None)
    empty = attention.init_cache(2, TOKENS)
    _, entries = run(attention, x[:, :-1], positions[:, :-1], empty)
    y, _ = run(attention, x[:, -1:], positions[:, -1:], entries)
    return difference(y[:, 0], whole[:, -1])


@pytest.fixture(scope="module")
def bound(attention):
    """Return twice what another order of float32 sums changes in latent attention without choice.

    A step and a call on all tokens sum in other orders, as do calls with and without a choice.
    """
    return 2 * step_error(run_without_indexer, attention)


def test_the_last_token_needs_the_keys_of_the_indexer(attention, bound):
    """Decoding equals one call on all tokens, but not with zeros in place of the indexer's keys."""

    def run_emptied(attention, x, positions, entries):
        if entries is not None and x.shape[1] == 1:
            entries = {**entries, "index": jnp.zeros_like(entries["index"])}
        return run(attention, x, positions, entries)

    assert 0 < bound < 1e-5  # a yardstick of zero would allow nothing, a large one anything
    assert step_error(run, attention) <= bound
    assert step_error(run_emptied, attention) > 1e3 * bound


def test_tokens_with_few_keys_see_them_all(attention, bound):
    """Up to `count` keys, the result is that of latent attention. Later tokens see fewer keys."""
    x, positions = inputs(attention)
    count = attention.indexer.sizes.count
    found, _ = run(attention, x, positions, None)
    alike, _ = run_without_indexer(attention, x, positions, None)
    assert difference(found[:, :count], alike[:, :count]) <= bound
    assert difference(found[:, count:], alike[:, count:]) > 1e3 * bound
    short, _ = run(attention, x[:, :count], positions[:, :count], None)  # nothing is chosen
    assert difference(short, alike[:, :count]) <= bound
