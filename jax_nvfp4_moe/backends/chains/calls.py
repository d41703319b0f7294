"""What a chain consists of: values, and the FFI calls that read and write them."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax.numpy as jnp


@dataclasses.dataclass(eq=False)
class Value:
    """An array that exists, or that a call will write. Two values are equal if they are identical.

    Attributes:
      shape: its shape.
      dtype: its dtype.
      array: the array; None until it exists.
    """

    shape: tuple[int, ...]
    dtype: Any
    array: Any = None

    @property
    def nbytes(self) -> int:
        """Return the size in bytes."""
        return math.prod(self.shape) * jnp.dtype(self.dtype).itemsize


@dataclasses.dataclass(frozen=True)
class Call:
    """An FFI call of a chain.

    Attributes:
      target: name of the FFI target.
      attributes: its attributes.
      operands: its operands, each with the shape in which the call reads it.
      results: its results.
      aliases: index of an operand -> index of the result that takes its memory.
    """

    target: str
    attributes: Mapping[str, Any]
    operands: Sequence[tuple[Value, tuple[int, ...]]]
    results: Sequence[Value]
    aliases: Mapping[int, int]
