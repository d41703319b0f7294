"""Attention to the last few keys, and to keys that each stand for a whole window of tokens.

Memory beyond the results does not grow with the number of queries times the number of keys: a few
queries are computed at a time.

Source: compressed sparse attention and heavily compressed attention, `modeling_deepseek_v4` of
transformers.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int32

from jax_nvfp4_moe.numerics.casts import cast
from jax_nvfp4_moe.ops.chosen_keys import each_query, multiply


def attend_to_compressed(
    q: Float[Array, "b t n d"],
    near: Float[Array, "b s d"],
    places: Int32[Array, "b t"],
    far: Float[Array, "b c d"],
    visible: Int32[Array, "b t"],
    chosen: Int32[Array, "b t k"] | None,
    sinks: Float[Array, " n"],
    *,
    window: int,
    scale: float,
) -> Float[Array, "b t n d"]:
    """Attend to a window of near keys and to compressed keys, in one softmax.

    Keys are also the values, and all heads share them. The softmax is computed in float32.

    Args:
      q: queries of t tokens in each of b rows, with n heads.
      near: keys of single tokens, one after another.
      places: index of each query's own token in `near`. It sees that key and the ``window - 1``
        keys before it. Indices of padding may lie beyond the keys.
      far: compressed keys, from the start of the text.
      visible: number of compressed keys that each query may see.
      chosen: indices of the compressed keys that each query attends to, all different. Those that
        are not visible are left out. None for all visible keys.
      sinks: one further score for each head, whose value is zero.
      window: number of near keys that a query sees.
      scale: factor of the scores.

    Returns:
      ``[b, t, n, d]`` in the dtype of `q`.
    """
    b, _, n, d = q.shape
    count = far.shape[1] if chosen is None else chosen.shape[2]
    every = jnp.arange(count, dtype=jnp.int32)[None, :]

    def take(keys, indices):
        return jax.vmap(lambda row, at: row.at[at].get(mode="clip"))(keys, indices)

    def attend(q, place, visible, *chosen):
        at = place[:, None] - jnp.arange(window, dtype=jnp.int32)[None, :]
        ids = chosen[0] if chosen else every
        own, others = take(near, at), take(far, ids) if chosen else far
        seen = jnp.broadcast_to(ids < visible[:, None], (b, count))
        parts = [
            _score(q, own, at >= 0, scale),
            _score(q, others, seen, scale),
            jnp.broadcast_to(sinks.astype(jnp.float32)[None, :, None], (b, n, 1)),
        ]
        shares = jax.nn.softmax(jnp.concatenate(parts, axis=-1), axis=-1).astype(near.dtype)
        y = multiply(shares[..., :window], own, contracted=(2, 1))
        y += multiply(shares[..., window:-1], others, contracted=(2, 1))
        return cast(y, q.dtype)

    gathered = window if chosen is None else window + count
    elements = b * (gathered * d + n * (window + count))
    given = (q, places, visible) if chosen is None else (q, places, visible, chosen)
    return each_query(attend, elements, *given)


def _score(q, keys, seen, scale):
    """Return float32 scores ``[b, n, s]`` of ``q [b, n, d]``, the least number for unseen keys."""
    scores = multiply(q, keys, contracted=(2, 2)) * scale
    return jnp.where(seen[:, None, :], scores, jnp.finfo(scores.dtype).min)
