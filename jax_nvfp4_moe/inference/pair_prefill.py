"""Run prompts through a model and its drafting layers, chunk by chunk.

The drafting layers read the pair of each token's hidden state and the token that follows. The last
token of a prompt is followed by the first new token, so its pair is read with the first draft.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import Tracer

from jax_nvfp4_moe.inference import token_prediction
from jax_nvfp4_moe.inference.drafting import DraftState, begin
from jax_nvfp4_moe.inference.flat_model import restore_model
from jax_nvfp4_moe.inference.prefill import NO_GRAPHS, PROMPT_STEP, chunk_ranges, count_tokens
from jax_nvfp4_moe.inference.state import State, draw
from jax_nvfp4_moe.parallel.whole_steps import start_together


def start_with_pairs(model, sampling, ids, lengths, most, room, chunk, drafting) -> DraftState:
    """Run prompts through the model and its drafting layers, and draw the first token.

    Args:
      model: the model or a `FlatModel`; inside of a trace, its arrays may be traced.
      sampling: how tokens are drawn.
      ids: prompts ``[b, t]``, left-aligned.
      lengths: number of tokens in each prompt, int32 ``[b]``.
      most: largest number of new tokens of a row.
      room: number of tokens for which the cache has room behind the prompts.
      chunk: number of tokens of each prompt that go through the model together.
      drafting: how tokens are drafted.
    """
    traced = isinstance(ids, Tracer) or isinstance(lengths, Tracer)
    whole = -(-ids.shape[1] // PROMPT_STEP) * PROMPT_STEP
    ranges = list(chunk_ranges(ids.shape[1], min(chunk, whole)))
    run = _open(model, len(ids), ranges[-1][1] + room)
    for start, end in ranges:
        part, following = (
            _columns(ids, first, first + end - start) for first in (start, start + 1)
        )
        counts, pairs = (_between(count, start, end) for count in (lengths, lengths - 1))
        size = None if traced else count_tokens(np.asarray(counts), end - start)
        run = _extend(model, run, part, following, counts, pairs, num_tokens=size)
    return _begin(model, sampling, run, most, room, drafting)


def _columns(x, start, end):
    """Return columns of `x`, with zeros for those that it does not have."""
    array = jnp if isinstance(x, Tracer) else np
    taken = x[:, start:end]
    return array.pad(taken, ((0, 0), (0, end - start - taken.shape[1])))


def _between(lengths, start, end):
    """Return how many of the first `lengths` tokens lie from `start` to `end`."""
    array = jnp if isinstance(lengths, Tracer) else np
    return array.clip(lengths - start, 0, end - start).astype(np.int32)


@functools.partial(jax.jit, static_argnums=(1, 2))
def _open(model, batch, room):
    """Return empty caches, and logits and hidden states of zeros."""
    model = restore_model(model)
    logits = jnp.zeros((batch, model.config.vocab_size), jnp.float32)
    hidden = jnp.zeros((batch, model.drafter.streams * model.config.hidden), model.dtype)
    return model.init_cache(batch, room), model.init_draft_cache(batch, room), logits, hidden


@functools.partial(
    jax.jit, static_argnames="num_tokens", donate_argnames="run", compiler_options=NO_GRAPHS
)
def _extend(model, run, ids, following, counts, pairs, num_tokens):
    """Run one chunk; rows that ended before keep their logits and hidden states."""
    model = restore_model(model)
    counts = start_together(model, counts)
    cache, draft_cache, old_logits, old_hidden = run
    at = jnp.maximum(counts - 1, 0)
    options = {"lengths": counts, "logits_at": at, "num_tokens": num_tokens}
    logits, hidden, cache = model(ids, cache, **options, with_hidden=True)
    # The logits of pairs in a prompt are not used; those of one position are the least to compute.
    first = jnp.zeros_like(at)
    _, _, draft_cache = model.draft(hidden, following, draft_cache, lengths=pairs, logits_at=first)
    cache, draft_cache = lax.optimization_barrier((cache, draft_cache))  # as in `prefill._extend`
    last = jnp.take_along_axis(hidden, at[:, None, None], axis=1)[:, 0]
    reads = counts[:, None] > 0
    return (
        cache,
        draft_cache,
        jnp.where(reads, logits[:, 0], old_logits),
        jnp.where(reads, last, old_hidden),
    )


@functools.partial(jax.jit, static_argnames=("room", "drafting"), compiler_options=NO_GRAPHS)
def _begin(model, sampling, run, most, room, drafting):
    """Draw the first token. As in `generation._begin_from_text`, nothing is donated."""
    model = restore_model(model)
    cache, draft_cache, logits, hidden = run
    state = draw(sampling, logits, State.begin(cache, len(logits), room))
    first = state.tokens[:, 0]
    memory = token_prediction.begin(draft_cache, hidden, first, drafting.window)
    return begin(model, state, memory, most, drafting)
