"""Random weights of modules that are made without weights."""

import math

import jax
import jax.numpy as jnp

from jax_nvfp4_moe.numerics.tensor import quantize


def check_rngs(rngs, **weights):
    """Check that `rngs` is present if any weight has to be drawn at random.

    Args:
      rngs: `nnx.Rngs`, or None.
      **weights: name -> weight that the caller passed, or None.

    Raises:
      TypeError: `rngs` is something else.
      ValueError: `rngs` and at least one weight are None; names all missing weights.
    """
    if rngs is not None and not hasattr(rngs, "params"):
        raise TypeError(
            f"rngs: expected an nnx.Rngs, such as nnx.Rngs(0); got {type(rngs).__name__}"
        )
    missing = [name for name, value in weights.items() if value is None]
    if missing and rngs is None:
        raise ValueError(
            "rngs: expected an nnx.Rngs to draw random weights from, or the weights themselves: "
            f"{', '.join(missing)}; got None"
        )


def random_matrix(shape, rngs):
    """Return float32 normal values of variance ``1 / k``, where k is the last entry of `shape`."""
    return jax.random.normal(rngs.params(), shape, jnp.float32) / math.sqrt(shape[-1])


def random_tensor(shape, rngs):
    """Return the values of `random_matrix` as an `NVFP4Tensor`."""
    return quantize(random_matrix(shape, rngs))
