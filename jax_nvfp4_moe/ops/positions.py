"""Positions of tokens, of which large ones stand for padding."""

import jax.numpy as jnp
from jaxtyping import Array, Int, Int32

# A token at this position or a later one is padding. It changes no cache and no recurrent state.
# The results for padding are finite and otherwise undefined.
PADDING = 2**30


def narrow_positions(positions: Int[Array, "b t"]) -> Int32[Array, "b t"]:
    """Return positions of any integer dtype as int32.

    A plain cast would wrap around: the position ``2**32`` would become 0. A position that does not
    fit stays below 0, or at `PADDING` or later.
    """
    if positions.dtype.itemsize < 4 or positions.dtype.name == "int32":
        return positions.astype("int32")
    lowest = 0 if positions.dtype.kind == "u" else -1
    return positions.clip(lowest, jnp.iinfo(jnp.int32).max).astype("int32")
