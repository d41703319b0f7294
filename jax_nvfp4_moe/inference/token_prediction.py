"""Draft with the model's own drafting layers: multi-token prediction.

A drafting layer reads the pair of a token's hidden state and the token that follows, and predicts
the one after that. Its own result takes the place of the hidden state for the next draft. The layer
has a cache of its own. It holds pairs of accepted tokens; those of drafts are overwritten.

Source: arXiv:2412.19437, section 2.2.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int32

NEEDS_HIDDEN = True  # hidden states of the model make drafts


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Memory:
    """What the drafting layers have read, and the pairs that they have not.

    Attributes:
      cache: cache of the drafting layers.
      hidden: hidden states of the last tokens ``[b, w, h]``.
      following: the token after each of them, int32 ``[b, w]``.
      count: number of these pairs that are to be read, int32 ``[b]``.
      start: position of the first of them, int32 ``[b]``.
    """

    cache: Any
    hidden: Float[Array, "b w h"]
    following: Int32[Array, "b w"]
    count: Int32[Array, " b"]
    start: Int32[Array, " b"]


def begin(
    cache: Any, hidden: Float[Array, "b h"], first: Int32[Array, " b"], window: int
) -> Memory:
    """Return the memory after a prompt.

    Args:
      cache: cache of the drafting layers, with all pairs of the prompt.
      hidden: hidden state of the last token of each prompt.
      first: the first new token of each row.
      window: largest number of tokens of one step, w.
    """
    behind = [(0, 0), (0, window - 1)]
    states = jnp.pad(hidden[:, None], [*behind, (0, 0)])
    following = jnp.pad(first[:, None], behind)
    return Memory(cache, states, following, jnp.ones_like(first), cache.lengths)


def record(
    memory: Memory,
    new: Int32[Array, "b t"],
    emitted: Int32[Array, " b"],
    hidden: Float[Array, "b t h"],
) -> Memory:
    """Return the memory with the pairs of `hidden` and the tokens after them.

    Args:
      memory: the memory. Its pairs have been read, or never will be, if no draft was needed.
      new: the new tokens of each row.
      emitted: how many of them count.
      hidden: hidden state of the token before each of them.
    """
    behind = [(0, 0), (0, memory.following.shape[1] - new.shape[1])]
    states, following = jnp.pad(hidden, [*behind, (0, 0)]), jnp.pad(new, behind)
    return Memory(memory.cache, states, following, emitted, memory.start + memory.count)


def propose(model: Any, memory: Memory, count: int) -> tuple[Int32[Array, "b n"], Memory]:
    """Return `count` drafted tokens of each row, and the memory after the pairs were read."""
    last, cache = jnp.maximum(memory.count - 1, 0), _at(memory.cache, memory.start)
    logits, hidden, cache = model.draft(
        memory.hidden, memory.following, cache, lengths=memory.count, logits_at=last
    )
    hidden = jnp.take_along_axis(hidden, last[:, None, None], axis=1)
    drafts, read = [_likeliest(logits)], cache
    for _ in range(count - 1):
        logits, hidden, cache = model.draft(hidden, drafts[-1], cache)
        drafts.append(_likeliest(logits))
    cache = model.forget_drafts(read, cache)
    return jnp.concatenate(drafts, axis=1), dataclasses.replace(memory, cache=cache)


def _at(cache, lengths):
    """Return the cache of rows with so many pairs. Those of drafts are then overwritten."""
    return type(cache)(cache.layers, lengths, cache.max_length)


def _likeliest(logits):
    """Return the token with the largest logit, ``[b, 1]``."""
    return jnp.argmax(logits, axis=-1).astype(jnp.int32)
