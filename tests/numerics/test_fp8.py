"""Test FP8 numbers: rounding as the tools round, and scales of rows."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from jax_nvfp4_moe.numerics.fp8 import dynamic_scale, fake_round_fp8, round_fp8

F8 = ml_dtypes.float8_e4m3fn


def draw(seed, *shape, scale=1.0):
    return np.random.default_rng(seed).standard_normal(shape, np.float32) * np.float32(scale)


@pytest.mark.parametrize("multiply_by_reciprocal", [False, True])
def test_rounding_is_that_of_the_tools_to_the_bit(multiply_by_reciprocal):
    x, scale = draw(0, 4096, scale=3), np.float32(0.013)
    factor = np.float32(448) / (scale * np.float32(448))
    scaled = x * factor if multiply_by_reciprocal else x / scale
    expected = np.clip(scaled, -448, 448).astype(F8)
    found = jax.jit(lambda x: round_fp8(x, scale, multiply_by_reciprocal=multiply_by_reciprocal))(x)
    np.testing.assert_array_equal(np.asarray(found).view(np.uint8), expected.view(np.uint8))


def test_ties_go_to_even_and_large_values_saturate():
    x = jnp.array([17.0, 19.0, -17.0, 448.0, 1e9, -1e9, 0.0])
    found = np.asarray(round_fp8(x, 1.0, multiply_by_reciprocal=False), np.float32)
    np.testing.assert_array_equal(found, [16, 20, -16, 448, 448, -448, 0])


def test_what_is_not_finite_stays_visible():
    x = jnp.array([np.inf, -np.inf, np.nan, 1.0])
    found = np.asarray(fake_round_fp8(x, 1.0, multiply_by_reciprocal=True))
    assert np.isnan(found[:3]).all()
    assert found[3] == 1


def test_dynamic_scales():
    x = np.stack([draw(1, 64), np.zeros(64, np.float32)])
    scale = np.asarray(dynamic_scale(jnp.asarray(x), -1))
    assert scale.shape == (2, 1)
    assert scale[0, 0] == np.abs(x[0]).max() / np.float32(448)
    assert scale[1, 0] == 1
