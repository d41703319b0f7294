"""Test chunked prefill: results do not depend on the chunk, and few programs are compiled.

`test_long_text` compares the logits of chunks with those of small pieces, for each mixer.
"""

import numpy as np
import pytest
from support.files.given import CHECKPOINTS, copy_with_config

from jax_nvfp4_moe import evaluate, generate, load_model, stream
from jax_nvfp4_moe.inference import evaluation, generation, prefill
from jax_nvfp4_moe.inference.prefill import (
    chunk_ranges,
    count_tokens,
    default_chunk,
    padded_length,
    score_texts,
)

TOKENS, CHUNK = 700, 256
NEW = 70  # more than a step of the room for new tokens


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
    ("rows", "chunk"), [(1, 8192), (8, 8192), (9, 7281), (64, 1024), (65536, 1), (65537, 1)]
)
def test_default_chunks_of_many_rows_are_short(rows, chunk):
    assert default_chunk(rows) == chunk


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


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """Return a model of two layers with room for 1024 tokens, in float32."""
    folder, given = tmp_path_factory.mktemp("long") / "m", CHECKPOINTS / "qwen3moe-modelopt-w4a16"
    return load_model(
        copy_with_config(given, folder, max_position_embeddings=1024), dtype="float32"
    )


def random_ids(model, seed, size):
    return np.random.default_rng(seed).integers(model.config.vocab_size, size=size, dtype=np.int32)


def test_generate_takes_long_prompts_by_chunks(model):
    """Chunked prefill gives the same tokens. Prompts of any lengths share a few programs.

    Of the tokens of the three chunks, 5, 4 and 3 eighths are computed, and all of them for rows of
    equal length.
    """
    ids = random_ids(model, 1, (2, TOKENS))
    given = {"lengths": np.array([TOKENS, 31], np.int32), "max_new_tokens": NEW}
    expected = generate(model, ids, **given)
    before = prefill._extend._cache_size()
    np.testing.assert_array_equal(generate(model, ids, **given, prefill_chunk=CHUNK), expected)
    shorter = stream(model, ids[:, :650], max_new_tokens=NEW, prefill_chunk=CHUNK)
    np.testing.assert_array_equal(
        next(shorter)[1:], generate(model, ids[1:, :650], max_new_tokens=1)[:, 0]
    )
    assert prefill._extend._cache_size() == before + 4
    lengths = np.array([TOKENS, 62], np.int32)
    generate(model, ids, lengths=lengths, max_new_tokens=NEW, prefill_chunk=CHUNK)
    assert prefill._extend._cache_size() == before + 4
    with pytest.raises(ValueError, match="prefill_chunk: expected at least 1, got 0"):
        generate(model, ids, max_new_tokens=NEW, prefill_chunk=0)


def test_generate_divides_prompts_longer_than_its_default_chunk(model, monkeypatch):
    monkeypatch.setattr(prefill, "_CHUNK", CHUNK)
    ids, taken = random_ids(model, 3, (2, TOKENS)), []

    def record(*operands):
        taken.append(operands[-1])
        return prefill.prefill_chunks(*operands)

    monkeypatch.setattr(generation, "prefill_chunks", record)
    tokens = generate(model, ids, max_new_tokens=NEW)
    assert taken == [CHUNK]
    whole = generate(model, ids, max_new_tokens=NEW, prefill_chunk=TOKENS)
    np.testing.assert_array_equal(tokens, whole)


def test_scores_do_not_depend_on_the_chunk(model):
    """The sum and the word "all likeliest" are of all chunks, and of the targets that count."""
    t, chunk = 24, 8
    ids = random_ids(model, 4, (5, t))
    targets = np.asarray(model(ids)).argmax(axis=-1).astype(np.int32)
    counted = np.broadcast_to((np.arange(t) >= 2) & (np.arange(t) < t - 2), ids.shape)
    wrong = {1: 3, 2: chunk + 3, 3: 2 * chunk + 3, 4: t - 1}  # the last one does not count
    for row, place in wrong.items():
        targets[row, place] = (targets[row, place] + 1) % model.config.vocab_size
    lengths = np.full(len(ids), t, np.int32)
    given = ids, targets, counted, lengths
    whole, parts = (map(np.asarray, score_texts(model, *given, chunk=size)) for size in (t, chunk))
    (sums, likeliest), (summed, all_likeliest) = whole, parts
    np.testing.assert_array_equal(likeliest, [True, False, False, False, True])
    np.testing.assert_array_equal(all_likeliest, likeliest)
    np.testing.assert_allclose(summed, sums, rtol=1e-5)


@pytest.mark.parametrize("window", [300, 601])
def test_evaluation_does_not_depend_on_the_chunk(model, window, monkeypatch):
    """The chunk divides one of the windows; the other window ends with a partial chunk."""
    ids = random_ids(model, 2, 3 * window)
    whole = evaluate(model, ids, window=window, by_window=True)
    monkeypatch.setattr(evaluation, "SCORE_CHUNK", 100)
    monkeypatch.setattr(evaluation, "_BATCH_TOKENS", 2 * window)
    parts = evaluate(model, ids, window=window, by_window=True)
    np.testing.assert_allclose(parts["cross_entropies"], whole["cross_entropies"], rtol=1e-6)
    assert parts["predicted_tokens"] == whole["predicted_tokens"]
