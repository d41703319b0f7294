"""Write the keys and values of new tokens into the entries of a cache."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int32

from jax_nvfp4_moe.ops.moves import write_tokens


def append(entries, positions: Int32[Array, "b t"], **new: Float[Array, "b t m d"]):
    """Write new tokens into the cache.

    Args:
      entries: cache entries ``[b, m, s, d]`` by name, or None without a cache.
      positions: position of each token, int32 ``[b, t]``, all different in a row. Tokens at
        positions below 0 and of s or more are dropped.
      **new: arrays to write by name, ``[b, t, m, d]``.

    Returns:
      The arrays to attend to, ``[b, m, s, d]`` by name, and the updated entries. With a cache both
      are the entries. Without a cache they are `new` and None.
    """
    if entries is None:
        return {name: jnp.moveaxis(value, 1, 2) for name, value in new.items()}, None
    written = {name: write_tokens(entries[name], positions, value) for name, value in new.items()}
    return written, written
