"""Sums of the logarithms of decays between the tokens of a chunk, without cancellation.

The decay from token j to a later token i is ``exp(G_ij)``, where ``G_ij`` is the sum of the
logarithms of the tokens j + 1 to i. The difference ``G_i - G_j`` of two sums from the start of the
chunk would lose its digits if both sums are large, and ``exp(G_i) exp(-G_j)`` would overflow.

Therefore the chunk is divided into parts of 1, 2, 4, ... tokens. Each pair of tokens lies in
neighboring parts of one size. ``G_ij`` is the sum from j to the edge between these two parts, plus
the sum from the edge to i. All logarithms are at most 0. So no digits cancel, and the decays on
both sides of the edge are at most 1.
"""

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float


def part_sizes(count: int) -> list[int]:
    """Return the sizes 1, 2, 4, ..., ``count / 2`` of parts; `count` is a power of 2."""
    return [1 << power for power in range(count.bit_length() - 1)]


def keep_neighbors(x: Float[Array, "... c c"], size: int) -> Float[Array, "... c c"]:
    """Keep the pairs ``[i, j]`` of tokens in neighboring parts of `size`, and set all others to 0.

    Token i lies in an odd part, and token j in the part before it. Over all `part_sizes`, each pair
    with ``i > j`` is kept once.
    """
    part = np.arange(x.shape[-1]) // size
    kept = (part[:, None] % 2 == 1) & (part[:, None] == part + 1)
    return jnp.where(jnp.broadcast_to(kept, x.shape), x, jnp.zeros((), x.dtype))


def sum_to_edge(logs: Float[Array, "... c d"], size: int) -> Float[Array, "... c d"]:
    """Sum the logarithms between each token and the edge of its part that faces its neighbor.

    In odd parts, the sum is over the part's tokens up to the token itself. In even parts, the sum
    is over the part's tokens behind the token.
    """
    return _sum(_tokens_to_edge(logs.shape[-2], size), logs)


def _tokens_to_edge(count, size):
    """Return which tokens j the sum of token i takes in `sum_to_edge`, bool ``[i, j]``."""
    index = np.arange(count)
    part = index // size
    ahead = np.where(part[:, None] % 2 == 1, index <= index[:, None], index > index[:, None])
    return ahead & (part == part[:, None])


def sum_from_start(logs: Float[Array, "... c d"]) -> Float[Array, "... c d"]:
    """Sum the logarithms of each token and of all tokens before it."""
    return _sum(np.tri(logs.shape[-2], dtype=bool), logs)


def sum_to_end(logs: Float[Array, "... c d"]) -> Float[Array, "... c d"]:
    """Sum the logarithms of all tokens behind each token."""
    return _sum(~np.tri(logs.shape[-2], dtype=bool), logs)


def sum_between(logs: Float[Array, "... c"]) -> Float[Array, "... c c"]:
    """Return the sums ``[..., i, j]`` of the logarithms of the tokens j + 1 to i; 0 for i <= j.

    One product computes the sums to the edges of parts of all sizes.
    """
    count = logs.shape[-1]
    sizes = part_sizes(count)
    if not sizes:
        return jnp.zeros((*logs.shape, count), logs.dtype)
    chosen = np.concatenate([_tokens_to_edge(count, size) for size in sizes])
    chosen = jnp.asarray(chosen.T, logs.dtype)
    sums = jnp.matmul(logs, chosen, precision=lax.Precision.HIGHEST)
    # Parts of this size separate tokens i and j: it is the highest bit in which they differ.
    index = np.arange(count)
    differ = index[:, None] ^ index
    power = np.frexp(np.maximum(differ, 1))[1] - 1
    both = sums[..., power * count + index[:, None]] + sums[..., power * count + index]
    return jnp.where(index[:, None] > index, both, 0)


def _sum(chosen, logs):
    """Return ``chosen @ logs`` in full float32; exponents with fewer digits give wrong decays."""
    chosen = jnp.broadcast_to(jnp.asarray(chosen, logs.dtype), (*logs.shape[:-1], logs.shape[-2]))
    return jnp.matmul(chosen, logs, precision=lax.Precision.HIGHEST)
