"""Pack the true tokens of all rows one after the other, and put them back into their rows.

A batch of prompts of unequal length is padded to the longest one. Norms, linear layers and experts
treat each token by itself, so they need not see padding: they run on packed tokens ``[1, n, h]``.
The mixers of tokens need rows. Each mixer projects packed tokens, unpacks the projections to ``[b,
t, ...]``, mixes them, and packs the results for its last projection.

The positions ``[b, t]`` tell which tokens are true. Tokens are packed if their leading axes differ
from the axes of the positions. Otherwise `pack` and `unpack` return their argument.
"""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Int32, Shaped

from jax_nvfp4_moe.ops.moves import gather_rows
from jax_nvfp4_moe.ops.positions import PADDING


def pack(
    x: Shaped[Array, "b t ..."], positions: Int32[Array, "b t"], num_tokens: int | None
) -> Shaped[Array, "..."]:
    """Return the true tokens of all rows one after the other, ``[1, num_tokens, ...]``.

    Args:
      x: values of the tokens ``[b, t, ...]``.
      positions: position of each token; `PADDING` or more for padding.
      num_tokens: number of packed tokens. If there are fewer true tokens, copies of the first token
        fill the rest. If there are more, the last ones are lost. None returns `x`.
    """
    if num_tokens is None:
        return x
    (index,) = jnp.nonzero((positions < PADDING).reshape(-1), size=num_tokens, fill_value=0)
    return lax.collapse(x, 0, 2)[index][None]


def pack_like(
    x: Shaped[Array, "b t ..."], positions: Int32[Array, "b t"], other: Shaped[Array, "..."]
) -> Shaped[Array, "..."]:
    """Return `x` with its tokens packed as those of `other` are; see `pack`."""
    return pack(x, positions, None if is_unpacked(other, positions) else other.shape[1])


def unpack(x: Shaped[Array, "..."], positions: Int32[Array, "b t"]) -> Shaped[Array, "b t ..."]:
    """Return packed tokens in their rows, ``[b, t, ...]``. The values of padding are undefined.

    Args:
      x: packed tokens ``[1, n, ...]``, or tokens in their rows, which are returned.
      positions: position of each token; `PADDING` or more for padding.
    """
    if is_unpacked(x, positions):
        return x
    # Without the barrier, XLA would compute the sums behind a place again for each number that it
    # gathers. On an H200 that takes four times as long.
    places = lax.optimization_barrier(find_places(positions))
    packed = lax.collapse(x[0], 1)
    return gather_rows(packed, places).reshape(*positions.shape, *x.shape[2:])


def find_places(positions: Int32[Array, "b t"]) -> Int32[Array, "b t"]:
    """Return the place of each true token among the packed tokens; any place for padding."""
    count = jnp.cumsum((positions < PADDING).reshape(-1), dtype=jnp.int32)
    return jnp.maximum(count - 1, 0).reshape(positions.shape)


def is_unpacked(x: Shaped[Array, "..."], positions: Int32[Array, "b t"]) -> bool:
    """Return whether the tokens of `x` are in their rows."""
    return x.shape[:2] == positions.shape
