"""Draft from the text so far: the tokens that followed the last ones when they occurred before.

The last tokens of the text, up to `LONGEST` of them, are sought earlier in it, on the device. What
followed the latest of the longest matches is the draft. Code that is edited, and answers that quote
their prompt, repeat themselves; other texts draft nothing.

Source: github.com/apoorvumang/prompt-lookup-decoding.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Int32

LONGEST = 8  # tokens of a suffix that are compared
NOTHING = -1  # in place of a drafted token where there is no draft
NEEDS_HIDDEN = False  # the text alone makes drafts


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Memory:
    """The text of each row.

    Attributes:
      text: tokens of the prompt and new tokens, int32 ``[b, room]``.
      lengths: number of tokens in each text, int32 ``[b]``.
    """

    text: Int32[Array, "b room"]
    lengths: Int32[Array, " b"]


def begin(prompt: Int32[Array, "b t"], lengths: Int32[Array, " b"], room: int) -> Memory:
    """Return the memory of prompts, with room for `room` new tokens."""
    return Memory(jnp.pad(prompt, [(0, 0), (0, room)]), lengths)


def record(
    memory: Memory, new: Int32[Array, "b w"], emitted: Int32[Array, " b"], hidden: Any
) -> Memory:
    """Return the memory with the first `emitted` tokens of `new`."""
    del hidden

    def write(row, start, new):
        return lax.dynamic_update_slice_in_dim(row, new, start, axis=0)

    text = jax.vmap(write)(memory.text, memory.lengths, new)
    return Memory(text, memory.lengths + emitted)


def propose(model: Any, memory: Memory, count: int) -> tuple[Int32[Array, "b n"], Memory]:
    """Return `count` drafted tokens of each row, or `NOTHING`, and the memory."""
    del model
    propose_row = jax.vmap(functools.partial(_propose_row, count=count))
    return propose_row(memory.text, memory.lengths), memory


def _propose_row(text, length, count):
    """Return the draft of one row ``[count]``.

    For each index e, the common suffix of ``text[:e]`` and of the whole text is measured. The draft
    begins at the index with the longest one. A draft that reaches the end of the text goes on with
    its own beginning, as a text does that repeats itself.
    """
    ends = jnp.arange(text.shape[0], dtype=jnp.int32)
    same, longest = ends < length, jnp.zeros_like(ends)
    for back in range(1, LONGEST + 1):
        last = text[jnp.maximum(length - back, 0)]
        same &= (ends >= back) & (jnp.roll(text, back) == last)
        longest += same.astype(jnp.int32)
    best = jnp.argmax(
        longest * text.shape[0] + ends * (longest > 0).astype(jnp.int32)
    )  # of several, the latest
    period = jnp.maximum(length - best, 1)
    draft = text[best + jnp.arange(count, dtype=jnp.int32) % period]
    return jnp.where(longest[best] > 0, draft, NOTHING)
