"""Padding behind the tokens of rows, for the recurrences over prompts in jnp."""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int32


def find_present(lengths: Int32[Array, " b"], t: int) -> Bool[Array, "b t"]:
    """Return which of t tokens of each row are no padding."""
    return jnp.arange(t, dtype=jnp.int32)[None] < lengths[:, None]


def count_present(present: Bool[Array, "b t"]) -> Int32[Array, " b"] | None:
    """Return the lengths of the rows, or None for a single row.

    A single row has little padding. To count its tokens would take a kernel in each layer.
    """
    return None if present.shape[0] == 1 else jnp.sum(present, axis=1, dtype=jnp.int32)


def keep_present(
    values: Float[Array, "b t ..."], present: Bool[Array, "b t"]
) -> Float[Array, "b t ..."]:
    """Return `values` with zeros for tokens that are not `present`."""
    return jnp.where(present.reshape(*present.shape, *(1,) * (values.ndim - 2)), values, 0)
