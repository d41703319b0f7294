"""Conversation: answers of a model turn after turn, with the cache kept between them."""

import functools
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jax_nvfp4_moe.inference.generation import (
    NEW_STEP,
    PROMPT_STEP,
    State,
    decode,
    draw,
    make_sampling,
    round_up,
)


class Conversation:
    """A text that a user and a model continue in turns.

    The cache of the model is kept, so that a turn reads only what is new. A text that does not
    begin with what the cache holds starts with an empty cache.

    Attributes:
      ids: tokens that the cache holds.
      max_length: tokens that a whole conversation may have.
    """

    def __init__(
        self,
        model: Any,
        *,
        max_length: int,
        temperature: float = 0.0,
        top_k: int | None = None,
        top_p: float = 1.0,
        stop_ids: Sequence[int] = (),
        key: jax.Array | None = None,
    ):
        """Begin an empty conversation.

        Args:
          model: as `load_model` returns.
          max_length: tokens of all turns together, at most the model's positions.
          temperature, top_k, top_p, stop_ids, key: as for `generate`.

        Raises:
          ValueError: an argument is out of range.
        """
        positions = model.config.max_positions
        if not 1 <= max_length <= positions:
            raise ValueError(
                f"max_length: expected 1 to {positions}, the model's positions; got {max_length}"
            )
        self.max_length, self.ids = max_length, np.zeros(0, np.int32)
        self._model, self._cache = model, None
        self._sampling = make_sampling(temperature, top_k, top_p, stop_ids, key)

    def answer(self, text: Sequence[int], max_new_tokens: int) -> Iterator[int]:
        """Yield the tokens that follow `text`: until a stop id, or as many as there is room for.

        An answer may be left before its end: close the iterator.

        Args:
          text: the tokens of all turns so far.
          max_new_tokens: at least 1.

        Raises:
          ValueError: the text leaves no room for a token.
        """
        ids = np.asarray(text, np.int32)
        room = min(max_new_tokens, self.max_length - len(ids))
        if room < 1:
            raise ValueError(
                f"text: it has {len(ids)} tokens, and a conversation has room for "
                f"{self.max_length}. Begin a new one, or make max_length larger"
            )
        held = len(self.ids)
        if self._cache is None or held >= len(ids) or not np.array_equal(ids[:held], self.ids):
            held, self._cache = 0, self._model.init_cache(1, self.max_length)
        new = np.zeros((1, min(round_up(len(ids) - held, PROMPT_STEP), self.max_length)), np.int32)
        new[0, : len(ids) - held] = ids[held:]
        count = np.asarray([len(ids) - held], np.int32)
        cache, self._cache = self._cache, None  # its arrays are given away
        state = _extend(
            self._model, self._sampling, cache, new, count, room=round_up(room, NEW_STEP)
        )
        drawn: list[int] = []
        try:
            for number in range(1, room + 1):
                state = decode(self._model, self._sampling, state, jnp.int32(number))
                drawn.append(int(state.tokens[0, number - 1]))
                yield drawn[-1]
                if bool(state.stopped[0]):
                    break
        finally:
            # The last token has been drawn, and no layer has seen it.
            self.ids = np.concatenate([ids, np.asarray(drawn[:-1], np.int32)])
            self._cache = state.cache


@functools.partial(jax.jit, static_argnames="room", donate_argnames="cache")
def _extend(model, sampling, cache, new, count, room):
    """Run new tokens through the model and draw the first one of the answer."""
    logits, cache = model(new, cache, lengths=count, logits_at=count - 1)
    tokens = jnp.zeros((1, room), jnp.int32)
    # jax.jit gives no donated memory to a result whose layout the model constrains.
    cache = lax.optimization_barrier(cache)
    state = State(cache, tokens, jnp.int32(0), jnp.zeros(1, jnp.bool_))
    return draw(sampling, logits[:, 0], state)
