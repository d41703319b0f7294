"""Test positions in all integer dtypes and below 0, and the order of attention's operands."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_nvfp4_moe import ops
from jax_nvfp4_moe.ops.positions import PADDING

SIGNED = ("int8", "int16", "int32", "int64")
UNSIGNED = ("uint8", "uint16", "uint32", "uint64")
DTYPES = ("float32", "bfloat16", "float16")


def operands(dtype, s=8, t=4):
    """Return 2 rows of t queries with 4 heads, and s keys and values with 2 heads."""
    keys = jax.random.split(jax.random.key(0), 3)
    shapes = ((2, t, 4, 16), (2, 2, s, 16), (2, 2, s, 16))
    return [jax.random.normal(key, shape, dtype) for key, shape in zip(keys, shapes, strict=True)]


def attend(*args, **options):
    return np.asarray(ops.attention(*args, **options), np.float32)


@pytest.mark.parametrize("backend", [None, "reference"])
@pytest.mark.parametrize("kind", SIGNED + UNSIGNED)
def test_all_integer_dtypes_mean_the_same(kind, backend):
    positions = np.array([[0, 1, 2, 7], [3, 4, 5, 6]])
    q, k, v = operands("bfloat16")
    expected = attend(q, k, v, positions.astype(np.int32), backend=backend)
    found = attend(q, k, v, positions.astype(kind), backend=backend)
    np.testing.assert_array_equal(found, expected)


SINKS = np.array([1, -1, 0, 2], np.float32)
# dtype, number of keys (one block of them, or several), backend and options of each case.
CASES = {
    "float32": ("float32", 8, None, {}),
    "bfloat16": ("bfloat16", 8, None, {}),
    "float16": ("float16", 8, None, {}),
    "blocks": ("float32", 1100, None, {"sinks": SINKS}),
    "blocks in bfloat16": ("bfloat16", 1100, None, {"chunk": 4}),
    "window": ("bfloat16", 8, None, {"window": 3, "sinks": SINKS}),
    "reference": ("float32", 8, "reference", {"sinks": SINKS}),
    "reference in bfloat16": ("bfloat16", 1100, "reference", {"window": 3}),
}


@pytest.mark.parametrize(("dtype", "s", "backend", "options"), CASES.values(), ids=CASES)
def test_a_query_below_position_0_gives_zeros(dtype, s, backend, options):
    q, k, v = operands(dtype, s)
    options = options | {"backend": backend}
    expected = attend(q, k, v, np.array([[0, 1, 4, 5], [0, 1, 2, 3]], np.int32), **options)
    for kind in SIGNED:
        positions = np.array([[-7, -1, 4, 5], [0, 1, -100, 3]]).astype(kind)
        found = attend(q, k, v, positions, **options)
        negative = positions < 0
        assert (found[negative] == 0).all()
        np.testing.assert_array_equal(found[~negative], expected[~negative])


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_values_may_be_parts_of_the_keys(dtype):
    q, k, _ = operands(dtype)
    positions = np.array([[-7, -1, 4, 5], [0, 1, -100, 3]], np.int32)
    found = attend(q, k, None, positions, value_width=12)
    assert (found[positions < 0] == 0).all()
    assert (found[positions >= 0] != 0).all()


@pytest.mark.parametrize("kind", ["int64", "uint64", "uint32"])
def test_positions_beyond_int32_do_not_wrap_around(kind):
    """``2**32`` as int32 would be position 0, and 2**31 would be below 0."""
    q, k, v = operands("float32")
    padding = 2**31 if kind == "uint32" else 2**32
    positions = np.array([[padding, padding + 1, 4, 5], [0, 1, 2, 3]]).astype(kind)
    known = np.array([[PADDING, PADDING, 4, 5], [0, 1, 2, 3]], np.int32)
    np.testing.assert_array_equal(attend(q, k, v, positions), attend(q, k, v, known))
    if kind == "int64":
        found = attend(q, k, v, np.array([[-(2**32), -(2**40), 4, 5], [0, 1, 2, 3]]))
        assert (found[0, :2] == 0).all()


def test_gradients_of_queries_below_position_0_are_zeros():
    q, k, v = operands("float32")
    positions = np.array([[-7, -1, 4, 5], [0, 1, 2, 3]], np.int32)
    gradient = jax.grad(lambda q: ops.attention(q, k, v, positions).sum())(q)
    assert (gradient[0, :2] == 0).all()
    assert (gradient[0, 2:] != 0).any()


@pytest.mark.parametrize("backend", [None, "reference"])
def test_tokens_below_position_0_are_not_written(backend):
    """JAX takes a negative index of a scatter for one that counts from the end."""
    cache, positions = jnp.zeros((1, 2, 6, 4)), jnp.array([[-1, 2, 6]])
    qkv = jnp.ones((1, 3, 8 * 4))
    _, keys, values = ops.prepare_heads(qkv, positions, cache, cache, backend=backend)
    for written in (keys, values):
        assert sorted(set(np.nonzero(np.asarray(written))[2])) == [2]
    down, latents = jnp.ones((1, 3, 28)), jnp.zeros((1, 1, 6, 12))
    weights = {"kv_weight": jnp.ones(8), "q_weight": jnp.ones(16)}
    written = ops.prepare_latents(down, positions, latents, **weights, backend=backend)[-1]
    assert sorted(set(np.nonzero(np.asarray(written))[2])) == [2]


def test_keys_in_the_order_of_queries_are_refused():
    q, k, v = operands("float32", s=4)
    positions = np.arange(4)[None]
    with pytest.raises(ValueError, match=r"k: expected \[b, m, s, d\].*pass k\.swapaxes\(1, 2\)"):
        jax.jit(ops.attention)(q, k.swapaxes(1, 2), v.swapaxes(1, 2), positions)
    attend(q, k, v, positions)


def test_a_cache_in_the_order_of_queries_is_refused():
    """One new token at position 3: the cache would have 2 keys of 4 heads."""
    q, k, v = operands("float32", s=4, t=1)
    for position in (np.array([[3]]), jnp.array([[3]])):
        with pytest.raises(ValueError, match=r"positions: .*below 2.*got 3.*k\.swapaxes\(1, 2\)"):
            ops.attention(q, k.swapaxes(1, 2), v.swapaxes(1, 2), position)
    attend(q, k, v, np.array([[3]]))
