"""Test that kernels have the derivative of their reference."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.ops.gradients import gradients

from jax_nvfp4_moe.ops.derivative import with_derivative_of

X, Y = np.float32([0.5, -2.0, 3.0]), np.float32([1.5, 0.25, -1.0])


def product(x, y, *, scale, added):
    """Return a function of two arrays, one by name, and of an operand that may be None."""
    return scale * x * jnp.sin(y) if added is None else scale * x * jnp.sin(y) + added


def kernel(x, y, *, scale, added):
    """Return what `product` does, 1 % off, by a call that has no derivative."""
    shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
    values = (x, y) if added is None else (x, y, added)
    off = scale * np.float32(1.01)

    def run(x, y, added=0.0):
        return np.asarray(off * np.asarray(x) * np.sin(y) + added, np.float32)

    return jax.pure_callback(run, shape, *values)


@pytest.mark.parametrize("added", [None, np.float32([1.0, 2.0, 4.0])])
def test_values_are_those_of_the_kernel_and_gradients_those_of_the_reference(added):
    def plain(x, y):
        return product(x, y, scale=3.0, added=added)

    def run(x, y):
        return with_derivative_of(product, kernel, scale=3.0)(x, y, added=added)

    np.testing.assert_array_equal(run(X, Y), kernel(X, Y, scale=3.0, added=added))
    assert (np.asarray(run(X, Y)) != np.asarray(plain(X, Y))).all()
    for got, expected in zip(gradients(run, X, Y), gradients(plain, X, Y), strict=True):
        np.testing.assert_array_equal(got, expected)
        assert np.abs(expected).min() > 0
    with pytest.raises(ValueError, match="Pure callbacks do not support JVP"):
        gradients(lambda x, y: kernel(x, y, scale=3.0, added=added), X, Y)


def test_the_reference_stays_as_it_is():
    """Without a kernel, XLA sees plain operations, which it differentiates and fuses."""
    run = with_derivative_of(product, product, scale=3.0)
    jaxpr = jax.make_jaxpr(lambda x, y: run(x, y, added=None))(X, Y)
    assert "custom_jvp" not in str(jaxpr)
