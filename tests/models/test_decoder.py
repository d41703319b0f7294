"""Test the calls of a decoder: logits, wrong arguments, and a full cache."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.files.given import CHECKPOINTS, reference_facts, reference_tensors
from support.models.architecture import KERNELS, run

from jax_nvfp4_moe import load_model

QWEN = CHECKPOINTS / "qwen3moe-modelopt-w4a16"
step = jax.jit(lambda model, ids, cache: model(ids, cache))


def noise(folder):
    """Return how far the tool's own logits move when its embeddings move by a relative 1e-6."""
    return reference_facts(folder)["sensitivity_to_1e6_noise"]["max_abs_logit_change"]


def test_logits_at_one_position():
    model = load_model(QWEN, **KERNELS)
    ids = reference_tensors(QWEN)["input_ids"].astype(np.int32)
    at = np.array([5, 23], np.int32)
    one = jax.jit(lambda m, i, p: m(i, logits_at=p))(model, ids, at)
    assert one.shape == (2, 1, 512)
    every = np.asarray(run(model, ids))
    spread = np.abs(np.asarray(one)[:, 0] - every[np.arange(2), at]).max()
    assert spread <= 2 * noise(QWEN)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, jnp.float32])
def test_logits_are_float32_in_any_dtype(dtype):
    model = load_model(QWEN, dtype=dtype)
    logits = run(model, np.arange(6, dtype=np.int32).reshape(2, 3))
    assert logits.shape == (2, 3, 512)
    assert logits.dtype == jnp.float32
    assert np.isfinite(logits).all()
    assert model.init_cache(1, 4).layers[0]["k"].dtype == dtype


def test_calls_with_wrong_shapes():
    model = load_model(QWEN)
    with pytest.raises(ValueError, match=r"input_ids: expected integers \[b, t\]"):
        model(jnp.zeros(3, jnp.int32))
    with pytest.raises(ValueError, match=r"input_ids: expected shape \[2, t\] with t up to 8"):
        model(jnp.zeros((2, 9), jnp.int32), model.init_cache(2, 8))
    for sizes in ((-1, 8), (2, 0)):
        with pytest.raises(ValueError, match="cache: expected a batch of 0 rows or more and a pos"):
            model.init_cache(*sizes)
    positions = model.config.max_positions
    for length in (positions + 1025, 2**31 - 1, 2**40):
        with pytest.raises(ValueError, match=rf"max_length: .* {positions} pos.*; got {length}"):
            model.init_cache(1, length)
    jax.eval_shape(lambda: model.init_cache(1, positions + 1024))


def test_values_out_of_range_are_refused_where_they_are_known():
    """An id past the vocabulary, a full cache, and a position past the model's last are refused."""
    model = load_model(QWEN, **KERNELS)
    vocabulary, positions = model.config.vocab_size, model.config.max_positions
    ids = np.ones((2, 4), np.int32)
    for wrong in (-1, vocabulary):
        with pytest.raises(ValueError, match=rf"input_ids: .* 0 to {vocabulary - 1}.*{wrong}"):
            model(jnp.asarray(np.where(np.arange(4) == 3, wrong, ids)))
    padded = jnp.asarray(np.where(np.arange(4) == 3, vocabulary, ids))
    assert bool(jnp.isfinite(model(padded, lengths=jnp.array([3, 2]))[:, :2]).all())
    for lengths in ([5, 1], [-1, 1], [1]):
        with pytest.raises(ValueError, match=r"lengths: expected 2 integers from 0 to 4"):
            model(ids, lengths=jnp.array(lengths))
    with pytest.raises(ValueError, match="num_tokens: expected at least 5, the sum of lengths"):
        model(ids, lengths=jnp.array([3, 2]), num_tokens=4)
    _, cache = model(ids, model.init_cache(2, 6))
    with pytest.raises(ValueError, match=r"cache: full; .* 8 tokens, but the cache has room for 6"):
        model(ids, cache)
    _, cache = model(ids, cache, lengths=jnp.array([2, 0]))
    with pytest.raises(ValueError, match=r"cache: full; .* 7 tokens"):
        model(ids, cache, lengths=jnp.array([1, 0]))
    long = model.init_cache(2, positions + 4)
    near = dataclasses.replace(long, lengths=jnp.array([0, positions - 3], jnp.int32))
    with pytest.raises(ValueError, match=rf"input_ids: .*{positions + 1} tokens.*{positions} pos"):
        model(ids, near)
    with pytest.raises(ValueError, match=rf"{positions + 1} tokens"):
        model(np.ones((1, positions + 1), np.int32))


def test_inside_a_trace_a_full_cache_drops_tokens():
    """The docstring of `Decoder` promises that a full cache keeps what was written."""
    model = load_model(QWEN, **KERNELS)
    ids = np.ones((1, 4), np.int32)
    _, cache = step(model, ids, model.init_cache(1, 4))
    logits, full = step(model, ids[:, :1], cache)
    assert np.isfinite(logits).all()
    jax.tree.map(np.testing.assert_array_equal, full.layers, cache.layers)
    wild = run(model, np.full((1, 4), 2**20, np.int32))
    assert np.isfinite(wild).all()
