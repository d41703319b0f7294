"""Sparse attention: choose some keys for each query by cheap scores, and attend to these alone.

Memory beyond the results does not grow with the number of queries times the number of keys: both
functions compute a few queries at a time.

Source: the lightning indexer of DeepSeek-V3.2, arXiv:2512.02556.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int32

from jax_nvfp4_moe.backends.by_rows import by_rows
from jax_nvfp4_moe.ops.dense import precision_for

# Number of elements that the arrays of the queries computed at once may have: 256 MiB in float32.
_ELEMENTS = 2**26


def choose_keys(
    q: Float[Array, "b t n d"],
    weights: Float[Array, "b t n"],
    k: Float[Array, "b s d"],
    positions: Int32[Array, "b t"],
    *,
    count: int,
) -> Int32[Array, "b t c"]:
    """Return the positions of the keys with the largest scores for each query.

    ``score[t, s] = sum over heads h of weights[t, h] * relu(q[t, h] @ k[s])``, in float32. The
    query at position p chooses among the keys at positions 0 to p. Of equal scores, the earlier
    keys are chosen; torch.topk, which transformers calls, does not say which it takes.

    Args:
      q: queries of t tokens in each of b rows, with n heads.
      weights: float32 weight of each head.
      k: keys, those of position i at index i; finite.
      positions: position of each query.
      count: number of keys to choose, at most s.

    Returns:
      int32 ``[b, t, count]``, in the order of the scores. A query at position p below ``count - 1``
      gets all of its keys first, and then keys after its position, which it must not see.
    """
    run = by_rows(functools.partial(_choose, count=count), "b t, b t, b, b t -> b t")
    return run(*lax.stop_gradient((q, weights, k)), positions)


def _choose(q, weights, k, positions, *, count):
    """Compute `choose_keys`."""
    b, s = k.shape[:2]

    def choose(q, weights, positions):
        products = multiply(q, k, contracted=(2, 2))
        scores = multiply(weights[:, None], jax.nn.relu(products), contracted=(2, 1))[:, 0]
        visible = jnp.arange(s, dtype=jnp.int32)[None, :] <= positions[:, None]
        return lax.top_k(jnp.where(visible, scores, -jnp.inf), count)[1]

    return each_query(choose, b * s * q.shape[2], q, weights, positions)


def attend_to_chosen(
    q: Float[Array, "b t n d"],
    k: Float[Array, "b m s d"],
    v: Float[Array, "b m s dv"],
    positions: Int32[Array, "b t"],
    chosen: Int32[Array, "b t c"],
    *,
    scale: float,
) -> Float[Array, "b t n dv"]:
    """Attend as `ops.attention` does, but only to the chosen keys of each query.

    Args:
      q: queries of t tokens in each of b rows.
      k: keys, those of position i at index i. ``n / m`` query heads share one key head.
      v: values, in the same order.
      positions: position of each query.
      chosen: positions of the keys of each query, all different. Those after the position of the
        query are left out, and at least one must not be.
      scale: factor of the scores.

    Returns:
      ``[b, t, n, dv]`` in the dtype of `q`.
    """
    b, m, _, d = k.shape
    n, count = q.shape[2], chosen.shape[2]

    def attend(q, positions, chosen):
        def take(x):
            return jax.vmap(lambda row, at: row.at[:, at].get(mode="clip"))(x, chosen)

        keys, values = (lax.collapse(take(x), 0, 2) for x in (k, v))
        scores = multiply(q.reshape(b * m, n // m, d), keys, contracted=(2, 2)) * scale
        visible = jnp.repeat(chosen <= positions[:, None], m, axis=0)[:, None, :]
        scores = jnp.where(visible, scores, jnp.finfo(scores.dtype).min)
        y = multiply(jax.nn.softmax(scores, axis=-1).astype(v.dtype), values, contracted=(2, 1))
        return y.reshape(b, n, v.shape[3]).astype(q.dtype)

    each = b * count * (m * (d + v.shape[3]) + n)
    return each_query(attend, each, q, positions, chosen)


def each_query(run, elements: int, *arrays):
    """Run a function for each query, and as many queries at once as fit `_ELEMENTS`.

    Args:
      run: takes the arrays of one query, without their axis 1.
      elements: number of elements that it makes for one query.
      *arrays: arrays ``[b, t, ...]``.
    """
    together = max(_ELEMENTS // max(elements, 1), 1)  # no rows make no elements
    each = tuple(jnp.moveaxis(x, 1, 0) for x in arrays)
    if len(each[0]) <= together:
        found = jax.vmap(run)(*each)
    else:
        # A backward pass gathers the keys again, which are too many to keep for all queries.
        again = jax.checkpoint(lambda one: run(*one), prevent_cse=False)
        found = lax.map(again, each, batch_size=together)
    return jnp.moveaxis(found, 0, 1)


def multiply(x, y, contracted):
    """Multiply ``[b, ., .]`` by ``[b, ., .]`` with float32 sums over one axis of each."""
    own, other = contracted
    return lax.dot_general(
        x,
        y,
        (((own,), (other,)), ((0,), (0,))),
        precision=precision_for(x.dtype),
        preferred_element_type=jnp.float32,
    )
