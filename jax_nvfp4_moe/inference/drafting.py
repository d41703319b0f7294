"""Decode several tokens a step: draft some, read them together, keep those that are right.

A step reads the last token of each row and its drafts in one call of the model. The logits after
each of them draw a token as decoding without drafts would, with the same random numbers. As long as
the drawn token is the drafted one, the next logits count too. So the tokens are those of decoding
without drafts, and a step yields at least one of them. Rows keep different numbers of drafts, and
the cache goes back to the last token that each row keeps.

All of it runs on the device, inside of one compiled loop. `DRAFTERS` lists what makes drafts.

Source: arXiv:2211.17192; with drafts that are not drawn at random, its rule keeps a drafted token
exactly if the token that is drawn from the model equals it.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Int32

from jax_nvfp4_moe.inference import prompt_lookup, token_prediction
from jax_nvfp4_moe.inference.generative_model import call_options
from jax_nvfp4_moe.inference.sampling import Sampling, choose, whole_number
from jax_nvfp4_moe.ops.state_window import put_kept, take_kept

# Name of `draft` -> the module whose `begin`, `propose` and `record` make drafts.
DRAFTERS: Mapping[str, Any] = {"lookup": prompt_lookup, "mtp": token_prediction}
# The number of drafts of "auto", by the name of `draft`.
_USUAL = {"lookup": 4, "mtp": 3}
MOST_DRAFTS = 16
# Of the running mean of tokens a step, this share is that of the last step.
_SHARE = 1 / 8
# "auto" stops drafting where it does not pay, and tries one step again after a pause, since texts
# change. Tries without any right draft take this share of the time.
_TRIES = 1 / 100
_LONGEST_PAUSE = 512
# "auto" does not draft at all if a step would pay only with more than this share of its tokens.
_MOST_KEPT = 0.8
# Time of a step with drafts over that of a step without, until both have been measured: 1 for the
# first token, and so much for each draft. On an H200, a step of Qwen3.6-35B-A3B for four tokens
# takes 1.5 times as long as one for a token.
_COST_OF_DRAFT = 1 / 6


@dataclasses.dataclass(frozen=True)
class Drafting:
    """How tokens are drafted. All fields are static.

    Attributes:
      draft: name in `DRAFTERS`.
      tokens: number of drafts in a step.
      automatic: whether steps without drafts replace those that do not pay.
    """

    draft: str
    tokens: int
    automatic: bool

    @property
    def window(self) -> int:
        """Number of tokens that a step reads."""
        return self.tokens + 1

    @property
    def estimated_cost(self) -> float:
        """Estimated time of a step with drafts over that of a step without."""
        return 1 + self.tokens * _COST_OF_DRAFT

    def can_pay(self, cost: float) -> bool:
        """Return whether a step may pay that takes `cost` times as long as one without drafts."""
        return not self.automatic or cost <= _MOST_KEPT * self.window

    @property
    def read_options(self) -> dict[str, Any]:
        """Further arguments of calls of the model."""
        return {"with_hidden": True} if self.drafter.NEEDS_HIDDEN else {}

    @property
    def drafter(self) -> Any:
        """The functions that make drafts, and `NEEDS_HIDDEN`."""
        return DRAFTERS[self.draft]

    def propose(self, model: Any, memory: Any) -> tuple[Int32[Array, "b n"], Any]:
        """Return the drafts of a step, and the memory after it."""
        return self.drafter.propose(model, memory, self.tokens)


def _check_name(draft) -> None:
    """Check that `draft` is None or the name of a drafter."""
    if draft is not None and (not isinstance(draft, str) or draft not in DRAFTERS):
        names = ", ".join(f'"{name}"' for name in DRAFTERS)
        raise ValueError(f"draft: expected None or one of {names}; got {draft!r:.80}")


def layers_to_load(draft: str | None) -> str | None:
    """Return the argument `draft` of `load_model` for a model that drafts in this way.

    Raises:
      ValueError: there is no such way.
    """
    _check_name(draft)
    return draft if draft == "mtp" else None


def choose_drafting(model: Any, draft: Any, draft_tokens: Any) -> Drafting | None:
    """Check the arguments `draft` and `draft_tokens` of `generate`, and return what they mean.

    Raises:
      ValueError: a value is out of range, or the model has no drafting layers.
      TypeError: a type is wrong, or the cache of the model cannot go back.
    """
    automatic = isinstance(draft_tokens, str) and draft_tokens == "auto"
    if isinstance(draft_tokens, str) and not automatic:
        raise ValueError(
            f'draft_tokens: expected 1 to {MOST_DRAFTS}, or "auto"; got {draft_tokens!r:.80}'
        )
    count = 1 if automatic else whole_number("draft_tokens", draft_tokens)
    if not 1 <= count <= MOST_DRAFTS:
        raise ValueError(f'draft_tokens: expected 1 to {MOST_DRAFTS}, or "auto"; got {count}')
    _check_name(draft)
    if draft is None:
        return None
    if draft == "mtp" and getattr(model, "drafter", None) is None:
        raise ValueError(
            f'draft: "mtp" needs drafting layers, and this {type(model).__name__} has none; load '
            'them with nvfp4.load_model(path, draft="mtp"), or pass draft="lookup"'
        )
    if not _goes_back(model) and "lengths" not in call_options(model):
        raise TypeError(
            f"draft: the cache of {type(model).__name__} cannot forget a token that was drafted "
            "wrongly; give the model methods open_window and rewind, or let its calls take "
            "`lengths`. See nvfp4.GenerativeModel"
        )
    return Drafting(draft, _USUAL[draft] if automatic else count, automatic)


def _goes_back(model) -> bool:
    """Return whether the cache of `model` can go back to an earlier token."""
    return all(callable(getattr(model, name, None)) for name in ("open_window", "rewind"))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DraftState:
    """The state of the decoding loop with drafts.

    Attributes:
      cache: cache of the model, which can go back by a window of tokens. It holds the prompt and
        all new tokens except the last one.
      tokens: new tokens, int32 ``[b, room]``; without meaning from index `count` on.
      count: number of new tokens so far, int32 ``[b]``.
      most: largest number of new tokens of a row, int32 scalar.
      stopped: bool ``[b]``, True for rows that have drawn a stop id.
      not_finite: as in `generation.State`.
      steps: number of runs of the model from which the tokens were drawn, int32 ``[b]``.
      drafted: number of drafted tokens, int32 ``[b]``.
      accepted: number of those that were kept, int32 ``[b]``.
      memory: what the drafter knows.
      gain: running mean of the new tokens of a step with drafts, float32 scalar.
      cost: time of a step with drafts over that of a step without, float32 scalar.
      pause: number of steps to run without drafts, int32 scalar.
      drafting: how tokens are drafted. Static.
      kept: inside of the loop, what all windows of `cache` go on from; see `take_kept`. None
        outside, and if the cache has no windows.
    """

    cache: Any
    tokens: Int32[Array, "b room"]
    count: Int32[Array, " b"]
    most: jax.Array
    stopped: Bool[Array, " b"]
    not_finite: Int32[Array, " b"]
    steps: Int32[Array, " b"]
    drafted: Int32[Array, " b"]
    accepted: Int32[Array, " b"]
    memory: Any
    gain: jax.Array
    cost: jax.Array
    pause: jax.Array
    drafting: Drafting = dataclasses.field(metadata={"static": True})
    kept: Int32[Array, " b"] | None = None

    @property
    def ended(self) -> Bool[Array, " b"]:
        """Whether each row has all its tokens."""
        return self.stopped | (self.count >= self.most)


def begin(model: Any, state: Any, memory: Any, most: jax.Array, drafting: Drafting) -> DraftState:
    """Return the state after the first token.

    Args:
      model: the model.
      state: the `generation.State` after the first token, with room for `most` tokens and a window.
      memory: the drafter's memory of the prompt and the first token.
      most: largest number of new tokens of a row.
      drafting: how tokens are drafted.
    """
    cache = state.cache
    if _goes_back(model):
        cache = model.open_window(cache, drafting.window)
    rows = state.stopped.shape
    nothing, one = jnp.zeros(rows, jnp.int32), jnp.ones(rows, jnp.int32)
    return DraftState(
        cache,
        state.tokens,
        jnp.broadcast_to(state.count, rows),
        jnp.asarray(most, jnp.int32),
        state.stopped,
        state.not_finite,
        one,
        nothing,
        nothing,
        memory,
        gain=jnp.float32(drafting.window),
        cost=jnp.float32(drafting.estimated_cost),
        pause=jnp.int32(0),
        drafting=drafting,
    )


def decode_with_drafts(
    model: Any, sampling: Sampling, state: DraftState, limit: Any, read: Any, propose: Any
) -> DraftState:
    """Draw tokens until each row has at least `limit` of them, or has ended.

    Args:
      model: the model.
      sampling: how tokens are drawn.
      state: the state so far.
      limit: number of new tokens.
      read: calls the model: ``read(model, ids, cache)``, with `Drafting.read_options`.
      propose: calls `Drafting.propose`.
    """
    cache, kept = take_kept(state.cache)
    state = dataclasses.replace(state, cache=cache, kept=kept)
    early = not state.drafting.drafter.NEEDS_HIDDEN  # drafts take no time

    def more(known):
        state, _ = known
        return (~state.ended & (state.count < limit)).any()

    def pays(known):
        state, drafts = known
        return _pays(state) if drafts is None else (drafts != prompt_lookup.NOTHING).any()

    def look(state):
        return state, _propose_if_it_pays(model, state, propose) if early else None

    def with_drafts(known):
        state, drafts = known if early else _propose(model, known[0], propose)
        return look(_step(model, sampling, read, state, drafts))

    def without(known):
        return look(_step_without(model, sampling, read, known[0]))

    # Each kind of step has a loop of its own: XLA copies all caches in a step that is a branch of
    # `lax.cond`.
    def steps(known):
        known = lax.while_loop(lambda known: more(known) & ~pays(known), without, known)
        return lax.while_loop(lambda known: more(known) & pays(known), with_drafts, known)

    always = not (early or state.drafting.automatic)
    state, _ = lax.while_loop(more, with_drafts if always else steps, look(state))
    return dataclasses.replace(state, cache=put_kept(state.cache, state.kept), kept=None)


def _propose(model, state, propose):
    """Return the state with the new memory, and the drafts of each row ``[b, n]``."""
    drafts, memory = propose(model, state.memory)
    drafts = jnp.where(state.ended[:, None], prompt_lookup.NOTHING, drafts)
    return dataclasses.replace(state, memory=memory), drafts


def _propose_if_it_pays(model, state, propose):
    """Return the drafts of a drafter that reads the text alone, or none where they do not pay."""

    def draft(memory):
        return _propose(model, dataclasses.replace(state, memory=memory), propose)[1]

    def leave(memory):
        del memory
        return jnp.full((len(state.count), state.drafting.tokens), prompt_lookup.NOTHING)

    return lax.cond(_pays(state), draft, leave, state.memory)


def _pays(state):
    """Return whether a step with drafts is expected to be faster than steps without."""
    if not state.drafting.automatic:
        return jnp.bool_(True)
    return (state.pause == 0) | (state.gain >= state.cost)


def _step(model, sampling, read, state, drafts):
    """Read the last token of each row with its drafts, and add the tokens that it yields."""
    ids = jnp.concatenate([_last(state), jnp.maximum(drafts, 0)], axis=1)
    new = _read_and_keep(model, sampling, read, state, ids, drafts)
    active = (~state.ended).sum(dtype=jnp.int32)
    drawn = (new.count - state.count).sum(dtype=jnp.int32).astype(jnp.float32)
    drawn /= jnp.maximum(active, 1).astype(jnp.float32)
    gain = state.gain + _SHARE * (drawn - state.gain)
    # A step that pays by itself is followed by another one.
    pause = jnp.where(jnp.maximum(gain, drawn) >= state.cost, 0, (state.cost - 1) / _TRIES)
    pause = jnp.ceil(jnp.minimum(pause, _LONGEST_PAUSE)).astype(jnp.int32)
    return dataclasses.replace(new, gain=gain, pause=pause)


def _step_without(model, sampling, read, state):
    """Read the last token of each row, and add the next one."""
    nothing = jnp.zeros((len(state.count), 0), jnp.int32)
    new = _read_and_keep(model, sampling, read, state, _last(state), nothing)
    return dataclasses.replace(new, pause=jnp.maximum(state.pause - 1, 0))


def _last(state):
    """Return the last token of each row, ``[b, 1]``."""
    return jnp.take_along_axis(state.tokens, state.count[:, None] - 1, axis=1)


def _read_and_keep(model, sampling, read, state, ids, drafts):
    """Read tokens ``[b, 1 + n]``, and add the tokens that follow to the state."""
    before = put_kept(state.cache, state.kept)
    logits, *hidden, after = read(model, ids, before)
    new, finite = choose(sampling, logits, state.count)
    accepted, emitted, stopped = _count_kept(sampling, state, new, drafts)
    window = ids.shape[1]
    wrong = ~finite & (jnp.arange(window)[None, :] < emitted[:, None])
    first = state.count + jnp.argmax(wrong, axis=1).astype(jnp.int32)
    found = wrong.any(axis=1) & (state.not_finite < 0)
    record = state.drafting.drafter.record
    cache, kept = take_kept(_go_back(model, before, after, ids, emitted))
    return dataclasses.replace(
        state,
        cache=cache,
        kept=kept,
        tokens=_write(state.tokens, new, state.count),
        count=state.count + emitted,
        stopped=stopped,
        not_finite=jnp.where(found, first, state.not_finite),
        steps=state.steps + (emitted > 0).astype(jnp.int32),
        drafted=state.drafted + (drafts != prompt_lookup.NOTHING).sum(axis=1, dtype=jnp.int32),
        accepted=state.accepted + accepted,
        memory=record(state.memory, new, emitted, *(hidden or [None])),
    )


def _count_kept(sampling, state, new, drafts):
    """Return how many drafts and how many new tokens each row keeps, and which rows have stopped.

    A stop id ends its row, and so does the last token that was asked for.
    """
    same = jnp.cumprod((new[:, :-1] == drafts).astype(jnp.int32), axis=1)
    right = same.sum(axis=1, dtype=jnp.int32)
    drawn = jnp.arange(new.shape[1], dtype=jnp.int32)[None, :] <= right[:, None]
    stops = jnp.isin(new, sampling.stop_ids) & drawn
    until = jnp.argmax(stops, axis=1).astype(jnp.int32) + 1
    emitted = jnp.where(stops.any(axis=1), until, right + 1)
    left = state.most - state.count
    stopped = state.stopped | (stops.any(axis=1) & (until <= left))
    emitted = jnp.where(state.ended, 0, jnp.minimum(emitted, left))
    return jnp.minimum(right, emitted), emitted, stopped


def _go_back(model, before, after, ids, kept):
    """Return the cache with the first `kept` of the tokens `ids` that were read."""
    if _goes_back(model):
        return model.rewind(after, kept, ids.shape[1])
    if ids.shape[1] == 1:
        return after  # a row that has ended reads nothing more
    return model(ids, before, lengths=kept)[1]


def _write(tokens, new, start):
    """Write new tokens ``[b, n]`` behind the first `start` tokens of each row."""

    def write(row, new, start):
        return lax.dynamic_update_slice_in_dim(row, new, start, axis=0)

    return jax.vmap(write)(tokens, new, start)


def shared_tokens(state: DraftState) -> tuple[np.ndarray, int]:
    """Return the new tokens of all rows, and how many every row has, on the host.

    A row that has ended repeats its last token, and has as many tokens as the others.
    """
    tokens, count, ended = jax.device_get((state.tokens, state.count, state.ended))
    index = np.minimum(np.arange(tokens.shape[1])[None, :], count[:, None] - 1)
    end = count.max() if ended.all() else count[~ended].min()
    return np.take_along_axis(tokens, index, axis=1), int(end)
