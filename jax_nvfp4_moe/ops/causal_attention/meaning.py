"""Attention in jnp: the reference, and a backend for CPUs that skips keys that no query sees.

Both read the keys and values of positions 0 to s - 1. The query at position p sees those of
positions 0 to p. Keys and values in FP8 are widened to the dtype of the queries: all of them by the
reference, and each block when it is read by the backend for CPUs.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int32

from jax_nvfp4_moe.numerics.varying import vary_like
from jax_nvfp4_moe.ops.positions import PADDING

# Number of queries that the reference computes at once. It bounds the memory of the scores.
_REFERENCE_QUERIES = 512
# Number of queries and keys in one block of scores on a CPU. If 8 query heads share a key head, the
# scores of one block and key head take 2 MiB in float32, which is about the size of a core's
# caches. Blocks of 256 queries or of 1024 keys take more CPU time.
QUERIES, _KEYS = 128, 512


def widen(x: Float[Array, "b m s d"], scale: Float[Array, " m"] | None, dtype: Any):
    """Return keys or values in E4M3 times the scale of their head, rounded once to `dtype`.

    Args:
      x: keys or values ``[b, m, s, d]``.
      scale: float32 ``[m]``; None returns `x` as it is.
      dtype: dtype of the result.
    """
    if scale is None:
        return x
    return (x.astype(jnp.float32) * scale.astype(jnp.float32)[None, :, None, None]).astype(dtype)


@functools.partial(jax.jit, inline=True, static_argnames=("scale", "window", "chunk"))
def attend(
    q: Float[Array, "b t n d"],
    k: Float[Array, "b m s d"],
    v: Float[Array, "b m s dv"],
    positions: Int32[Array, "b t"],
    sinks: Float[Array, " n"] | None,
    k_scale: Float[Array, " m"] | None = None,
    v_scale: Float[Array, " m"] | None = None,
    *,
    scale: float,
    window: int | None,
    chunk: int | None,
) -> Float[Array, "b t n dv"]:
    """Compute `ops.attention`, with at most 512 queries and all keys at once."""
    k, v = widen(k, k_scale, q.dtype), widen(v, v_scale, q.dtype)

    def attend_block(q, positions):
        y = _attend_to_all(q, k, v, positions, sinks, scale, window, chunk)
        return _without_negative(y, positions)

    if positions.shape[1] <= _REFERENCE_QUERIES:
        return attend_block(q, positions)
    return map_queries(attend_block, q, positions, _REFERENCE_QUERIES)


def map_queries(attend_block, q, positions, block):
    """Run ``attend_block(q, positions)`` for one block of queries after the other.

    `q` is an array ``[b, t, ...]`` or a tree of such arrays. A backward pass computes the scores of
    each block again. If it kept them, its memory would grow with the square of the context.
    """
    b, t = positions.shape
    padded = -(-t // block) * block

    def split(x, fill):
        pad = [(0, 0), (0, padded - t)] + [(0, 0)] * (x.ndim - 2)
        x = jnp.pad(x, pad, constant_values=fill)
        return jnp.moveaxis(x.reshape(b, padded // block, block, *x.shape[2:]), 1, 0)

    queries = jax.tree.map(lambda x: split(x, 0), q)
    # In a loop, the two computations cannot be joined, so that no barrier has to prevent it.
    run = jax.checkpoint(lambda each: attend_block(*each), prevent_cse=False)
    y = lax.map(run, (queries, split(positions, PADDING)))
    return jnp.moveaxis(y, 0, 1).reshape(b, padded, *y.shape[3:])[:, :t]


def _attend_to_all(q, k, v, positions, sinks, scale, window, chunk):
    """Compute attention for all queries at once, with products batched over rows and key heads."""
    s = k.shape[2]
    grouped = group(q, k.shape[1])
    keys = jnp.arange(s, dtype=jnp.int32)
    scores = _scores(grouped, k, keys, positions, scale, window, chunk)
    if sinks is None:
        weights = jax.nn.softmax(scores, axis=-1)
    else:
        sink = jnp.broadcast_to(_of_heads(sinks, grouped)[..., None], (*scores.shape[:-1], 1))
        weights = jax.nn.softmax(jnp.concatenate([scores, sink], axis=-1), axis=-1)[..., :s]
    return ungroup(batched(weights.astype(v.dtype), v, 2), q)


@functools.partial(jax.jit, inline=True, static_argnames=("scale", "window", "chunk"))
def attend_to_blocks(
    q: Float[Array, "b t n d"],
    k: Float[Array, "b m s d"],
    v: Float[Array, "b m s dv"],
    positions: Int32[Array, "b t"],
    sinks: Float[Array, " n"] | None,
    k_scale: Float[Array, " m"] | None = None,
    v_scale: Float[Array, " m"] | None = None,
    *,
    scale: float,
    window: int | None,
    chunk: int | None,
) -> Float[Array, "b t n dv"]:
    """Compute `ops.attention` in blocks of keys, with a running maximum and sum of the softmax.

    A block of queries visits only the range of key blocks that its queries see. Therefore the cost
    depends on the filled part of a cache and not on its size. No array holds the scores of all
    keys.

    Source: arXiv:1805.02867 for the running maximum and sum.
    """
    if k.shape[2] <= _KEYS:
        options = {"scale": scale, "window": window, "chunk": chunk}
        return attend(q, k, v, positions, sinks, k_scale, v_scale, **options)
    attend_block = functools.partial(
        _attend_block,
        k=k,
        v=v,
        sinks=sinks,
        scale=scale,
        window=window,
        chunk=chunk,
        scales=(k_scale, v_scale),
    )
    if positions.shape[1] <= QUERIES:
        return attend_block(q, positions)
    return map_queries(attend_block, q, positions, QUERIES)


def _attend_block(q, positions, *, k, v, sinks, scale, window, chunk, scales=(None, None)):
    """Compute attention for one block of queries, over the blocks of keys that it sees."""
    s = k.shape[2]
    grouped = group(q, k.shape[1])
    first, last = _visible_blocks(positions, s, window, chunk)

    def add_block(index, carry):
        largest, total, y = carry
        # The last block ends at the last key and may overlap the block before it. The keys of the
        # overlap are masked; otherwise they would count twice.
        start = jnp.minimum(index * _KEYS, s - _KEYS)
        block_k, block_v = (
            widen(lax.dynamic_slice_in_dim(x, start, _KEYS, axis=2), own, q.dtype)
            for x, own in zip((k, v), scales, strict=True)
        )
        keys = start + jnp.arange(_KEYS, dtype=jnp.int32)
        new = (keys >= index * _KEYS)[None, None, :]
        scores = _scores(grouped, block_k, keys, positions, scale, window, chunk, new)
        grown = jnp.maximum(largest, jnp.max(scores, axis=-1))
        weights = jnp.exp(scores - grown[..., None])
        # Until a query sees its first key, it sums the weights of masked keys, exp(0) = 1. At the
        # first visible key `shrink` is 0, which removes them.
        shrink = jnp.exp(largest - grown)
        total = total * shrink + jnp.sum(weights, axis=-1)
        y = y * shrink[..., None] + batched(weights.astype(q.dtype), block_v, 2)
        return grown, total, y

    rows = grouped.shape[:-1]
    largest, total = jnp.full(rows, jnp.finfo(jnp.float32).min), jnp.zeros(rows, jnp.float32)
    if sinks is not None:
        largest = jnp.broadcast_to(_of_heads(sinks, grouped), rows)
        total = jnp.ones(rows, jnp.float32)
    y = jnp.zeros((*rows, v.shape[-1]), jnp.float32)
    carry = vary_like((largest, total, y), (q, k, v, positions, sinks, scales))
    _, total, y = lax.fori_loop(first, last, add_block, carry)
    # A block of padding alone visits no key. Its sum is 0, and 0 / 0 would be NaN.
    y = ungroup(y / jnp.maximum(total, jnp.finfo(jnp.float32).tiny)[..., None], q)
    return _without_negative(y, positions)


def _without_negative(y, positions):
    """Return results ``[b, t, n, dv]`` with zeros for queries below position 0, as kernels do."""
    return jnp.where((positions >= 0)[:, :, None, None], y, jnp.zeros((), y.dtype))


def _visible_blocks(positions, s, window, chunk):
    """Return the first block of keys that any query sees, and the block after the last one."""
    real = positions < PADDING
    first = jnp.int32(0)
    if window is not None:
        first = positions - window + 1
    if chunk is not None:
        first = jnp.maximum(first, positions // chunk * chunk)
    low = jnp.min(jnp.where(real, jnp.clip(first, 0, s), s), initial=s)  # if there are no queries
    high = jnp.max(jnp.where(real, jnp.minimum(positions + 1, s), 0), initial=0)
    return low // _KEYS, (high + _KEYS - 1) // _KEYS


def group(q, m):
    """Group queries ``[b, t, n, d]`` by key head, ``[b, m, n / m, t, d]``."""
    b, t, n, d = q.shape
    return jnp.moveaxis(q.reshape(b, t, m, n // m, d), 1, 3)


def ungroup(y, q):
    """Undo `group`: return ``[b, t, n, d]``, in the dtype of `q`."""
    return jnp.moveaxis(y.astype(q.dtype), 3, 1).reshape(*q.shape[:3], y.shape[-1])


def _of_heads(sinks, grouped):
    """Return sinks ``[n]`` in float32, in a shape that broadcasts to ``[b, m, n / m, t]``."""
    return sinks.astype(jnp.float32).reshape(1, *grouped.shape[1:3], 1)


def _scores(grouped, k, keys, positions, scale, window, chunk, new=True):
    """Return float32 scores ``[b, m, n / m, t, s]``, masked where a query does not see a key.

    Masked scores are the lowest finite number, not -inf. With a window or a chunk, padding sees no
    key at all. The softmax of -inf alone would be NaN, and 0 * NaN in the next layer would spread
    to real tokens.
    """
    scores = batched(grouped, k, 3)
    visible = new & _visible(keys[None, None, :], positions[:, :, None], window, chunk)
    return jnp.where(visible[:, None, None], scores * scale, jnp.finfo(scores.dtype).min)


def _visible(keys, queries, window, chunk) -> Bool[Array, "b t s"]:
    """Return whether the query at each position sees the key at each position."""
    visible = keys <= queries
    if window is not None:
        visible &= keys > queries - window
    if chunk is not None:
        visible &= keys // chunk == queries // chunk
    return visible


def batched(x, y, contracted):
    """Multiply ``x [b, m, g, t, k]`` by `y` in float32, summing over axis `contracted` of `y`."""
    exact = x.dtype == jnp.float32
    return lax.dot_general(
        x,
        y,
        (((4,), (contracted,)), ((0, 1), (0, 1))),
        precision=lax.Precision.HIGHEST if exact else lax.Precision.DEFAULT,
        preferred_element_type=jnp.float32,
    )


def attend_to_latents(
    q: Float[Array, "b t n d"],
    k: Float[Array, "b m s d"],
    positions: Int32[Array, "b t"],
    sinks: Float[Array, " n"] | None,
    *,
    value_width: int,
    attend: Callable = attend,
    **options: Any,
) -> Float[Array, "b t n dv"]:
    """Compute `ops.attention` with the first `value_width` channels of the keys as values.

    The products have all channels of the keys, of which the last ones are dropped afterwards.
    Dropping them before would copy the cache.
    """
    return attend(q, k, k, positions, sinks, **options)[..., :value_width]
