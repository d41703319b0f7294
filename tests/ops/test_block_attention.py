"""Test attention to chosen blocks of keys, against attention with a plain mask in float64."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_nvfp4_moe.ops.block_attention import BlockChoice, block_attention
from jax_nvfp4_moe.testing import assert_as_accurate_as

run = jax.jit(block_attention, static_argnames="choice")


def draw(tokens, keys):
    """Return random operands: two rows, four query heads, two key heads."""
    shapes = (2, tokens, 4, 8), (2, 2, keys, 8), (2, 2, keys, 8), (2, tokens, 2, 4), (2, 1, keys, 4)
    rng = np.random.default_rng(0)
    return [rng.standard_normal(shape, np.float32) for shape in shapes]


def find_seen(k, index_q, index_k, positions, choice):
    """Return the keys that each query and key head sees, bool ``[b, t, m, s]``, in float64."""
    index_q, index_k = np.float64(index_q), np.float64(index_k)
    seen = np.zeros((*index_q.shape[:3], k.shape[2]), bool)
    for b, t, m in np.ndindex(seen.shape[:3]):
        last = int(positions[b, t])
        scores = index_k[b, 0, : last + 1] @ index_q[b, t, m]
        own = last // choice.size
        best = [scores[n * choice.size :][: choice.size].max() for n in range(own + 1)]
        for n in range(max(own - choice.local + 1, 0), own + 1):
            best[n] = np.inf
        kept = np.argsort(best)[::-1][: choice.top]
        seen[b, t, m, : last + 1] = np.isin(np.arange(last + 1) // choice.size, kept)
    return seen


def attend_to(q, k, v, seen, dtype):
    """Return attention to the keys that are seen: in float64 by NumPy, in float32 by plain XLA."""
    xp = np if dtype == np.float64 else jnp
    q, k, v = (x.astype(dtype) for x in (q, k, v))
    k, v = (xp.repeat(x, 2, axis=1) for x in (k, v))
    scores = xp.einsum("btnd,bnsd->btns", q, k) * dtype(8**-0.5)
    scores = xp.where(xp.repeat(seen, 2, axis=2), scores, dtype(-np.inf))
    weights = xp.exp(scores - scores.max(axis=-1, keepdims=True))
    return xp.einsum("btns,bnsd->btnd", weights / weights.sum(axis=-1, keepdims=True), v)


attend_plainly = jax.jit(functools.partial(attend_to, dtype=np.float32))


def check(found, q, k, v, seen):
    """Check that the error is at most twice that of plain XLA with a mask; return the truth."""
    truth, plain = attend_to(q, k, v, seen, np.float64), attend_plainly(q, k, v, seen)
    assert_as_accurate_as(found, plain, truth)
    return truth


def test_each_key_head_chooses_its_blocks():
    """The last block of keys is cut short, and the cache has room behind the last query."""
    q, k, v, *index = draw(9, 17)
    positions = np.tile(np.arange(4, 13, dtype=np.int32), (2, 1))
    choice = BlockChoice(size=3, top=3, local=2)
    found = run(q, k, v, *index, positions, choice=choice)
    check(found, q, k, v, find_seen(k, *index, positions, choice))
    fewer = find_seen(k, *index, positions, BlockChoice(size=3, top=3, local=1))
    with pytest.raises(AssertionError, match="yardstick"):
        check(found, q, k, v, fewer)  # negative control: a local block less


def test_all_blocks_are_plain_attention():
    """More queries than one block of queries, with enough blocks for all keys."""
    q, k, v, *index = draw(140, 140)
    positions = np.tile(np.arange(140, dtype=np.int32), (2, 1))
    causal = np.broadcast_to(np.tri(140, dtype=bool)[None, :, None], (2, 140, 2, 140))
    found = run(q, k, v, *index, positions, choice=BlockChoice(16, 9, 1))
    check(found, q, k, v, causal)
    fewer = run(q, k, v, *index, positions, choice=BlockChoice(16, 8, 1))
    with pytest.raises(AssertionError, match="yardstick"):
        check(fewer, q, k, v, causal)
