"""Test the choice of keys for each query, and attention to these keys alone, in float32."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_nvfp4_moe.ops import chosen_keys
from jax_nvfp4_moe.ops.chosen_keys import attend_to_chosen, choose_keys
from jax_nvfp4_moe.testing import assert_as_accurate_as

B, T, S, COUNT = 2, 7, 20, 5
SCALE = 0.3
# All queries at once, then two at a time with one left over.
TOGETHER = pytest.mark.parametrize("together", [T, 2])


def normal(seed, *shape):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


@pytest.fixture
def positions():
    """Return ascending positions. The first query of row 0 sees fewer keys than it may choose."""
    return np.array([[2, 5, 6, 9, 13, 18, 19], [7, 8, 9, 10, 11, 12, 13]], np.int32)


def allow(monkeypatch, together, elements):
    """Let so many queries be computed together whose arrays have `elements` elements each."""
    monkeypatch.setattr(chosen_keys, "_ELEMENTS", together * elements)


def choose(*operands):
    """Return the chosen keys, of a new program: its form depends on what `allow` allows."""
    return jax.jit(functools.partial(choose_keys, count=COUNT))(*operands)


@TOGETHER
def test_the_largest_scores_are_chosen(monkeypatch, positions, together):
    """Scores in float64 rank the keys. Heads have negative weights too."""
    heads = 3
    q, weights, k = normal(0, B, T, heads, 16), normal(1, B, T, heads), normal(2, B, S, 16)
    allow(monkeypatch, together, B * S * heads)
    found = np.asarray(choose(q, weights, k, positions))
    products = np.einsum("btnd,bsd->btns", np.float64(q), np.float64(k))
    scores = np.einsum("btn,btns->bts", np.float64(weights), np.maximum(products, 0))
    for row, query in np.ndindex(B, T):
        seen = positions[row, query] + 1
        expected = np.argsort(-scores[row, query, :seen], kind="stable")[:COUNT]
        np.testing.assert_array_equal(found[row, query, : len(expected)], expected)
        assert (found[row, query, len(expected) :] >= seen).all()


def test_the_earlier_of_equal_scores_is_chosen(positions):
    """No product is positive, so that all scores are zero."""
    q, weights, k = -np.ones((B, T, 1, 16)), np.ones((B, T, 1)), np.ones((B, S, 16))
    found = choose(*map(np.float32, (q, weights, k)), positions)
    np.testing.assert_array_equal(found, np.broadcast_to(np.arange(COUNT), (B, T, COUNT)))


def attend_to_all(q, k, v, positions, chosen, dtype):
    """Return attention with a mask of the chosen keys up to the position of each query.

    It computes in float64 by NumPy, or in float32 by plain XLA.
    """
    xp = np if dtype == np.float64 else jnp
    q, k, v = (x.astype(dtype) for x in (q, k, v))
    k, v = (xp.repeat(x, q.shape[2] // x.shape[1], axis=1) for x in (k, v))
    seen = (chosen[..., None] == np.arange(S)[None, None, None]).any(axis=2)
    seen &= np.arange(S)[None, None] <= positions[..., None]
    scores = xp.einsum("btnd,bnsd->btns", q, k) * dtype(SCALE)
    scores = xp.where(seen[:, :, None], scores, dtype(-np.inf))
    weights = xp.exp(scores - scores.max(-1, keepdims=True))
    return xp.einsum("btns,bnsd->btnd", weights / weights.sum(-1, keepdims=True), v)


attend_plainly = jax.jit(functools.partial(attend_to_all, dtype=np.float32))


def random_choice(positions, seed):
    """Return different keys for each query. The first of them is one that it sees."""
    chosen = np.zeros((B, T, COUNT), np.int32)
    rng = np.random.default_rng(seed)
    for place, position in np.ndenumerate(positions):
        first = rng.integers(position + 1)
        others = rng.permutation(np.delete(np.arange(S), first))[: COUNT - 1]
        chosen[place] = np.append(first, others)
    return chosen


@TOGETHER
@pytest.mark.parametrize("m", [1, 2, 4])
def test_attention_to_chosen_keys(monkeypatch, positions, together, m):
    n, d, dv = 4, 16, 8
    q, k, v = normal(0, B, T, n, d), normal(1, B, m, S, d), normal(2, B, m, S, dv)
    chosen = random_choice(positions, 3)
    allow(monkeypatch, together, B * COUNT * (m * (d + dv) + n))
    run = jax.jit(functools.partial(attend_to_chosen, scale=SCALE))
    found = run(q, k, v, positions, chosen)

    def check(chosen):
        plain = attend_plainly(q, k, v, positions, chosen)
        assert_as_accurate_as(found, plain, attend_to_all(q, k, v, positions, chosen, np.float64))

    check(chosen)
    with pytest.raises(AssertionError, match="yardstick"):
        check(random_choice(positions, 4))  # negative control


@pytest.mark.parametrize("which", ["choose", "attend"])
def test_memory_does_not_grow_with_queries_times_keys(monkeypatch, which):
    """Temporary memory is less than one number for each query and key, but not without a limit."""
    t = s = 1024
    like = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.float32)
    places = jax.ShapeDtypeStruct((1, t), jnp.int32)
    if which == "choose":
        run = functools.partial(choose_keys, count=64)
        args = like((1, t, 8, 16)), like((1, t, 8)), like((1, s, 16)), places
    else:
        run = functools.partial(attend_to_chosen, scale=SCALE)
        keys, chosen = like((1, 1, s, 32)), jax.ShapeDtypeStruct((1, t, 64), jnp.int32)
        args = like((1, t, 8, 32)), keys, keys, places, chosen

    def temporary(elements):
        monkeypatch.setattr(chosen_keys, "_ELEMENTS", elements)
        compiled = jax.jit(lambda *args: run(*args)).lower(*args).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    assert temporary(2**17) < 4 * t * s
    assert temporary(2**40) > 4 * t * s


def test_memory_of_the_backward_pass_does_not_hold_the_keys_of_all_queries(monkeypatch):
    t = s = 1024
    like = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.float32)
    places, chosen = (jax.ShapeDtypeStruct(x, jnp.int32) for x in ((1, t), (1, t, 64)))
    args = like((1, t, 8, 32)), like((1, 1, s, 32)), places, chosen

    def total(q, k, places, chosen):
        return jnp.sum(attend_to_chosen(q, k, k, places, chosen, scale=SCALE))

    monkeypatch.setattr(chosen_keys, "_ELEMENTS", 2**17)
    compiled = jax.jit(jax.grad(total, (0, 1))).lower(*args).compile()
    # Keys and values of all queries would be twice as much, without their gradients.
    assert compiled.memory_analysis().temp_size_in_bytes < t * 64 * 32 * 4
