"""Test xIELU against its formula in float64."""

import jax
import jax.numpy as jnp
import numpy as np

from jax_nvfp4_moe.numerics.xielu import xielu

ALPHAS = jnp.array([0.3]), jnp.array([-0.8])


def test_values():
    x = np.linspace(-5, 5, 41)
    p, n = (np.log1p(np.exp(float(alpha[0]))) for alpha in ALPHAS)
    negative = (np.expm1(np.minimum(x, -1e-6)) - x) * (0.5 + n) + 0.5 * x
    expected = np.where(x > 0, p * x * x + 0.5 * x, negative)
    np.testing.assert_allclose(xielu(jnp.asarray(x), *ALPHAS), expected, rtol=1e-5, atol=1e-6)
    found = xielu(jnp.asarray(x), *ALPHAS, jnp.array(0.25), jnp.array(-1.0))
    negative = (np.expm1(np.minimum(x, -1.0)) - x) * (0.25 + n) + 0.25 * x
    expected = np.where(x > 0, p * x * x + 0.25 * x, negative)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


def test_gradients_are_finite_far_from_zero():
    x = jnp.array([-1e4, -100.0, 0.0, 100.0, 1e4])
    grads = jax.grad(lambda *operands: xielu(*operands).sum(), argnums=(0, 1, 2))(x, *ALPHAS)
    assert all(np.isfinite(grad).all() for grad in grads)


def test_half_precision_is_computed_in_float32():
    x = jnp.linspace(-3, 3, 7).astype(jnp.bfloat16)
    found = xielu(x, *ALPHAS)
    assert found.dtype == jnp.float32
    np.testing.assert_array_equal(found, xielu(x.astype(jnp.float32), *ALPHAS))
