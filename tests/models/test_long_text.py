"""Test texts of 900 tokens in float32: as one prompt, in pieces, in chunks, and by `generate`.

Texts of 5000 tokens are compared with transformers, and with chunks that have single tokens behind
them.

A piece has fewer queries than a block of attention and fewer tokens than a chunk of a recurrent
mixer. `test_architectures` checks the results of such pieces on shorter texts. Single tokens would
take several times as long; `generate` computes those behind the prompt.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.files.given import (
    CHECKPOINTS,
    EXAMPLE,
    EXAMPLE_REFERENCE,
    copy_with_config,
    reference_tensors,
)
from support.models.architecture import LONG_TEXTS

from jax_nvfp4_moe import generate, load_model
from jax_nvfp4_moe.inference import generation
from jax_nvfp4_moe.inference.prefill import empty_cache, padded_length, prefill_chunks
from jax_nvfp4_moe.inference.tokenizer import load_tokenizer
from jax_nvfp4_moe.ops.causal_attention import meaning

PROMPT, NEW, PIECE = 700, 200, 9
TEXT = PROMPT + NEW
# Bound of the worst logit, in units of the root mean square of all logits. Another order of float32
# sums causes 1.4e-6 to 8.6e-6, most of it in gated delta nets.
BOUND = 2e-5
LONG = 5000
# Rows of 5000 tokens that are compared; both where a folder is not named. In the other row of this
# one, two compressed keys have nearly equal scores for some query before token 1500. Noise of 1e-6
# in the embeddings changes which of them is chosen, and so does the order of sums of a machine. It
# moves later logits by up to 4e-3. In the row that is compared, no such noise moved one by 1.4e-5.
SURE_ROWS = {"deepseek_v4-modelopt-w4a16": [0]}
run = jax.jit(lambda model, ids: model(ids))
step = jax.jit(lambda model, ids, cache: model(ids, cache))


@functools.partial(jax.jit, static_argnames="count")
def in_pieces(model, ids, count):
    """Return the logits of all tokens, computed `count` tokens at a time."""
    b, t = ids.shape

    def take(cache, piece):
        logits, cache = model(piece, cache)
        return cache, logits

    pieces = jnp.moveaxis(ids.reshape(b, -1, count), 1, 0)
    _, logits = jax.lax.scan(take, model.init_cache(b, t), pieces)
    return jnp.moveaxis(logits, 0, 1).reshape(b, t, -1)


def load(name, folder, positions=TEXT, **changes):
    """Copy the checkpoint `name` to the new `folder`, and load it with so many positions.

    `changes` are fields of the config. YaRN of some folders is for fewer positions.
    """
    copy = copy_with_config(CHECKPOINTS / name, folder, **changes)
    model = load_model(copy, dtype=jnp.float32)
    model.config = dataclasses.replace(model.config, max_positions=positions)
    return model


def random_text(model, tokens, rows=2):
    """Return random tokens ``[rows, tokens]``."""
    vocabulary = model.config.vocab_size
    return np.random.default_rng(0).integers(vocabulary, size=(rows, tokens), dtype=np.int32)


def error(logits, expected):
    """Return the worst error in units of the root mean square."""
    return np.abs(np.asarray(logits) - expected).max() / np.sqrt(np.mean(np.square(expected)))


def error_of_5000_tokens(name, logits):
    """Return the worst error against transformers, which tests/reference/long_texts.py ran."""
    there, rows = reference_tensors(CHECKPOINTS / "long-texts"), SURE_ROWS.get(name, [0, 1])
    return error(np.asarray(logits)[rows][:, there["positions"]], there[name][rows])


def check(model, prompt, lengths=None, **how):
    """Check that logits do not depend on the pieces, and that `generate` follows these logits.

    Args:
      model: model in float32.
      prompt: token ids ``[b, PROMPT]``.
      lengths: number of tokens in each prompt. None means PROMPT for all.
      how: further arguments of `generate`.

    Returns:
      The logits of the text, computed by pieces. What follows the new tokens of a shorter row is of
      the prompt.
    """
    assert prompt.shape[1] > meaning._REFERENCE_QUERIES
    how = {"stop_ids": (), "lengths": lengths} | how
    tokens = np.asarray(generate(model, prompt, max_new_tokens=NEW, **how))
    assert tokens.shape == (len(prompt), NEW)
    lengths = np.full(len(prompt), PROMPT) if lengths is None else lengths
    new = lengths[:, None] + np.arange(NEW)
    text = np.pad(prompt, ((0, 0), (0, NEW)))
    np.put_along_axis(text, new, tokens, axis=1)
    expected = np.asarray(in_pieces(model, text, PIECE))
    assert error(run(model, text), expected) <= BOUND
    before = np.take_along_axis(expected, new[..., None] - 1, axis=1)
    chosen = np.take_along_axis(before, tokens[..., None], axis=-1)[..., 0]
    assert error(chosen, before.max(axis=-1)) <= BOUND
    return expected


@pytest.mark.parametrize("name", LONG_TEXTS)
def test_a_long_text_of_each_mixer(name, tmp_path, monkeypatch):
    """The shorter row ends in the first chunk of the prompts, and `generate` continues both rows.

    All chunks have so few tokens that they share a program.
    """

    def keep(*arguments):
        logits, cache = prefill_chunks(*arguments)
        kept.append(jax.device_get((logits, cache.lengths)))  # decoding takes the cache's memory
        return logits, cache

    kept = []
    monkeypatch.setattr(generation, "prefill_chunks", keep)
    model = load(name, tmp_path / "m")
    lengths, chunk = np.array([PROMPT, 2], np.int32), 234
    expected = check(model, random_text(model, PROMPT), lengths, prefill_chunk=chunk)
    ((logits, filled),) = kept
    np.testing.assert_array_equal(filled, lengths)
    assert error(logits, expected[np.arange(2), lengths - 1]) <= BOUND


@pytest.mark.slow
@pytest.mark.parametrize("name", LONG_TEXTS)
def test_5000_tokens_of_each_mixer(name, tmp_path):
    """One prompt has the logits of transformers, and so have chunks with single tokens behind them.

    Half of the tokens are in a short row of the batch, too. The chunk divides neither row.
    """
    model = load(name, tmp_path / "m", LONG)
    ids, rows = random_text(model, LONG), np.arange(2)
    lengths, steps, chunk = np.array([LONG, LONG // 2 + 1], np.int32), 4, 4096
    ends = lengths[:, None] - 1 + np.arange(1 - steps, 1)[None]
    whole = np.asarray(run(model, ids))
    assert error_of_5000_tokens(name, whole) <= BOUND
    whole = whole[rows[:, None], ends]
    cache = empty_cache(model, 2, padded_length(LONG, chunk))
    before, cache = prefill_chunks(model, cache, ids, lengths - steps + 1, chunk)
    logits = [before]
    for at in ends[:, 1:].T:
        new, cache = step(model, ids[rows, at][:, None], cache)
        logits.append(new[:, 0])
    np.testing.assert_array_equal(cache.lengths, lengths)
    sure = SURE_ROWS.get(name, [0, 1])
    assert error(np.stack(logits, axis=1)[sure], whole[sure]) <= BOUND


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("mixtral-window-modelopt-w4a16", {"sliding_window": 7}),
        ("gpt_oss-modelopt-w4a16", {"sliding_window": 7}),
        ("llama4_text-modelopt-w4a16", {"attention_chunk_size": 17}),
        (
            "qwen3_next-modelopt-w4a16",
            {"rope_parameters": {"rope_theta": 1.01e4, "partial_rotary_factor": 0.25}},
        ),
    ],
)
def test_the_bound_of_5000_tokens_catches_a_fault(name, changes, tmp_path):
    """Negative control: a field of the config that decides what a late token sees is wrong."""
    model = load(name, tmp_path / "m", LONG, **changes)
    assert error_of_5000_tokens(name, run(model, random_text(model, LONG))) > 100 * BOUND


def test_a_long_text_of_the_example():
    model = load_model(EXAMPLE, dtype=jnp.float32)
    text = (EXAMPLE_REFERENCE / "heldout.txt").read_text(encoding="utf-8")
    check(model, load_tokenizer(EXAMPLE).encode(text)[None, :PROMPT])


def test_the_last_position_is_the_last_that_is_taken(tmp_path):
    """`check` fills all positions of `TEXT`. A model and `generate` refuse one more token."""
    model = load(LONG_TEXTS[1], tmp_path / "m")
    ids = random_text(model, TEXT + 1, rows=1)
    jax.eval_shape(lambda: model(ids[:, :TEXT]))
    with pytest.raises(ValueError, match=f"would have {TEXT + 1} tokens, but .* {TEXT} positions"):
        model(ids)
    cache = model.init_cache(1, TEXT + 1)
    before = dataclasses.replace(cache, lengths=np.array([TEXT - 1], np.int32))
    jax.eval_shape(lambda: model(ids[:, :1], before))
    full = dataclasses.replace(cache, lengths=np.array([TEXT], np.int32))
    with pytest.raises(ValueError, match=f"would have {TEXT + 1} tokens"):
        model(ids[:, :1], full)
    prompt = ids[:, : PROMPT + 1]
    with pytest.raises(
        ValueError, match=f"{PROMPT + 1} tokens and {NEW} new tokens .* {TEXT} positions"
    ):
        generate(model, prompt, max_new_tokens=NEW)
