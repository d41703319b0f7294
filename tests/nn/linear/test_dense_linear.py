"""Test DenseLinear: its sums are float32."""

import jax.numpy as jnp
import numpy as np
import pytest

from jax_nvfp4_moe.nn.linear.dense_linear import DenseLinear


def test_a_dense_linear_sums_in_float32():
    """The sum of 1 and 511 times 2^-7 loses terms if it is kept in bfloat16."""
    x, weight = np.ones((1, 512), jnp.bfloat16), np.full((1, 512), 2.0**-7, np.float32)
    weight[0, 0] = 1.0
    y = DenseLinear(*map(jnp.asarray, (weight, np.float32([-4.0]))))(x)
    assert float(y[0, 0]) == pytest.approx(1 + 511 / 128 - 4, rel=2.0**-8)
