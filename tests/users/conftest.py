"""Run user programs with the settings of JAX that users have."""

import jax
import pytest


@pytest.fixture(autouse=True, scope="module")
def default_promotion():
    """Undo the strict promotion of the other tests: optax and Flax mix dtypes."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield
