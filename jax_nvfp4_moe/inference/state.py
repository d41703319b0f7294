"""The state of the decoding loop, and how a token is added to it."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jax_nvfp4_moe.inference.sampling import choose


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class State:
    """The state of the decoding loop.

    Attributes:
      cache: cache of the model. It holds the prompt and all new tokens except the last one.
      tokens: the new tokens, int32 ``[b, room]``; zeros from index `count` on.
      count: number of new tokens so far, int32 scalar.
      stopped: bool ``[b]``, True for rows that have drawn a stop id.
      not_finite: int32 ``[b]``, the index of the first new token that was drawn from logits that
        were not finite; -1 if there is none.
    """

    cache: Any
    tokens: jax.Array
    count: jax.Array
    stopped: jax.Array
    not_finite: jax.Array

    @classmethod
    def begin(cls, cache: Any, rows: int, room: int) -> "State":
        """Return the state before the first new token.

        Args:
          cache: cache of the model, which holds the prompt.
          rows: number of rows b.
          room: largest number of new tokens.
        """
        tokens = jnp.zeros((rows, room), jnp.int32)
        stopped, never = jnp.zeros(rows, jnp.bool_), jnp.full(rows, -1, jnp.int32)
        return cls(cache, tokens, jnp.int32(0), stopped, never)


def draw(sampling, logits, state):
    """Add a token of each row to `state`, drawn from logits ``[b, v]``; see `add_token`."""
    rows = jnp.broadcast_to(state.count, logits.shape[:1])
    token, finite = (x[:, 0] for x in choose(sampling, logits[:, None], rows))
    return add_token(sampling, token, finite, state)


def add_token(sampling, token, finite, state):
    """Add the next token of each row to `state`; a stopped row repeats its last token.

    Args:
      sampling: has the stop ids.
      token: int32 ``[b]``, the tokens.
      finite: bool ``[b]``, whether all logits of a row were finite.
      state: the state before.
    """
    new = ~finite & ~state.stopped & (state.not_finite < 0)
    first = jnp.where(new, state.count, state.not_finite)
    last = lax.dynamic_slice_in_dim(state.tokens, jnp.maximum(state.count - 1, 0), 1, axis=1)[:, 0]
    token = jnp.where(state.stopped, last, token)
    stops = (token[:, None] == sampling.stop_ids[None, :]).any(axis=-1)
    tokens = lax.dynamic_update_slice_in_dim(state.tokens, token[:, None], state.count, axis=1)
    return State(state.cache, tokens, state.count + 1, state.stopped | stops, first)
