"""The delta rule with a decay for each channel of a key, in jnp.

`channel_delta_chunks` is the reference of `ops.gated_delta_rule` for such decays.
"""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from jax_nvfp4_moe.numerics.chunk_decay import (
    keep_neighbors,
    part_sizes,
    sum_from_start,
    sum_to_edge,
    sum_to_end,
)
from jax_nvfp4_moe.ops.recurrent.delta_chunks import Chunks, apply_chunks, join_chunks, split_chunks


def channel_delta_step(
    q: Float[Array, "b 1 m d"],
    k: Float[Array, "b 1 m d"],
    v: Float[Array, "b 1 m r e"],
    g: Float[Array, "b 1 m r d"],
    beta: Float[Array, "b 1 m r"],
    state: Float[Array, "b m r d e"],
) -> tuple[Float[Array, "b 1 m r e"], Float[Array, "b m r d e"]]:
    """Process one token. The arguments and results are those of `channel_delta_chunks`."""
    q, k = (x[:, 0, :, None, :, None] for x in (q, k))
    state = state * jnp.exp(g[:, 0])[..., None]
    missing = v[:, 0] - jnp.sum(state * k, axis=-2)
    state = state + k * (missing * beta[:, 0, ..., None])[..., None, :]
    return jnp.sum(state * q, axis=-2)[:, None], state


def channel_delta_chunks(
    q: Float[Array, "b t m d"],
    k: Float[Array, "b t m d"],
    v: Float[Array, "b t m r e"],
    g: Float[Array, "b t m r d"],
    beta: Float[Array, "b t m r"],
    state: Float[Array, "b m r d e"],
    chunk: int = 32,
    precision: lax.Precision = lax.Precision.HIGHEST,
) -> tuple[Float[Array, "b t m r e"], Float[Array, "b m r d e"]]:
    """Process tokens in chunks. The result is that of `channel_delta_step`, token by token.

    Let S be the state before a chunk, ``G_i`` the sum of g over its tokens up to i, and ``D_ij =
    diag(exp(G_i - G_j))``. The corrections ``u_i`` that the tokens add to the state solve::

      u_i + beta_i sum_{j<i} (k_i . D_ij k_j) u_j = beta_i (v_i - (exp(G_i) k_i).T S)

    Args:
      q: queries, float32 ``[b, t, m, d]``: vectors of length 1, times ``d ** -0.5``.
      k: keys of length 1, float32 ``[b, t, m, d]``.
      v: values, float32 ``[b, t, m, r, e]``.
      g: logarithm of the decay of each channel, float32 ``[b, t, m, r, d]``, at most 0.
      beta: rate of correction, float32 ``[b, t, m, r]``.
      state: state before the first token, float32 ``[b, m, r, d, e]``.
      chunk: number of tokens in a chunk, a power of 2.
      precision: precision of the products that `apply_chunks` names. Full float32 by default.

    Returns:
      The results, float32 ``[b, t, m, r, e]``, and the state after the last token.
    """
    t = q.shape[1]
    chunk = min(chunk, 1 << (t - 1).bit_length())
    q, k = (split_chunks(part, chunk)[:, :, :, None] for part in (q, k))  # an axis for r heads
    v, g, beta = (split_chunks(part, chunk) for part in (v, g, beta[..., None]))
    from_start = jnp.exp(sum_from_start(g))
    key_pairs, query_pairs = _decayed_pairs(q, k, g, precision)
    chunks = Chunks(
        key_pairs,
        query_pairs,
        read_keys=from_start * k,
        read_queries=from_start * q,
        write_keys=jnp.exp(sum_to_end(g)) * k,
        values=v,
        beta=beta,
        kept=from_start[..., -1, :, None],
    )
    y, state = apply_chunks(chunks, state, precision)
    return join_chunks(y, t), state


def _decayed_pairs(q, k, g, precision):
    """Return ``k_i . D_ij k_j`` for i > j and ``q_i . D_ij k_j`` for i >= j, else 0.

    Each channel has its own decay. Between neighboring parts of a chunk the decay is the product of
    the decay to the edge between them and that from the edge, so that one matrix product gives the
    pairs of all parts of a size.
    """
    count = g.shape[-2]
    key_pairs = jnp.zeros((*g.shape[:-1], count), k.dtype)
    query_pairs = jnp.sum(q * k, axis=-1, keepdims=True) * jnp.broadcast_to(
        jnp.eye(count, dtype=k.dtype), key_pairs.shape
    )
    for size in part_sizes(count):
        decay = jnp.exp(sum_to_edge(g, size))
        faded = decay * k
        turned = jnp.swapaxes(faded, -1, -2)
        exact = jnp.matmul(faded, turned, precision=lax.Precision.HIGHEST)
        key_pairs += keep_neighbors(exact, size)
        read = jnp.matmul(decay * q, turned, precision=precision)
        query_pairs += keep_neighbors(read, size)
    return key_pairs, query_pairs
