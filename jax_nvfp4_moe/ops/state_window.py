"""`StateWindow`: the states of a mixer after each token of a window, so that decoding can go back.

Drafted tokens are read together, and some of them are refused. What is stored by position, such as
keys and values, needs no care: the tokens that follow overwrite it. A recurrent state has changed
with every token. A cache with windows therefore holds the state after each of the last tokens, and
the next call goes on from the one that `kept` names.
"""

import dataclasses
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int32


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class StateWindow:
    """The cache entries of one layer, with states that decoding can go back to.

    Attributes:
      states: name of a state -> the states after each of the last w tokens ``[b, w, ...]``, the
        oldest first.
      others: name -> entries that are stored by position.
      kept: int32 ``[b]``, the index of the state of each row from which the next token goes on.
        None in a cache of `take_kept`.
    """

    states: Mapping[str, Array]
    others: Mapping[str, Array]
    kept: Int32[Array, " b"]

    @classmethod
    def open(
        cls, entries: Mapping[str, Array], names: Collection[str], size: int
    ) -> "StateWindow | Mapping[str, Array]":
        """Return cache entries with a window of states, or the entries if none is a state.

        Args:
          entries: plain cache entries of one layer.
          names: names of the states. Those that the layer does not have are left out.
          size: number of tokens of a window, w.
        """
        found = {name: entries[name] for name in entries if name in names}
        if not found:
            return entries
        rows = next(iter(found.values())).shape[0]
        room = {name: jnp.zeros((rows, size, *x.shape[1:]), x.dtype) for name, x in found.items()}
        others = {name: x for name, x in entries.items() if name not in found}
        window = cls(room, others, jnp.zeros(rows, jnp.int32))
        return window.after([entries])

    def current(self) -> dict[str, Array]:
        """Return plain cache entries, with the kept state of each row."""

        def take(rows, kept):
            return rows[kept]

        # XLA shards the rows of a mapped axis among devices, but not those of an index.
        kept = {name: jax.vmap(take)(rows, self.kept) for name, rows in self.states.items()}
        return {**self.others, **kept}

    def after(self, each: Sequence[Mapping[str, Array]]) -> "StateWindow":
        """Return the window after further tokens; the state after the last one is kept.

        Args:
          each: the plain cache entries after each token, at most w of them.
        """
        states = {
            name: rows.at[:, : len(each)].set(jnp.stack([one[name] for one in each], axis=1))
            for name, rows in self.states.items()
        }
        others = {name: each[-1][name] for name in self.others}
        return dataclasses.replace(self, others=others).after_tokens(states, len(each))

    def after_tokens(self, states: Mapping[str, Array], count: int) -> "StateWindow":
        """Return the window with the `states` after `count` tokens; that after the last is kept."""
        return StateWindow(states, self.others, jnp.full_like(self.kept, count - 1))

    def keep(self, tokens: Int32[Array, " b"]) -> "StateWindow":
        """Return the window that goes on after the first `tokens` of the last tokens, 1 or more."""
        return dataclasses.replace(self, kept=jnp.maximum(tokens - 1, 0))


def take_kept(cache: Any) -> tuple[Any, Array | None]:
    """Return a cache whose windows have no `kept`, and that of all of them.

    The windows of a cache go back together. A loop that carries one `kept` for all layers has no
    copies of it to make.

    Args:
      cache: a pytree with `StateWindow` in it, or without.

    Returns:
      The cache, and None for `kept` if it has no window.
    """
    windows = [one for one in jax.tree.leaves(cache, is_leaf=_is_window) if _is_window(one)]
    return put_kept(cache, None), windows[0].kept if windows else None


def put_kept(cache: Any, kept: Array | None) -> Any:
    """Return the cache with `kept` in all its windows; the inverse of `take_kept`."""

    def put(entries):
        return dataclasses.replace(entries, kept=kept) if _is_window(entries) else entries

    return jax.tree.map(put, cache, is_leaf=_is_window)


def _is_window(tree):
    return isinstance(tree, StateWindow)


def run_tokens(
    run: Callable, entries: StateWindow | Mapping[str, Array] | None, start: Callable, *tokens: Any
) -> tuple[Array, Any]:
    """Run tokens through a recurrence: all at once, or one by one if their states are kept.

    A step of one token has the bits of decoding without drafts.

    Args:
      run: takes the tokens and plain cache entries, and returns ``y [b, t, ...]`` and new entries.
      entries: the cache entries, or None without a cache.
      start: returns the entries that stand before the first token.
      *tokens: arrays ``[b, t, ...]``, or None.

    Returns:
      The result ``y``, and the new cache entries; None without a cache.
    """
    if not isinstance(entries, StateWindow):
        y, new = run(*tokens, start() if entries is None else entries)
        return y, None if entries is None else new
    length = next(x for x in tokens if x is not None).shape[1]
    results, each, old = [], [], entries.current()
    for index in range(length):
        y, old = run(*(None if x is None else x[:, index : index + 1] for x in tokens), old)
        results.append(y)
        each.append(old)
    return jnp.concatenate(results, axis=1), entries.after(each)


def run_recurrence(
    step: Callable,
    prompt: Callable,
    projected: Array,
    positions: Array,
    entries: StateWindow | Mapping[str, Array] | None,
    start: Callable,
    names: Sequence[str] = ("inputs", "state"),
) -> tuple[Array, Any]:
    """Run tokens through a recurrent mixer.

    Args:
      step: runs one token of each row, or those of a window: ``step(projected, positions, inputs,
        state, kept=kept)`` returns the result, the new inputs and the new state.
      prompt: runs the tokens of prompts, likewise without `kept`.
      projected: projected tokens ``[b, t, n]``.
      positions: their positions ``[b, t]``.
      entries: the cache entries, or None without a cache.
      start: returns the entries that stand before the first token of b rows.
      names: names of the entries of the last inputs and of the state.

    Returns:
      The result, and the new cache entries; None without a cache.
    """
    t = positions.shape[1]
    if isinstance(entries, StateWindow):
        old = [entries.states[name] for name in names]
        y, *new = step(projected, positions, *old, kept=entries.kept)
        return y, entries.after_tokens(dict(zip(names, new, strict=True)), t)
    old = start(len(positions)) if entries is None else entries
    y, *new = (step if t == 1 else prompt)(projected, positions, *(old[name] for name in names))
    return y, None if entries is None else dict(zip(names, new, strict=True))


def over_window(step: Callable) -> Callable:
    """Return the step of a recurrent mixer for one token as one for a window of tokens.

    Args:
      step: takes projected tokens, positions, the last inputs, the state and further arrays of the
        tokens, and returns the result, the inputs and the state.

    Returns:
      A function that also takes `kept` behind the state: None, or int32 ``[b]`` with inputs and
      states ``[b, w, ...]``.
    """

    def window_step(projected, positions, inputs, state, kept=None, *apart, **options):
        if kept is None:
            return step(projected, positions, inputs, state, *apart, **options)

        def run(projected, positions, *apart_and_old):
            *apart, old = apart_and_old
            y, inputs, state = step(
                projected, positions, old["inputs"], old["state"], *apart, **options
            )
            return y, {"inputs": inputs, "state": state}

        window = StateWindow({"inputs": inputs, "state": state}, {}, kept)
        y, window = run_tokens(run, window, dict, projected, positions, *apart)
        return y, window.states["inputs"], window.states["state"]

    return window_step
