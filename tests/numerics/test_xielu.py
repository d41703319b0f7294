"""Test xIELU against its formula in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_nvfp4_moe.numerics.xielu import xielu
from jax_nvfp4_moe.testing import assert_as_accurate_as

ALPHAS = jnp.array([0.3]), jnp.array([-0.8])


def formula(x, beta, eps, kind):
    """Return xIELU as its paper writes it, computed in the dtype `kind`."""
    x, beta, eps = x.astype(kind), kind(beta), kind(eps)
    p, n = (np.log1p(np.exp(kind(alpha[0]))) for alpha in ALPHAS)
    negative = (np.expm1(np.minimum(x, eps)) - x) * (beta + n) + beta * x
    return np.where(x > 0, p * x * x + beta * x, negative)


@pytest.mark.parametrize(("beta", "eps", "given"), [(0.5, -1e-6, False), (0.25, -1.0, True)])
def test_values(beta, eps, given):
    x = np.linspace(-5, 5, 41, dtype=np.float32)
    further = (jnp.array(beta), jnp.array(eps)) if given else ()
    found = xielu(jnp.asarray(x), *ALPHAS, *further)
    truth, plain = (formula(x, beta, eps, kind) for kind in (np.float64, np.float32))
    assert_as_accurate_as(found, plain, truth)
    with pytest.raises(AssertionError):
        assert_as_accurate_as(formula(x, 1.001 * beta, eps, np.float32), plain, truth)


def test_gradients_are_finite_far_from_zero():
    x = jnp.array([-1e4, -100.0, 0.0, 100.0, 1e4])
    grads = jax.grad(lambda *operands: xielu(*operands).sum(), argnums=(0, 1, 2))(x, *ALPHAS)
    assert all(np.isfinite(grad).all() for grad in grads)


def test_half_precision_is_computed_in_float32():
    x = jnp.linspace(-3, 3, 7).astype(jnp.bfloat16)
    found = xielu(x, *ALPHAS)
    assert found.dtype == jnp.float32
    np.testing.assert_array_equal(found, xielu(x.astype(jnp.float32), *ALPHAS))
