"""Test latent attention with an indexer: what its cache holds, and where it begins to choose."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from divided_attention import load_attention
from given import CHECKPOINTS

from jax_nvfp4_moe.models import deepseek_v32
from jax_nvfp4_moe.nn.latent_attention import LatentAttention

TOKENS = 12
BOUND = 1e-6  # float32 sums in another order


@pytest.fixture(scope="module")
def attention():
    return load_attention(CHECKPOINTS / "deepseek_v32-modelopt-w4a16", deepseek_v32, None)


@jax.jit
def run(attention, x, positions, entries):
    return attention(x, positions, entries)


@jax.jit
def run_without_indexer(attention, x, positions):
    return LatentAttention.mix(attention, x, positions, None)[0]


def inputs(attention):
    x = jax.random.normal(jax.random.key(0), (2, TOKENS, attention.config.hidden))
    return x, jnp.broadcast_to(jnp.arange(TOKENS, dtype=jnp.int32)[None], (2, TOKENS))


def difference(actual, expected):
    return np.abs(actual - expected).max() / np.abs(expected).max()


def test_the_last_token_needs_the_keys_of_the_indexer(attention):
    """Decoding equals one call on all tokens, but not with zeros in place of the indexer's keys."""
    x, positions = inputs(attention)
    whole, _ = run(attention, x, positions, None)
    before, last = x[:, :-1], x[:, -1:]
    end = positions[:, -1:]
    _, entries = run(attention, before, positions[:, :-1], attention.init_cache(2, TOKENS))
    y, _ = run(attention, last, end, entries)
    assert difference(y[:, 0], whole[:, -1]) <= BOUND
    emptied = {**entries, "index": jnp.zeros_like(entries["index"])}
    y, _ = run(attention, last, end, emptied)
    assert difference(y[:, 0], whole[:, -1]) > 1e-2


def test_tokens_with_few_keys_see_them_all(attention):
    """Up to `count` keys, the result is that of latent attention. Later tokens see fewer keys."""
    x, positions = inputs(attention)
    count = attention.indexer.sizes.count
    found, _ = run(attention, x, positions, None)
    alike = run_without_indexer(attention, x, positions)
    assert difference(found[:, :count], alike[:, :count]) <= BOUND
    assert difference(found[:, count:], alike[:, count:]) > 1e-2
    short, _ = run(attention, x[:, :count], positions[:, :count], None)  # nothing is chosen
    assert difference(short, alike[:, :count]) <= BOUND
