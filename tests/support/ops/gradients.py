"""Gradients with fixed cotangents: those of a kernel equal those of its reference bit by bit."""

import jax
import jax.numpy as jnp
import numpy as np


def gradients(run, *operands):
    """Return the gradient of ``sum(cotangent * result)`` over all results, for each operand.

    A cotangent that depended on the results would carry the rounding of a kernel into the gradient.
    """
    results, pull_back = jax.vjp(run, *operands)

    def cotangent(y):
        bar = np.cos(np.arange(y.size, dtype=np.float32)).reshape(y.shape)
        return jnp.asarray(bar.astype(y.dtype))

    return pull_back(jax.tree.map(cotangent, results))
