"""Test that models take batches of no rows and rows of no tokens."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.files.given import CHECKPOINTS, EXAMPLE
from support.models.architecture import EACH_MIXER

from jax_nvfp4_moe import generate, load_model, load_tokenizer, stream

EMPTY = ((0, 5), (2, 0), (0, 0))


@pytest.fixture(scope="module")
def example():
    return load_model(EXAMPLE)


def check_logits(logits, shape, config):
    assert (logits.shape, logits.dtype) == ((*shape, config.vocab_size), jnp.float32)


@pytest.mark.parametrize("folder", EACH_MIXER)
def test_mixers(folder):
    model = load_model(CHECKPOINTS / folder)

    @jax.jit
    def read(model, cache):
        none = model(jnp.zeros((0, 5), jnp.int32))
        _, of_no_rows = model(jnp.zeros((0, 2), jnp.int32), model.init_cache(0, 8))
        return none, of_no_rows, *model(jnp.zeros((2, 0), jnp.int32), cache)

    cache = jax.tree.map(jnp.ones_like, model.init_cache(2, 8))
    none, of_no_rows, logits, same = read(model, cache)
    check_logits(none, (0, 5), model.config)
    check_logits(logits, (2, 0), model.config)
    assert {x.shape[0] for x in jax.tree.leaves(of_no_rows)} == {0}
    for one, other in zip(*map(jax.tree.leaves, (cache, same)), strict=True):
        np.testing.assert_array_equal(*(np.asarray(x, np.float32) for x in (one, other)))


@pytest.mark.parametrize("shape", EMPTY)
def test_calls_outside_of_a_program(example, shape):
    ids = np.zeros(shape, np.int64)
    check_logits(example(ids), shape, example.config)
    scores = example.score(ids, ids)
    assert scores.log_probability.shape == scores.likeliest.shape == shape


def test_no_token_is_read(example):
    """All tokens are padding, and the caller says that there are none."""
    ids, lengths = jnp.zeros((2, 4), jnp.int32), jnp.zeros(2, jnp.int32)
    logits = example(ids, lengths=lengths, num_tokens=0)
    check_logits(logits, (2, 4), example.config)


def test_one_logit_of_no_rows(example):
    ids, at = jnp.zeros((0, 4), jnp.int32), jnp.zeros(0, jnp.int32)
    check_logits(example(ids, logits_at=at), (0, 1), example.config)


def test_a_cache_of_no_rows(example):
    cache = example.init_cache(0, 8)
    assert {x.shape[0] for x in jax.tree.leaves(cache)} == {0}


@pytest.mark.parametrize("t", [0, 5])
def test_no_prompts(example, t):
    ids = jnp.zeros((0, t), jnp.int32)
    tokens = generate(example, ids, max_new_tokens=3)
    assert (tokens.shape, tokens.dtype) == ((0, 3), jnp.int32)
    assert not list(stream(example, ids, max_new_tokens=3))
    lengths = jnp.zeros(0, jnp.int32)
    drawn = {"temperature": 1.0, "key": jax.random.key(0), "stop_ids": (1,), "lengths": lengths}
    assert generate(example, ids, max_new_tokens=1, **drawn).shape == (0, 1)


def test_arguments_are_checked_without_prompts(example):
    ids = jnp.zeros((0, 5), jnp.int32)
    for wrong in ({"max_new_tokens": 0}, {"max_new_tokens": 1 << 20}, {"lengths": jnp.ones(1)}):
        with pytest.raises(ValueError, match=r"max_new_tokens|lengths"):
            generate(example, ids, **{"max_new_tokens": 3, **wrong})


def test_a_prompt_of_no_tokens_is_refused(example):
    ids = jnp.asarray([load_tokenizer(EXAMPLE).encode("")], jnp.int32)
    assert ids.shape == (1, 0)
    for run in (generate, lambda *args, **named: list(stream(*args, **named))):
        with pytest.raises(ValueError, match="nothing to continue"):
            run(example, ids, max_new_tokens=3)
