"""Test queries that grow with their position."""

import math

import jax.numpy as jnp
import numpy as np

from jax_nvfp4_moe.numerics.query_growth import grow


def test_each_position_has_its_factor():
    q, positions = jnp.ones((1, 4, 2, 3)), jnp.array([[0, 5, 6, 19]])
    expected = [1, 1, 1 + 0.5 * math.log(2), 1 + 0.5 * math.log(4)]
    found = grow(q, positions, 0.5, 6.0)
    np.testing.assert_allclose(found[0, :, 1, 2], expected, rtol=1e-6)
    assert (np.asarray(found) == np.asarray(found[:, :, :1, :1])).all()
    assert grow(q.astype(jnp.bfloat16), positions, 0.5, 6.0).dtype == jnp.bfloat16
