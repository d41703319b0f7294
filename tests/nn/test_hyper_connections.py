"""Test the mixing weights of residual streams. Checkpoints test their other weights."""

import jax
import jax.numpy as jnp
import numpy as np
from support.models.architecture import relative

from jax_nvfp4_moe.nn.hyper_connections import balance

BOUND = 1e-5


def test_mixing_weights():
    """Columns sum to 1, and rows nearly. The counts of both divisions are those of the source."""
    logits = np.asarray(jax.random.normal(jax.random.key(1), (1, 2, 3, 3))) * 2
    expected = np.exp(logits.astype(np.float64))
    expected = expected / expected.sum(axis=-1, keepdims=True) + 1e-6
    for step in range(7):  # four divisions of columns, and three of rows
        expected = expected / (expected.sum(axis=-2 if step % 2 == 0 else -1, keepdims=True) + 1e-6)
    found = balance(jnp.asarray(logits), 4, 1e-6)
    assert relative(found, expected) < BOUND
    assert np.abs(np.asarray(found).sum(axis=-2) - 1).max() < BOUND
    assert relative(balance(jnp.asarray(logits), 1, 1e-6), expected) > 1000 * BOUND
