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
from jaxtyping import Array, Float, Int32

CHUNK = 4096  # default number of tokens that each row has in a chunk
# The last chunk is padded to a multiple of this number, so that prompts of different lengths share
# compiled programs.
_LAST_STEP = 512
_SIZES = 8  # number of programs for batches of one shape with different numbers of true tokens


def chunk_ranges(length: int, chunk: int) -> Iterator[tuple[int, int]]:
    """Yield the start and end of each chunk. The last end is `length`, rounded up."""
    for start in range(0, length, chunk):
        step = min(_LAST_STEP, chunk)
        yield start, start + min(chunk, -(-(length - start) // step) * step)


def padded_length(length: int, chunk: int) -> int:
    """Return the end of the last chunk of `chunk_ranges`."""
    *_, (_, end) = chunk_ranges(length, chunk)
    return end


def count_tokens(lengths: Int32[np.ndarray, " b"], t: int) -> int | None:
    """Return for how many tokens of a padded batch to compile a program.

    The number of true tokens is rounded up to a multiple of an eighth of all ``b * t`` tokens. So
    at most eight programs serve batches of one shape, whatever the lengths of their rows.

    Args:
      lengths: number of true tokens in each row.
      t: number of tokens in a padded row.

    Returns:
      The argument `num_tokens` of a model. It is None for a single row, and if rounding leaves no
      padding out.
    """
    whole = len(lengths) * t
    step = -(-whole // _SIZES)
    rounded = -(-int(lengths.sum()) // step) * step
    return None if len(lengths) == 1 or rounded >= whole else max(rounded, step)


@functools.partial(jax.jit, static_argnums=(1, 2))
def empty_cache(model: Any, batch: int, max_length: int) -> Any:
    """Return an empty cache. On a mesh, each device allocates its own part only."""
    return model.init_cache(batch, max_length)


def prefill_chunks(
    model: Any,
    cache: Any,
    ids: Int32[np.ndarray, "b t"],
    lengths: Int32[np.ndarray, " b"],
    chunk: int,
) -> tuple[Float[Array, "b vocab"], Any]:
    """Run new tokens of each row through the model, chunk by chunk, and extend the cache.

    Args:
      model: model, as `load_model` returns it.
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
    logits = jnp.zeros((b, model.config.vocab_size), jnp.float32)
    for start, end in chunk_ranges(t, chunk):
        part = np.zeros((b, end - start), np.int32)
        part[:, : t - start] = ids[:, start:end]
        counts = np.clip(lengths - start, 0, end - start).astype(np.int32)
        size = count_tokens(counts, end - start)
        logits, cache = _extend(model, cache, part, counts, logits, num_tokens=size)
    return logits, cache


@functools.partial(jax.jit, static_argnames="num_tokens", donate_argnames="cache")
def _extend(model, cache, ids, counts, logits, num_tokens):
    """Run one chunk; rows that ended before this chunk keep their `logits`."""
    at = jnp.maximum(counts - 1, 0)
    new, cache = model(ids, cache, lengths=counts, logits_at=at, num_tokens=num_tokens)
    # The model constrains the layout of its cache. Without the barrier, jax.jit would not store
    # such a result in donated memory.
    cache = lax.optimization_barrier(cache)
    return jnp.where(counts[:, None] > 0, new[:, 0], logits), cache


def sum_losses(model: Any, ids: Int32[np.ndarray, "b t"], chunk: int) -> Float[Array, " b"]:
    """Sum the cross-entropy of all tokens of each row except the first, chunk by chunk.

    Args:
      model: model, as `load_model` returns it.
      ids: tokens, int32 ``[b, t]``, without padding.
      chunk: number of tokens of each row that go through the model together. The logits of one
        chunk are in memory at a time.

    Returns:
      float32 ``[b]``, in nats.
    """
    b, t = ids.shape
    cache, losses = empty_cache(model, b, padded_length(t, chunk)), jnp.zeros(b, jnp.float32)
    for start, end in chunk_ranges(t, chunk):
        part, targets = np.zeros((2, b, end - start), np.int32)
        part[:, : t - start] = ids[:, start:end]
        targets[:, : t - start - 1] = ids[:, start + 1 : end + 1]
        count, predicted = np.int32(min(t, end) - start), np.int32(min(t - 1, end) - start)
        size = count_tokens(np.full(b, count), end - start)
        given = cache, part, targets, count, predicted, losses
        losses, cache = _add_losses(model, *given, num_tokens=size)
    return losses


@functools.partial(jax.jit, static_argnames="num_tokens", donate_argnames="cache")
def _add_losses(model, cache, ids, targets, count, predicted, losses, num_tokens):
    """Add the cross-entropy of the first `predicted` targets of a chunk of `count` tokens."""
    b, t = ids.shape
    lengths = jnp.broadcast_to(count, (b,))
    logits, cache = model(ids, cache, lengths=lengths, num_tokens=num_tokens)
    cache = lax.optimization_barrier(cache)  # as in `_extend`
    chosen = jnp.take_along_axis(logits, targets[..., None], axis=-1)[..., 0]
    each = jax.nn.logsumexp(logits, axis=-1) - chosen
    real = jnp.arange(t, dtype=jnp.int32)[None, :] < predicted
    return losses + jnp.where(real, each, 0).sum(axis=-1), cache
