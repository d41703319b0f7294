"""Test casts that every program has: their values and their gradients."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_nvfp4_moe.numerics.casts import cast, compute

HALVES = [jnp.bfloat16, jnp.float16]
X, Y = np.random.default_rng(0).standard_normal((2, 4096), np.float32)


@pytest.mark.parametrize("dtype", [*HALVES, jnp.float32])
@pytest.mark.parametrize("kind", [jnp.float32, jnp.int32, *HALVES])
def test_a_cast_is_astype(kind, dtype):
    x = jnp.asarray(100 * X).astype(kind)
    found = jax.jit(cast, static_argnums=1)(x, dtype)
    assert found.dtype == dtype
    np.testing.assert_array_equal(found, x.astype(dtype))


@pytest.mark.parametrize("dtype", HALVES)
def test_special_numbers_stay(dtype):
    info = jnp.finfo(dtype)
    edges = [0, -0.0, np.inf, -np.inf, np.nan, info.max, -info.max, info.tiny]
    small = [float(info.smallest_subnormal), -3 * float(info.smallest_subnormal)]
    x = np.array([*edges, *(small if dtype == jnp.float16 else [])], np.float32)
    np.testing.assert_array_equal(cast(jnp.asarray(x), dtype).astype(jnp.float32), x)
    ties = np.array([1 + 2.0**-8, 1 + 3 * 2.0**-8, 1 + 2.0**-11, 1e30], np.float32)
    expected = jnp.asarray(ties).astype(dtype)
    np.testing.assert_array_equal(cast(jnp.asarray(ties), dtype), expected)


@pytest.mark.parametrize("dtype", [*HALVES, jnp.float32])
@pytest.mark.parametrize("operation", [jnp.add, jnp.multiply])
def test_sums_and_products_have_the_bits_of_the_dtype(operation, dtype):
    x, y = (jnp.asarray(values).astype(dtype) for values in (X, Y))
    for other in (y, 0.3):
        found = jax.jit(lambda x, other: compute(operation, x, other))(x, other)
        assert found.dtype == dtype
        np.testing.assert_array_equal(found, operation(x, other))


@pytest.mark.parametrize("dtype", HALVES)
def test_gradients_are_those_of_astype(dtype):
    def loss(round_, x):
        return jnp.sum(round_(x).astype(jnp.float32) * Y)

    found, expected = (
        jax.grad(loss, argnums=1)(round_, jnp.asarray(X))
        for round_ in (lambda x: cast(x, dtype), lambda x: x.astype(dtype))
    )
    np.testing.assert_array_equal(found, expected)
