"""Conversation: several turns with a model, with the cache kept between them."""

import dataclasses
import functools
from collections.abc import Iterator, Sequence

import jax
import numpy as np
from jax import lax

from jax_nvfp4_moe.inference.drafting import choose_drafting
from jax_nvfp4_moe.inference.flat_model import flatten_model, restore_model
from jax_nvfp4_moe.inference.generation import (
    NEW_STEP,
    PROMPT_STEP,
    Sampling,
    State,
    begin_from_text,
    decode_in_bursts,
    draw,
    make_sampling,
    pad_prompts,
    round_up,
)
from jax_nvfp4_moe.inference.generative_model import GenerativeModel
from jax_nvfp4_moe.inference.pair_prefill import start_with_pairs
from jax_nvfp4_moe.inference.prefill import default_chunk
from jax_nvfp4_moe.parallel.whole_steps import start_together


class Conversation:
    """A text that a user and a model continue in turns.

    The model's cache is kept between turns, so each turn reads only new tokens. If a text does not
    begin with the tokens in the cache, the cache is emptied and the whole text is read.

    Attributes:
      ids: int32 ``[n]``, the tokens in the cache.
      max_length: largest number of tokens in the whole conversation.
    """

    def __init__(
        self,
        model: GenerativeModel,
        *,
        max_length: int,
        temperature: float = 0.0,
        top_k: int | None = None,
        top_p: float = 1.0,
        stop_ids: Sequence[int] = (),
        key: jax.Array | None = None,
        draft: str | None = None,
        draft_tokens: int | str = "auto",
    ):
        """Begin an empty conversation.

        Args:
          model: model from `load_model`.
          max_length: largest number of tokens of all turns together; at most the positions of the
            model.
          temperature: as for `generate`. Defaults to 0, greedy decoding.
          top_k: as for `generate`. Defaults to None.
          top_p: as for `generate`. Defaults to 1.
          stop_ids: as for `generate`. Defaults to none.
          key: as for `generate`. Each answer draws with a key of its own, and the first one as
            `generate` does. Defaults to None.
          draft: as for `generate`. With "mtp", each answer reads the whole conversation again,
            because the drafting layers keep nothing between answers. Defaults to None.
          draft_tokens: as for `generate`. Defaults to "auto".

        Raises:
          ValueError: an argument is out of range.
        """
        positions = model.config.max_positions
        if not 1 <= max_length <= positions:
            raise ValueError(
                f"max_length: expected 1 to {positions}, the positions of the model; "
                f"got {max_length}"
            )
        self.max_length, self.ids = max_length, np.zeros(0, np.int32)
        self._model, self._cache = model, None
        self._sampling = make_sampling(temperature, top_k, top_p, stop_ids, key)
        self._drafting = choose_drafting(model, draft, draft_tokens)
        self._answers = 0

    def check(self, text: Sequence[int]) -> None:
        """Check that a text can be answered.

        Args:
          text: as for `answer`.

        Raises:
          ValueError: the text has no tokens, leaves no room for another one, or has a token that
            the model does not have.
        """
        ids, size = np.asarray(text), self._model.config.vocab_size
        if not len(ids):
            raise ValueError("text: expected at least one token, got none")
        if len(ids) >= self.max_length:
            raise ValueError(
                f"text: it has {len(ids)} tokens, and a conversation has room for "
                f"{self.max_length}, with the answer. Begin a new conversation, or increase "
                "max_length (--context on the command line)"
            )
        if ids.min() < 0 or ids.max() >= size:
            raise ValueError(
                f"text: expected ids from 0 to {size - 1}, the model's vocabulary; got "
                f"{ids.min()} to {ids.max()}"
            )

    def answer(self, text: Sequence[int], max_new_tokens: int) -> Iterator[int]:
        """Yield the tokens that follow `text`, until a stop id or until there is no room for more.

        To stop an answer early, close the iterator. The conversation can then continue. Tokens that
        were drawn but not yielded remain in the cache; a text without them is read from its start.
        If the logits are not finite, a warning says so before the first such token.

        Args:
          text: integers ``[n]``, the tokens of all turns so far.
          max_new_tokens: largest number of tokens in the answer, at least 1.

        Raises:
          ValueError: an argument is out of range; see `check`.
        """
        self.check(text)
        if max_new_tokens < 1:
            raise ValueError(f"max_new_tokens: expected at least 1, got {max_new_tokens}")
        ids = np.asarray(text, np.int32)
        room = min(max_new_tokens, self.max_length - len(ids))
        model, sampling = flatten_model(self._model), self._sample_next_answer()
        last = self._read(model, sampling, ids, room)
        drawn: list[int] = []
        try:
            for state, tokens in decode_in_bursts(model, sampling, last, room):
                last = state
                drawn += tokens[0].tolist()
                yield from drawn[-tokens.shape[1] :]
        finally:
            # An interrupted call has donated the cache. The next answer then reads its whole text.
            if not last.tokens.is_deleted():
                # The last token was drawn but not yet run through the model: the cache lacks it.
                self._keep(np.concatenate([ids, np.asarray(drawn[:-1], np.int32)]), last)

    def _read(self, model, sampling, ids, room):
        """Run the part of a text that the cache lacks, and draw the first token of the answer."""
        drafting, lengths = self._drafting, np.asarray([len(ids)], np.int32)
        whole = round_up(room + (drafting.window if drafting else 0), NEW_STEP)
        if drafting is not None and drafting.drafter.NEEDS_HIDDEN:
            most = np.int32(room)
            given = ids[None], lengths, most, whole, default_chunk(1), drafting
            return start_with_pairs(model, sampling, *given)
        held = len(self.ids)
        if self._cache is None or held >= len(ids) or not np.array_equal(ids[:held], self.ids):
            held, self._cache = 0, self._model.init_cache(1, self.max_length)
        new = np.zeros((1, min(round_up(len(ids) - held, PROMPT_STEP), self.max_length)), np.int32)
        new[0, : len(ids) - held] = ids[held:]
        cache, self._cache = self._cache, None  # the arrays are donated: nobody may use them again
        state = _extend(model, sampling, cache, new, lengths - np.int32(held), room=whole)
        if drafting is None:
            return state
        return begin_from_text(
            model, state, pad_prompts(ids[None]), lengths, np.int32(room), drafting
        )

    def _keep(self, ids, state):
        """Keep the cache of a text, if the next answer can go on from it."""
        if self._drafting is None:
            self.ids, self._cache = ids, state.cache
        elif not self._drafting.drafter.NEEDS_HIDDEN:
            self.ids, self._cache = ids, _close(self._model, state.cache)

    def _sample_next_answer(self) -> Sampling:
        """Return how the next answer is drawn: with a key that no other answer has."""
        sampling, number = self._sampling, self._answers
        self._answers += 1
        if sampling.key is None or not number:
            return sampling
        return dataclasses.replace(sampling, key=jax.random.fold_in(sampling.key, number))


@jax.jit
def _close(model, cache):
    """Return the cache of a text that was drafted as a plain one."""
    return model.close_window(cache) if hasattr(model, "close_window") else cache


@functools.partial(jax.jit, static_argnames="room", donate_argnames="cache")
def _extend(model, sampling, cache, new, count, room):
    """Run new tokens through the model, and draw the first token of the answer."""
    model = restore_model(model)
    count = start_together(model, count)
    logits, cache = model(new, cache, lengths=count, logits_at=count - 1)
    # Without the barrier, jax.jit does not reuse the donated memory of the cache, because the model
    # constrains the layout of the result.
    cache = lax.optimization_barrier(cache)
    return draw(sampling, logits[:, 0], State.begin(cache, 1, room))
