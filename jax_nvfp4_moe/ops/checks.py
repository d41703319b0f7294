"""Checks of the arguments that the recurrences over prompts have in common."""

from collections.abc import Mapping

import jax.numpy as jnp
from jaxtyping import Array, DTypeLike

_RESULTS = ("bfloat16", "float16", "float32")


def expect_floats(expected: Mapping[str, tuple[Array, tuple[int, ...]]]):
    """Raise a ValueError that names the first array without its shape or without a float dtype.

    Args:
      expected: name -> the array and its shape.
    """
    for name, (array, shape) in expected.items():
        if array.shape != shape:
            raise ValueError(f"{name}: expected shape {shape}, got {array.shape}")
        if not jnp.issubdtype(array.dtype, jnp.floating):
            raise ValueError(f"{name}: expected a float dtype, got {array.dtype.name}")


def read_lengths(lengths: Array | None, rows: int) -> Array | None:
    """Return `lengths` as int32 ``[rows]``, or None; raise a ValueError if they are neither."""
    if lengths is None:
        return None
    if lengths.shape != (rows,) or lengths.dtype.kind not in "iu":
        raise ValueError(
            f"lengths: expected integers {(rows,)}, got {lengths.dtype.name} {lengths.shape}"
        )
    return lengths.astype(jnp.int32)


def read_result_dtype(dtype: DTypeLike) -> str:
    """Return the name of the dtype of results; raise a ValueError if it is not one of those."""
    name = jnp.dtype(dtype).name
    if name not in _RESULTS:
        raise ValueError(f"dtype: expected bfloat16, float16 or float32, got {name}")
    return name
