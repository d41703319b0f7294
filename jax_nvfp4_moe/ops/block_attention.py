"""block_attention: causal attention to the blocks of keys that an indexer chooses."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int32

from jax_nvfp4_moe.backends.by_rows import by_rows
from jax_nvfp4_moe.ops.causal_attention.meaning import QUERIES, batched, group, map_queries, ungroup


@dataclasses.dataclass(frozen=True)
class BlockChoice:
    """How many blocks of keys a query sees. All fields are static.

    Attributes:
      size: number of keys in a block.
      top: number of blocks that a query sees.
      local: number of blocks that are always among them, of which the last is the query's own.
    """

    size: int
    top: int
    local: int


@functools.partial(jax.jit, inline=True, static_argnames=("choice", "scale"))
def block_attention(
    q: Float[Array, "b t n d"],
    k: Float[Array, "b m s d"],
    v: Float[Array, "b m s dv"],
    index_q: Float[Array, "b t m di"],
    index_k: Float[Array, "b 1 s di"],
    positions: Int32[Array, "b t"],
    *,
    choice: BlockChoice,
    scale: float | None = None,
) -> Float[Array, "b t n dv"]:
    """Attend causally to blocks of keys, which each key head chooses for each query.

    The score of a key is ``index_q @ index_k``, and the score of a block that of its best key. A
    query sees the local blocks and those with the best scores.

    All devices run it in plain XLA, with at most 128 queries and all keys at once. It therefore
    saves no time over `attention`.

    Args:
      q: queries ``[b, t, n, d]``.
      k: keys ``[b, m, s, d]``, those of position i at index i, as for `attention`.
      v: values ``[b, m, s, dv]``.
      index_q: queries of the indexer, one for each key head.
      index_k: keys of the indexer, in the order of `k`.
      positions: position of each query, as for `attention`.
      choice: how many blocks are chosen.
      scale: factor of the scores of the attention; ``d ** -0.5`` if None.

    Returns:
      ``[b, t, n, dv]`` in the dtype of `q`. Gradients flow to `q`, `k` and `v`.

    Source: `MiniMaxM3VLIndexer` of transformers.
    """
    factor = q.shape[-1] ** -0.5 if scale is None else scale

    def attend_block(queries, positions):
        q, index_q = queries
        seen = _seen_keys(index_q, index_k, positions, choice)
        scores = batched(group(q, k.shape[1]), k, 3) * factor
        scores = jnp.where(seen[:, :, None], scores, jnp.finfo(scores.dtype).min)
        weights = jax.nn.softmax(scores, axis=-1).astype(v.dtype)
        return ungroup(batched(weights, v, 2), q)

    if positions.shape[1] <= QUERIES:
        return attend_block((q, index_q), positions)
    return map_queries(attend_block, (q, index_q), positions, QUERIES)


def _seen_keys(index_q, index_k, positions, choice) -> Bool[Array, "b m t s"]:
    """Return whether a key head lets a query see a key."""
    run = by_rows(functools.partial(_find_seen_keys, choice=choice), "b, b, b -> b")
    return run(*lax.stop_gradient((index_q, index_k)), positions)


def _find_seen_keys(index_q, index_k, positions, *, choice):
    """Compute `_seen_keys`."""
    s = index_k.shape[2]
    keys = jnp.arange(s, dtype=jnp.int32)
    visible = (keys[None, None, :] <= positions[:, :, None])[:, None]
    scores = jnp.where(visible, batched(group(index_q, 1), index_k, 3)[:, 0], -jnp.inf)
    count = -(-s // choice.size)
    room = [(0, 0)] * 3 + [(0, count * choice.size - s)]
    scores = jnp.pad(scores, room, constant_values=-jnp.inf)
    scores = scores.reshape(*scores.shape[:3], count, choice.size).max(axis=-1)
    # An infinite score makes a local block one of the best.
    blocks = jnp.arange(count, dtype=jnp.int32)[None, None, :]
    own = (positions // choice.size)[:, :, None]
    local = (blocks <= own) & (blocks > own - choice.local)
    scores = jnp.where(local[:, None], jnp.inf, scores)
    _, chosen = lax.top_k(scores, min(choice.top, count))
    kept = jnp.put_along_axis(jnp.zeros(scores.shape, bool), chosen, True, axis=-1, inplace=False)
    return jnp.repeat(kept, choice.size, axis=-1)[..., :s] & visible
