"""Test the inverse of unit lower triangular matrices against float64, over extreme keys too."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from jax_nvfp4_moe.numerics.triangular_inverse import invert_unit_lower

WIDTH = 32  # channels of the keys


def system(kind, count):
    """Return the strict lower part of ``K K.T`` of unit keys, for rates of 1 and no decay."""
    rng = np.random.default_rng(count)
    keys = rng.standard_normal((3, count, WIDTH))
    if kind == "equal":
        keys = np.ones_like(keys)
    if kind == "nearly equal":
        keys = 1 + 1e-3 * keys
    if kind == "opposite":
        keys = np.sign(keys[..., :1]) * np.ones_like(keys)
    if kind == "of three":
        keys = keys[:, rng.integers(0, min(3, count), count)]
    keys = keys / np.linalg.norm(keys, axis=-1, keepdims=True)
    return np.tril(keys @ np.swapaxes(keys, -1, -2), -1).astype(np.float32)


def powers(below):
    """Compute ``(I - L)(I + L^2)(I + L^4)...``, which is the inverse without rounding."""
    power, inverse = below, np.eye(below.shape[-1], dtype=np.float32) - below
    for _ in range(below.shape[-1].bit_length() - 2):
        power = power @ power
        inverse = inverse + inverse @ power
    return inverse


def error(inverse, below):
    """Return the worst error against float64, relative to the bound.

    Entries of the inverse are at most 1, and a sum has at most `count` terms.
    """
    count = below.shape[-1]
    want = np.linalg.inv(np.eye(count) + below.astype(np.float64))
    assert np.abs(want).max() < 1 + 1e-6
    return np.abs(np.asarray(inverse) - want).max() / (count * 2.0**-24)


@pytest.mark.parametrize("kind", ["random", "equal", "nearly equal", "opposite", "of three"])
@pytest.mark.parametrize("count", [1, 2, 16, 64, 128])
def test_the_inverse_is_exact_for_any_keys(kind, count):
    below = system(kind, count)
    inverse = jax.jit(invert_unit_lower)(below)
    assert error(inverse, below) <= 1
    solved = lax.linalg.triangular_solve(
        jnp.asarray(below),
        jnp.broadcast_to(jnp.eye(count), below.shape),
        left_side=True,
        lower=True,
        unit_diagonal=True,
    )
    assert error(solved, below) <= 1


@pytest.mark.parametrize("kind", ["equal", "nearly equal", "opposite", "of three"])
def test_the_bound_catches_the_product_of_powers(kind):
    below = system(kind, 64)
    assert error(powers(below), below) > 1e3


def test_the_bound_catches_one_wrong_entry():
    below = system("random", 64)
    wrong = below.copy()
    wrong[:, 40, 7] += 1e-5
    assert error(invert_unit_lower(wrong), below) > 1
