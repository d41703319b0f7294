"""Measure how long a step with drafts takes, compared with a step without.

The measured steps are part of the text: they draw its first tokens. What was measured for a model,
a number of rows and a number of drafts holds for later calls of the same process.
"""

import dataclasses
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from jax_nvfp4_moe.inference.drafting import DraftState

# Shorter texts are drafted with the estimate: the measured steps would be most of them.
_LEAST_TOKENS = 96
_STEPS = 4  # steps of one measurement
_WARM_UP = 2  # XLA makes CUDA graphs in the first two calls of a program
_MOST_KNOWN = 256
# The structure of a model, its rows and its drafts -> the time of a step with drafts over that of a
# step without.
_known: dict[Any, float] = {}


def find_cost(
    structure: Any, run: Callable[[DraftState, int], DraftState], state: DraftState, limit: int
) -> DraftState:
    """Return the state with the measured cost of a step with drafts, for `draft_tokens` "auto".

    Args:
      structure: what tells models apart.
      run: draws tokens until each row has a number of them, and donates the state.
      state: the state after the first token.
      limit: largest number of new tokens of each row.
    """
    if not state.drafting.automatic:
        return state
    key = (structure, state.count.shape, state.drafting)
    if key not in _known and limit >= _LEAST_TOKENS:
        state, cost = _measure(run, state)
        if cost is not None:
            if len(_known) >= _MOST_KNOWN:
                _known.pop(next(iter(_known)))
            _known[key] = cost
    return _expect(state, _known.get(key, state.drafting.estimated_cost), pause=0)


def _expect(state, cost, pause):
    """Return the state with a cost, and as if all drafts had been right so far."""
    return dataclasses.replace(
        state,
        cost=np.float32(cost),
        gain=np.float32(state.drafting.window if pause == 0 else 0),
        pause=np.int32(pause),
    )


def _measure(run, state):
    """Return the state after some steps, and the cost; None without drafts."""
    for _ in range(_WARM_UP):
        state, *_ = _time_steps(run, state, drafts=False)
        state, *_ = _time_steps(run, state, drafts=True)
    state, plain, steps, _ = _time_steps(run, state, drafts=False)
    state, seconds, others, drafting = _time_steps(run, state, drafts=True)
    if steps == 0 or drafting == 0:
        return state, None
    step = plain / steps
    return state, max((seconds - (others - drafting) * step) / drafting / step, 1.0)


def _time_steps(run, state, *, drafts):
    """Return the state after some steps, their seconds, and how many there were of which kind."""
    cost, pause = (0.0, 0) if drafts else (np.inf, 2**30)
    count, ended, *before = jax.device_get((state.count, state.ended, state.steps, state.drafted))
    if ended.all():
        return state, 0.0, 0, 0
    begin = time.perf_counter()
    state = jax.block_until_ready(run(_expect(state, cost, pause), count[~ended].min() + _STEPS))
    seconds = time.perf_counter() - begin
    steps, drafted = (
        int((new - old).max())
        for new, old in zip(jax.device_get((state.steps, state.drafted)), before, strict=True)
    )
    return state, seconds, steps, drafted // state.drafting.tokens
