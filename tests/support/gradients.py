"""Gradients with fixed cotangents: those of a kernel equal those of its reference bit by bit."""

import jax
import jax.numpy as jnp


def gradients(run, *operands):
    """Return the gradient of ``sum(cotangent * result)`` over all results, for each operand.

    A cotangent that depended on the results would carry the rounding of a kernel into the gradient.
    """
    results, pull_back = jax.vjp(run, *operands)

    def cotangent(y):
        return jnp.cos(jnp.arange(y.size)).reshape(y.shape).astype(y.dtype)

    return pull_back(jax.tree.map(cotangent, results))
