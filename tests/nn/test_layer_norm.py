"""Test the layer norm, alone and as the norm of a residual stream."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_nvfp4_moe.nn.norm import LayerNorm, Residual
from jax_nvfp4_moe.testing import assert_as_accurate_as

EPS = 1e-3


def definition(x, weight, bias, dtype):
    """Return the definition, computed by numpy in `dtype`."""
    x, weight, bias = (np.asarray(one, dtype) for one in (x, weight, bias))
    centered = x - x.mean(axis=-1, keepdims=True, dtype=dtype)
    variance = np.square(centered).mean(axis=-1, keepdims=True, dtype=dtype)
    return centered / np.sqrt(variance + dtype(EPS)) * weight + bias


def operands(dtype):
    rng = np.random.default_rng(0)
    x = rng.normal(3, 2, (2, 5, 48))  # with a mean, which an RMS norm would keep
    weight, bias = rng.normal(1, 0.3, 48), rng.normal(0, 0.3, 48)
    return tuple(jnp.asarray(one, dtype) for one in (x, weight, bias))


def test_it_is_the_definition():
    x, weight, bias = operands(jnp.float32)
    found = np.asarray(jax.jit(LayerNorm(weight, bias, EPS))(x))
    plain, truth = (definition(x, weight, bias, kind) for kind in (np.float32, np.float64))
    assert_as_accurate_as(found, plain, truth)
    without_mean = found - np.asarray(bias) + np.asarray(x).mean()
    with pytest.raises(AssertionError, match="yardstick"):
        assert_as_accurate_as(without_mean, plain, truth)


def test_16_bits_are_rounded_once():
    x, weight, bias = operands(jnp.bfloat16)
    found = LayerNorm(weight, bias, EPS)(x)
    wide = LayerNorm(*(one.astype(jnp.float32) for one in (weight, bias)), EPS)
    np.testing.assert_array_equal(found, wide(x.astype(jnp.float32)).astype(jnp.bfloat16))


def test_a_stream_is_added_first():
    x, weight, bias = operands(jnp.float32)
    norm = LayerNorm(weight, bias, EPS)
    for added in (None, jnp.sin(x)):
        total = x if added is None else x + added
        whole, normal = norm.normalize_sum(Residual(x, added))
        np.testing.assert_array_equal(whole, total)
        np.testing.assert_array_equal(normal, norm(total))
