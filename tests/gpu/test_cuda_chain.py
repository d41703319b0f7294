"""Decode with chains of calls on a GPU: the bits are those of separate calls."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from architecture import EACH_MIXER
from given import CHECKPOINTS

from jax_nvfp4_moe import generate, load_model, ops
from jax_nvfp4_moe.inference import generation

pytestmark = pytest.mark.gpu

STEPS = 24


@jax.jit
def read(model, ids, cache):
    return model(ids, cache)


@jax.jit
def read_in_chains(model, ids, cache):
    return ops.chain_calls(generation._read)(model, ids, cache)


def decode(model, step, batch):
    """Return the logits of all steps, after a prompt that `read` reads."""
    rng = np.random.default_rng(0)
    ids = rng.integers(0, model.config.vocab_size, (STEPS + 1, batch, 1), np.int32)
    prompt = rng.integers(0, model.config.vocab_size, (batch, 9), np.int32)
    _, cache = read(model, prompt, model.init_cache(batch, 9 + STEPS + 1))
    logits = []
    for new in ids:
        new_logits, cache = step(model, new, cache)
        logits.append(new_logits)
    return np.asarray(jnp.stack(logits)), cache


@pytest.mark.parametrize("batch", [1, 3, 20])
@pytest.mark.parametrize("folder", EACH_MIXER)
def test_chains_have_the_bits_of_calls(folder, batch):
    model = load_model(CHECKPOINTS / folder)
    (got, cache), (expected, other) = (
        decode(model, step, batch) for step in (read_in_chains, read)
    )
    np.testing.assert_array_equal(got, expected)
    for one, two in zip(jax.tree.leaves(cache), jax.tree.leaves(other), strict=True):
        np.testing.assert_array_equal(one, two)


def test_a_step_is_a_few_calls():
    model = load_model(CHECKPOINTS / "qwen3moe-modelopt-w4a16")
    cache, ids = model.init_cache(1, 32), jnp.zeros((1, 1), jnp.int32)
    alone, chained = (
        len(re.findall("custom_call @nvfp4", f.lower(model, ids, cache).as_text()))
        for f in (read, read_in_chains)
    )
    assert chained <= len(model.layers) + 1
    assert alone >= 4 * chained


def test_generate_runs_chains_in_a_graph():
    """Many runs of the same graph give the tokens of single steps."""
    model = load_model(CHECKPOINTS / "qwen3moe-modelopt-w4a16")
    prompt = np.arange(5, dtype=np.int32)[None]
    expected, cache = read(model, prompt, model.init_cache(1, 64))
    token, tokens = jnp.argmax(expected[:, -1:], axis=-1), []
    for _ in range(STEPS):
        tokens.append(int(token[0, 0]))
        logits, cache = read(model, token.astype(jnp.int32), cache)
        token = jnp.argmax(logits, axis=-1)
    for _ in range(20):
        assert generate(model, prompt, max_new_tokens=STEPS)[0].tolist() == tokens
