"""Test queries that grow with their position."""

import jax.numpy as jnp
import numpy as np

from jax_nvfp4_moe.numerics.query_growth import grow
from jax_nvfp4_moe.testing import assert_as_accurate_as


def test_each_position_has_its_factor():
    q, positions = jnp.ones((1, 4, 2, 3)), jnp.array([[0, 5, 6, 19]])
    steps = np.array([0, 0, 1, 3])  # the positions divided by 6
    truth, plain = (
        1 + kind(0.5) * np.log1p(steps.astype(kind)) for kind in (np.float64, np.float32)
    )
    found = grow(q, positions, 0.5, 6.0)
    assert_as_accurate_as(found[0, :, 1, 2], plain, truth)
    assert (np.asarray(found) == np.asarray(found[:, :, :1, :1])).all()
    assert grow(q.astype(jnp.bfloat16), positions, 0.5, 6.0).dtype == jnp.bfloat16
