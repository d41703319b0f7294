"""Checks of arguments that ops share. Each raises a ValueError that names the argument."""

from collections.abc import Mapping

import jax.numpy as jnp
from jaxtyping import Array, DTypeLike

from jax_nvfp4_moe.backends.record import FLOATS

_WORDS = "bfloat16, float16 or float32"


def check_floats(**arrays: Array):
    """Check that arrays have dtypes that all ops take."""
    for name, array in arrays.items():
        if array.dtype.name not in FLOATS:
            got = f"{array.dtype.name} {array.shape}"
            raise ValueError(f"{name}: expected {_WORDS}, got {got}")


def check_axes(name: str, array: Array, axes: str):
    """Check that an array has such a dtype, and the axes whose names stand in `axes`."""
    if array.dtype.name not in FLOATS or array.ndim != len(axes.split(",")):
        raise ValueError(
            f"{name}: expected {_WORDS} [{axes}], got {array.dtype.name} {array.shape}"
        )


def check_integers(name: str, array: Array, *shapes: tuple[int, ...]):
    """Check that an array holds integers, and has one of `shapes`."""
    if array.shape not in shapes or array.dtype.kind not in "iu":
        raise ValueError(
            f"{name}: expected integers {shapes[0]}, got {array.dtype.name} {array.shape}"
        )


def check_shapes(expected: Mapping[str, tuple[Array | None, tuple[int, ...]]]):
    """Check that arrays have their shapes.

    Args:
      expected: name -> the array, or None for one that is not given, and its shape.
    """
    for name, (array, shape) in expected.items():
        if array is not None and array.shape != shape:
            raise ValueError(f"{name}: expected shape {shape}, got {array.shape}")


def check_recurrence(expected: Mapping[str, tuple[Array, tuple[int, ...]]]):
    """Check that arrays have their shapes, and float dtypes."""
    check_shapes(expected)
    for name, (array, _) in expected.items():
        if not jnp.issubdtype(array.dtype, jnp.floating):
            raise ValueError(f"{name}: expected a float dtype, got {array.dtype.name}")


def read_lengths(lengths: Array | None, rows: int) -> Array | None:
    """Return `lengths` as int32 ``[rows]``, or None."""
    if lengths is None:
        return None
    check_integers("lengths", lengths, (rows,))
    return lengths.astype(jnp.int32)


def read_result_dtype(dtype: DTypeLike) -> str:
    """Return the name of the dtype of results, if it is one that all ops take."""
    name = jnp.dtype(dtype).name
    if name not in FLOATS:
        raise ValueError(f"dtype: expected {_WORDS}, got {name}")
    return name
