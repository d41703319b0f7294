"""Drafters for tests, which know the tokens of decoding without drafts."""

import dataclasses

import jax
import jax.numpy as jnp


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Memory:
    """Number of new tokens of each row, int32 ``[b]``."""

    count: jax.Array


# How many of three drafts are right, for index `place` of a draft, `count` and `row`.
MODES = {
    "right": lambda place, count, row, rows: place >= 0,
    "wrong": lambda place, count, row, rows: place < 0,
    "alternating": lambda place, count, row, rows: (count + place) % 3 != 0,
    "wrong in the last row": lambda place, count, row, rows: (row < rows - 1) & (place >= 0),
}


class Oracle:
    """Drafts tokens that are known, or others in their place."""

    NEEDS_HIDDEN = False

    def __init__(self, truth, mode: str):
        """`truth` has the tokens of decoding without drafts ``[b, n]``."""
        self.truth, self.right = jnp.pad(jnp.asarray(truth), [(0, 0), (0, 32)]), MODES[mode]

    def begin(self, ids, lengths, room):
        """Return the memory of a prompt."""
        return Memory(jnp.zeros_like(lengths))

    def record(self, memory, new, emitted, hidden):
        """Count new tokens."""
        return Memory(memory.count + emitted)

    def propose(self, model, memory, count):
        """Return drafts of which `mode` says which are right."""
        rows = len(memory.count)
        place, row = jnp.arange(count)[None, :], jnp.arange(rows)[:, None]
        index = jnp.minimum(memory.count[:, None] + place, self.truth.shape[1] - 1)
        known = jnp.take_along_axis(self.truth, index, axis=1)
        right = self.right(place, memory.count[:, None], row, rows)
        return jnp.where(right, known, (known + 1) % model.config.vocab_size), memory
