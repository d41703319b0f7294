"""Chunked prefill: run long prompts through the model chunk by chunk.

Apart from the cache, the memory of a prefill then depends on the size of a chunk and not on the
length of the prompt.
"""

import functools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Int32

from jax_nvfp4_moe.inference.flat_model import flatten_model, restore_model
from jax_nvfp4_moe.parallel.whole_steps import start_together

# The default number of tokens in a chunk, of each row and of all rows. On an H200, 8192 tokens of
# Qwen3-30B-A3B took 135 ms in one piece and 152 ms in two.
_CHUNK, _CHUNK_TOKENS = 8192, 65536
# Launch the kernels of a prefill one by one. XLA would make CUDA graphs in the first two calls of a
# program, which on an H200 took 64 ms instead of 39 for 2048 tokens of Qwen3-30B-A3B. Later calls
# took the same time, and a prompt of another length has another program.
NO_GRAPHS = {"xla_gpu_enable_command_buffer": ""}
SCORE_CHUNK = 2048  # tokens that each row has in a chunk of a text whose tokens are scored
PROMPT_STEP = 32  # short prompts are padded to a multiple of this number of tokens
# The last chunk is padded to a multiple of this number, so that prompts of different lengths share
# compiled programs.
_LAST_STEP = 512
# Number of programs for batches of one shape with different numbers of true tokens. Texts to score
# are sorted by their length, so that a batch has little padding.
_SIZES, _SCORED_SIZES = 8, 4


def default_chunk(rows: int) -> int:
    """Return how many tokens of each row go through the model together, unless users say it."""
    return max(1, min(_CHUNK, _CHUNK_TOKENS // rows))


def chunk_ranges(length: int, chunk: int) -> Iterator[tuple[int, int]]:
    """Yield the start and end of each chunk. The last end is `length`, rounded up."""
    for start in range(0, length, chunk):
        step = min(_LAST_STEP, chunk)
        yield start, start + min(chunk, -(-(length - start) // step) * step)


def padded_length(length: int, chunk: int) -> int:
    """Return the end of the last chunk of `chunk_ranges`."""
    *_, (_, end) = chunk_ranges(length, chunk)
    return end


def count_tokens(lengths: Int32[np.ndarray, " b"], t: int, sizes: int = _SIZES) -> int | None:
    """Return for how many tokens of a padded batch to compile a program.

    The number of true tokens is rounded up to one of a few sizes. So a few programs serve batches
    of one shape, whatever the lengths of their rows.

    Args:
      lengths: number of true tokens in each row.
      t: number of tokens in a padded row.
      sizes: the number of sizes, which are multiples of ``b * t / sizes``. 8 by default.

    Returns:
      The argument `num_tokens` of a model. It is None for a single row, and if rounding leaves no
      padding out.
    """
    whole = len(lengths) * t
    step = -(-whole // sizes)
    rounded = -(-int(lengths.sum()) // step) * step
    return None if len(lengths) == 1 or rounded >= whole else max(rounded, step)


@functools.partial(jax.jit, static_argnums=(1, 2))
def empty_cache(model: Any, batch: int, max_length: int) -> Any:
    """Return an empty cache. On a mesh, each device allocates its own part only."""
    return restore_model(model).init_cache(batch, max_length)


@functools.partial(jax.jit, static_argnums=1)
def _empty_logits(model, batch):
    """Return logits of zeros ``[b, vocab]``."""
    return jnp.zeros((batch, restore_model(model).config.vocab_size), jnp.float32)


def prefill_chunks(
    model: Any,
    cache: Any,
    ids: Int32[np.ndarray, "b t"],
    lengths: Int32[np.ndarray, " b"],
    chunk: int,
) -> tuple[Float[Array, "b vocab"], Any]:
    """Run new tokens of each row through the model, chunk by chunk, and extend the cache.

    Args:
      model: model, as `load_model` returns it, or a `FlatModel`.
      cache: cache with room for `padded_length` more tokens in each row. Its arrays are donated:
        do not use them again.
      ids: new tokens, int32 ``[b, t]``, left-aligned. Tokens after the length of a row have no
        effect.
      lengths: number of new tokens in each row, int32 ``[b]``, from 1 to t.
      chunk: number of tokens of each row that go through the model together.

    Returns:
      The logits after the last token of each row, float32 ``[b, vocab]``, and the extended cache.
    """
    b, t = ids.shape
    model = flatten_model(model)
    logits = _empty_logits(model, b)
    for start, end in chunk_ranges(t, chunk):
        part, counts = _take_columns(ids, start, end), _count_between(lengths, start, end)
        size = count_tokens(counts, end - start)
        logits, cache = _extend(model, cache, part, counts, logits, num_tokens=size)
    return logits, cache


@functools.partial(
    jax.jit, static_argnames="num_tokens", donate_argnames="cache", compiler_options=NO_GRAPHS
)
def _extend(model, cache, ids, counts, logits, num_tokens):
    """Run one chunk; rows that ended before this chunk keep their `logits`."""
    model = restore_model(model)
    counts = start_together(model, counts)
    at = jnp.maximum(counts - 1, 0)
    new, cache = model(ids, cache, lengths=counts, logits_at=at, num_tokens=num_tokens)
    # The model constrains the layout of its cache. Without the barrier, jax.jit would not store
    # such a result in donated memory.
    cache = lax.optimization_barrier(cache)
    return jnp.where(counts[:, None] > 0, new[:, 0], logits), cache


def score_texts(
    model: Any,
    ids: Int32[np.ndarray, "b t"],
    targets: Int32[np.ndarray, "b t"],
    counted: Bool[np.ndarray, "b t"],
    lengths: Int32[np.ndarray, " b"],
    chunk: int = SCORE_CHUNK,
) -> tuple[Float[Array, " b"], Bool[Array, " b"]]:
    """Score the token after each position, chunk by chunk.

    Args:
      model: model, as `load_model` returns it, or a `FlatModel`.
      ids: tokens that the model reads, left-aligned. Tokens after the length of a row have no
        effect.
      targets: the token to score after each token of `ids`.
      counted: which of the targets count, at most the first ``lengths[b]`` ones of each row.
      lengths: number of tokens in each row, from 1 to t.
      chunk: number of tokens of each row that go through the model together. Shorter texts run
        without a cache.

    Returns:
      The sum of the log-probabilities of the counted targets, in nats, and whether all of them are
      the most likely tokens.
    """
    b, t = ids.shape
    model = flatten_model(model)
    if t <= chunk:
        size = count_tokens(lengths, t, _SCORED_SIZES)
        return _score_whole(model, ids, targets, counted, lengths, num_tokens=size)
    cache = empty_cache(model, b, padded_length(t, chunk))
    found = jnp.zeros(b, jnp.float32), jnp.ones(b, jnp.bool_)
    for start, end in chunk_ranges(t, chunk):
        parts = (_take_columns(x, start, end) for x in (ids, targets, counted))
        counts = _count_between(lengths, start, end)
        size = count_tokens(counts, end - start, _SCORED_SIZES)
        found, cache = _add_scores(model, cache, *parts, counts, found, num_tokens=size)
    return found


@functools.partial(jax.jit, static_argnames="num_tokens")
def _score_whole(model, ids, targets, counted, lengths, num_tokens):
    """Score whole texts."""
    model = restore_model(model)
    lengths = start_together(model, lengths)
    return _summarize(model.score(ids, targets, lengths=lengths, num_tokens=num_tokens), counted)


@functools.partial(jax.jit, static_argnames="num_tokens", donate_argnames="cache")
def _add_scores(model, cache, ids, targets, counted, counts, found, num_tokens):
    """Add the scores of one chunk to those that were found before it."""
    model = restore_model(model)
    counts = start_together(model, counts)
    scores, cache = model.score(ids, targets, cache, lengths=counts, num_tokens=num_tokens)
    cache = lax.optimization_barrier(cache)  # as in `_extend`
    summed, likeliest = _summarize(scores, counted)
    return (found[0] + summed, found[1] & likeliest), cache


def _summarize(scores, counted):
    """Return the summed log-probability of each row, and whether all its targets are likeliest."""
    summed = jnp.where(counted, scores.log_probability, 0).sum(axis=-1)
    return summed, (scores.likeliest | ~counted).all(axis=-1)


def _take_columns(x: np.ndarray, start: int, end: int) -> np.ndarray:
    """Return the columns from `start` to `end`, with zeros for those that `x` does not have."""
    taken = x[:, start:end]
    return np.pad(taken, ((0, 0), (0, end - start - taken.shape[1])))


def _count_between(lengths, start: int, end: int) -> np.ndarray:
    """Return how many true tokens of each row lie from `start` to `end`."""
    return np.clip(lengths - start, 0, end - start).astype(np.int32)
