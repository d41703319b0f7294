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

from jax_nvfp4_moe.inference.drafting import Drafting, DraftState

# Shorter texts are drafted with the estimate: the measured steps would be most of them.
_LEAST_TOKENS = 96
_STEPS = 4  # steps of one measurement
_WARM_UP = 2  # XLA makes CUDA graphs in the first two calls of a program
_REPEATS = 3  # the fastest of them counts, since other programs may run during one
_MOST_KNOWN = 256
_FOREVER = 2**30  # a pause that no text outlasts
# The structure of a model, its rows and its drafts -> the time of a step with drafts over that of a
# step without.
_known: dict[Any, float] = {}


def may_pay(structure: Any, rows: tuple[int, ...], drafting: Drafting) -> bool:
    """Return whether drafting may save time; False only if its cost was measured and is too high.

    Args:
      structure: what tells models apart.
      rows: the number of rows, as a shape.
      drafting: how tokens are drafted.
    """
    cost = _known.get((structure, rows, drafting))
    return cost is None or drafting.can_pay(cost)


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
    cost = _known.get(key, state.drafting.estimated_cost)
    return _expect(state, cost, pause=0 if state.drafting.can_pay(cost) else _FOREVER)


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
    starts, without, with_drafts = [], [], []
    for _ in range(_REPEATS):
        state, seconds, *_ = _time_steps(run, state, drafts=False, count=0)
        starts.append(seconds)
        state, *measured = _time_steps(run, state, drafts=False)
        without.append(measured)
        state, *measured = _time_steps(run, state, drafts=True)
        with_drafts.append(measured)
    start = min(starts)  # to start a program may take longer than a step
    plain = [(seconds - start) / steps for seconds, steps, _ in without if steps > 0]
    step = min(plain, default=0.0)
    drafted = [
        (seconds - start - (steps - drafting) * step) / drafting
        for seconds, steps, drafting in with_drafts
        if drafting > 0
    ]
    if step <= 0 or not drafted:
        return state, None
    return state, max(min(drafted) / step, 1.0)


def _time_steps(run, state, *, drafts, count=_STEPS):
    """Return the state after some steps, their seconds, and how many there were of which kind."""
    cost, pause = (0.0, 0) if drafts else (np.inf, _FOREVER)
    done, ended, *before = jax.device_get((state.count, state.ended, state.steps, state.drafted))
    if ended.all():
        return state, 0.0, 0, 0
    begin = time.perf_counter()
    state = jax.block_until_ready(run(_expect(state, cost, pause), done[~ended].min() + count))
    seconds = time.perf_counter() - begin
    steps, drafted = (
        int((new - old).max())
        for new, old in zip(jax.device_get((state.steps, state.drafted)), before, strict=True)
    )
    return state, seconds, steps, drafted // state.drafting.tokens
