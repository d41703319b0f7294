"""Test chunked prefill: results do not depend on the chunk, and few programs are compiled."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from given import CHECKPOINTS, EXAMPLE, copy_with_config

from jax_nvfp4_moe import evaluate, generate, load_model, stream
from jax_nvfp4_moe.inference import evaluation, prefill
from jax_nvfp4_moe.inference.prefill import (
    chunk_ranges,
    count_tokens,
    empty_cache,
    padded_length,
    prefill_chunks,
)

TOKENS, CHUNK = 700, 256
# Bound of the worst logit, in units of the root mean square of all logits, as in test_long_text.py.
BOUND = 2e-5
# Their mixers: a window with sinks, chunked attention, latent attention, a gated delta net,
# Mamba-2.
FOLDERS = (
    "gpt_oss-modelopt-w4a16",
    "llama4_text-modelopt-w4a16",
    "deepseek_v3-direct-modelopt-w4a16",
    "qwen3_next-modelopt-w4a16",
    "nemotron_h-modelopt-w4a16",
)


@pytest.mark.parametrize(
    ("length", "chunk", "ranges"),
    [
        (700, 256, [(0, 256), (256, 512), (512, 768)]),
        (4097, 4096, [(0, 4096), (4096, 4608)]),
        (8192, 4096, [(0, 4096), (4096, 8192)]),
        (3, 1, [(0, 1), (1, 2), (2, 3)]),
    ],
)
def test_chunks(length, chunk, ranges):
    assert list(chunk_ranges(length, chunk)) == ranges
    assert padded_length(length, chunk) == ranges[-1][1]


@pytest.mark.parametrize(
    ("lengths", "t", "size"),
    [
        ([31], 32, None),  # a single row is not packed
        ([32, 32], 32, None),
        ([32, 25], 32, None),  # rounded up to the whole
        ([32, 24], 32, 56),
        ([32, 1], 32, 40),
        ([0, 0], 32, 8),
        ([5, 1, 1], 7, 9),  # steps of 3
    ],
)
def test_few_programs_serve_all_lengths(lengths, t, size):
    assert count_tokens(np.array(lengths, np.int32), t) == size


@pytest.mark.parametrize("name", FOLDERS)
def test_logits_do_not_depend_on_the_chunk(name, tmp_path):
    """The shorter of the two rows ends in the first chunk."""
    folder = copy_with_config(CHECKPOINTS / name, tmp_path / "m", max_position_embeddings=1024)
    model = load_model(folder, dtype=jnp.float32)
    rng = np.random.default_rng(0)
    ids = rng.integers(model.config.vocab_size, size=(2, TOKENS), dtype=np.int32)
    lengths = np.array([TOKENS, 200], np.int32)
    cache = empty_cache(model, 2, padded_length(TOKENS, CHUNK))
    logits, cache = prefill_chunks(model, cache, ids, lengths, CHUNK)
    np.testing.assert_array_equal(cache.lengths, lengths)
    whole = jax.jit(lambda model: model(ids, lengths=lengths))(model)
    expected = np.asarray(whole)[np.arange(2), lengths - 1]
    rms = np.sqrt(np.mean(np.square(expected)))
    assert np.abs(logits - expected).max() / rms <= BOUND


def test_generate_takes_long_prompts_by_chunks():
    """Chunked prefill gives the same tokens. Prompts of any lengths share a few programs.

    Of the tokens of the three chunks, 5, 4 and 3 eighths are computed, and all of them for rows of
    equal length.
    """
    model = load_model(EXAMPLE, dtype=jnp.float32)
    ids = np.random.default_rng(1).integers(4096, size=(2, TOKENS), dtype=np.int32)
    given = {"lengths": np.array([TOKENS, 31], np.int32), "max_new_tokens": 4}
    expected = generate(model, ids, **given)
    before = prefill._extend._cache_size()
    np.testing.assert_array_equal(generate(model, ids, **given, prefill_chunk=CHUNK), expected)
    shorter = stream(model, ids[:, :650], max_new_tokens=4, prefill_chunk=CHUNK)
    np.testing.assert_array_equal(
        next(shorter)[1:], generate(model, ids[1:, :650], max_new_tokens=1)[:, 0]
    )
    assert prefill._extend._cache_size() == before + 4
    lengths = np.array([TOKENS, 62], np.int32)
    generate(model, ids, lengths=lengths, max_new_tokens=4, prefill_chunk=CHUNK)
    assert prefill._extend._cache_size() == before + 4
    with pytest.raises(ValueError, match="prefill_chunk: expected at least 1, got 0"):
        generate(model, ids, max_new_tokens=8, prefill_chunk=0)


@pytest.mark.parametrize("window", [300, 601])
def test_evaluation_does_not_depend_on_the_chunk(window, monkeypatch):
    """The chunk divides one of the windows; the other window ends with a partial chunk."""
    model = load_model(EXAMPLE, dtype=jnp.float32)
    ids = np.random.default_rng(2).integers(4096, size=3 * window, dtype=np.int32)
    whole = evaluate(model, ids, window=window, by_window=True)
    monkeypatch.setattr(evaluation, "_CHUNK", 100)
    monkeypatch.setattr(evaluation, "_BATCH_TOKENS", 2 * window)
    parts = evaluate(model, ids, window=window, by_window=True)
    np.testing.assert_allclose(parts["cross_entropies"], whole["cross_entropies"], rtol=1e-6)
    assert parts["predicted_tokens"] == whole["predicted_tokens"]
