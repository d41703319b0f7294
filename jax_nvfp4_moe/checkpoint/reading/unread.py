"""An array of a checkpoint that is not read yet.

What the headers tell about a weight is the value that a model gets, such as an `NVFP4Tensor`, with
an `Unread` in place of each array. Its shapes are known before anything is read, and
``jax.tree.map(reader.open, value)`` reads it.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

Shape = tuple[int, ...]
Index = tuple[int | slice, ...]
# Takes a part of an array, and returns what is wrong with any of its values.
Check = Callable[[np.ndarray], str | None]


class Piece(NamedTuple):
    """A stored tensor, or a part of it, and its place: ``array[at] = tensor[part]``, broadcast.

    Attributes:
      name: the name of the tensor.
      at: the index into the array.
      shape: the shape to which the tensor is reshaped first. None keeps its own shape.
      part: the index into the tensor. An empty index takes the whole tensor.
      swapped: whether the last two axes of the part are exchanged.
    """

    name: str
    at: Index = ()
    shape: Shape | None = None
    part: Index = ()
    swapped: bool = False


@dataclasses.dataclass(frozen=True, eq=False)
class Unread:
    """An array that is not read yet.

    Attributes:
      shape: the shape of the array.
      dtype: the dtype of the array. Pieces that are stored in another dtype are converted.
      pieces: the tensors that fill the array. In a float32 array, elements without a piece are NaN.
      check: takes a part of the array that one piece fills, and returns what is wrong with it, or
        None. It looks at each value by itself, so that several pieces can be checked at once.
        Without a function, nothing is checked.
      decode: for an array that is computed from others: takes a `reader.Reader`, and returns a
        `LazyArray`, a numpy array, or None if the file has no usable values. It takes the place of
        `pieces` and `check`.
    """

    shape: Shape
    dtype: np.dtype
    pieces: list[Piece] = dataclasses.field(default_factory=list)
    check: Check | None = None
    decode: Callable[[Any], Any] | None = None

    @property
    def ndim(self) -> int:
        """The number of axes."""
        return len(self.shape)

    @property
    def size(self) -> int:
        """The number of elements."""
        return math.prod(self.shape)
