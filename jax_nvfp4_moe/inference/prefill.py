"""Chunked prefill: long prompts go through the model chunk by chunk.

The memory of a prefill then depends on the chunk and not on the prompt, but for the cache itself.
"""

import functools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int32

CHUNK = 4096  # tokens of each row in a chunk, unless the caller says otherwise
# The last chunk is padded to a multiple of it, so that prompts of many lengths share programs.
_LAST_STEP = 512


def chunk_ranges(length: int, chunk: int) -> Iterator[tuple[int, int]]:
    """Yield start and end of each chunk; the last end is `length` rounded up."""
    for start in range(0, length, chunk):
        step = min(_LAST_STEP, chunk)
        yield start, start + min(chunk, -(-(length - start) // step) * step)


def padded_length(length: int, chunk: int) -> int:
    """Return the end of the last chunk of `chunk_ranges`."""
    *_, (_, end) = chunk_ranges(length, chunk)
    return end


@functools.partial(jax.jit, static_argnums=(1, 2))
def empty_cache(model: Any, batch: int, max_length: int) -> Any:
    """Return an empty cache, made by one program, so that over a mesh it is born divided."""
    return model.init_cache(batch, max_length)


def prefill_chunks(
    model: Any,
    cache: Any,
    ids: Int32[np.ndarray, "b t"],
    lengths: Int32[np.ndarray, " b"],
    chunk: int,
) -> tuple[Float[Array, "b vocab"], Any]:
    """Extend a cache by the tokens of each row, chunk by chunk.

    Args:
      model: as `load_model` returns.
      cache: with room for `padded_length` tokens more; its arrays are given away.
      ids: tokens of each row; those behind its length are not read.
      lengths: number of new tokens of each row, 1 to t.
      chunk: tokens of each row that go through the model together.

    Returns:
      Float32 logits after the last token of each row, and the cache.
    """
    b, t = ids.shape
    logits = jnp.zeros((b, model.config.vocab_size), jnp.float32)
    for start, end in chunk_ranges(t, chunk):
        part = np.zeros((b, end - start), np.int32)
        part[:, : t - start] = ids[:, start:end]
        counts = np.clip(lengths - start, 0, end - start).astype(np.int32)
        logits, cache = _extend(model, cache, part, counts, logits)
    return logits, cache


@functools.partial(jax.jit, donate_argnames="cache")
def _extend(model, cache, ids, counts, logits):
    """Run one chunk; rows that have ended before it keep their logits."""
    new, cache = model(ids, cache, lengths=counts, logits_at=jnp.maximum(counts - 1, 0))
    # jax.jit gives no donated memory to a result whose layout the model constrains.
    cache = lax.optimization_barrier(cache)
    return jnp.where(counts[:, None] > 0, new[:, 0], logits), cache


def sum_losses(model: Any, ids: Int32[np.ndarray, "b t"], chunk: int) -> Float[Array, " b"]:
    """Return the summed cross-entropy of each row's tokens but the first, chunk by chunk.

    Args:
      model: as `load_model` returns.
      ids: tokens ``[b, t]``.
      chunk: tokens of each row that go through the model together; logits of so many are kept.
    """
    b, t = ids.shape
    cache, losses = empty_cache(model, b, padded_length(t, chunk)), jnp.zeros(b, jnp.float32)
    for start, end in chunk_ranges(t, chunk):
        part, targets = np.zeros((2, b, end - start), np.int32)
        part[:, : t - start] = ids[:, start:end]
        targets[:, : t - start - 1] = ids[:, start + 1 : end + 1]
        count, predicted = np.int32(min(t, end) - start), np.int32(min(t - 1, end) - start)
        losses, cache = _add_losses(model, cache, part, targets, count, predicted, losses)
    return losses


@functools.partial(jax.jit, donate_argnames="cache")
def _add_losses(model, cache, ids, targets, count, predicted, losses):
    """Add the cross-entropy of the first `predicted` targets of a chunk of `count` tokens."""
    b, t = ids.shape
    logits, cache = model(ids, cache, lengths=jnp.broadcast_to(count, (b,)))
    cache = lax.optimization_barrier(cache)
    chosen = jnp.take_along_axis(logits, targets[..., None], axis=-1)[..., 0]
    each = jax.nn.logsumexp(logits, axis=-1) - chosen
    real = jnp.arange(t, dtype=jnp.int32)[None, :] < predicted
    return losses + jnp.where(real, each, 0).sum(axis=-1), cache
