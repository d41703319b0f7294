"""Which stored matrices make up one weight: those of experts, or the one of a linear.

`expert_products` is the only walk over the experts of a layer and their projections. A format takes
its tensors from the projections of a `Product`, and needs to know nothing of experts.
"""

from collections.abc import Sequence
from typing import NamedTuple

from jax_nvfp4_moe.checkpoint.names import PROJECTIONS
from jax_nvfp4_moe.checkpoint.reading.unread import Index, Piece, Shape
from jax_nvfp4_moe.checkpoint.weights.finder import Finder
from jax_nvfp4_moe.checkpoint.weights.requests import ExpertSizes


class Projection(NamedTuple):
    """One stored matrix ``[n, k]``, or a stack ``[e, n, k]`` of those of all experts.

    Attributes:
      stem: the module of the matrix, or the name of the stack.
      n: the number of rows.
      k: the number of columns.
      at: the place of the matrix in the arrays of its product.
      part: the index among the projections of a product: 1 for the up projection after a gate.
      experts: e of a stack; None for one matrix.
      alternate: the number of gate rows if the gate and up rows of a stack alternate, else None.
      inputs_first: whether a stack without block scales is ``[e, k, n]``. None decides by its
        shape.
    """

    stem: str
    n: int
    k: int
    at: Index = ()
    part: int = 0
    experts: int | None = None
    alternate: int | None = None
    inputs_first: bool | None = None

    @property
    def lead(self) -> Shape:
        """The axes before the rows: of all experts, or none."""
        return () if self.experts is None else (self.experts,)

    def names(self, finder: Finder, leaf: str) -> tuple[str, str]:
        """Return the name of the tensor of weights, and the text before the names of its scales.

        Args:
          finder: looks tensors up.
          leaf: the name of the weights of one matrix, such as "weight".
        """
        if self.experts is None:
            return f"{self.stem}.{leaf}", f"{self.stem}."
        return packed_name(finder, self.stem)

    def pieces(self, name: str, swapped: bool = False) -> list[Piece]:
        """Return how the tensor `name` fills the array of the product.

        Gate rows come before up rows, and outputs before inputs.

        Args:
          name: the name of a tensor ``[n, ...]`` or ``[e, n, ...]``.
          swapped: whether a stack is ``[e, ..., n]``.
        """
        if self.experts is None:
            return [Piece(name, self.at)]
        every = slice(None)
        rows = [(every, every)]
        if self.alternate is not None:
            halves = slice(0, self.alternate), slice(self.alternate, 2 * self.alternate)
            rows = [(half, slice(first, None, 2)) for first, half in enumerate(halves)]
        elif not swapped:
            return [Piece(name)]
        if not swapped:
            return [Piece(name, (every, at), part=(every, part)) for at, part in rows]
        return [
            Piece(name, (x, at), part=(x, every, part), swapped=True)
            for x in range(self.experts)
            for at, part in rows
        ]


class Product(NamedTuple):
    """The weight ``[..., n, k]`` of one matrix product: of a linear, or of all experts of a layer.

    Attributes:
      label: the module of the weight, for messages.
      lead: ``()`` for a linear, ``(e,)`` for e experts.
      n: the number of rows.
      k: the number of columns.
      parts: the number of projections in the rows: 2 for gate and up, else 1.
      projections: the stored matrices. None of them if the file has none that can be read.
    """

    label: str
    lead: Shape
    n: int
    k: int
    parts: int
    projections: Sequence[Projection]

    def shape(self, *columns: int) -> Shape:
        """Return the shape of an array with these columns for each row."""
        return (*self.lead, self.n, *columns)


def linear_product(prefix: str, n: int, k: int) -> Product:
    """Return the product of the linear `prefix`."""
    return Product(prefix, (), n, k, 1, (Projection(prefix, n, k),))


def expert_products(finder: Finder, prefix: str, sizes: ExpertSizes) -> tuple[Product, Product]:
    """Return the two products of the experts of a layer: gate and up, and down.

    Args:
      finder: looks tensors up.
      prefix: the module of the experts.
      sizes: their sizes.
    """
    e, h, i = sizes.num_experts, sizes.hidden, sizes.intermediate
    rows, (*names, last) = sizes.parts * i, sizes.projections
    if is_stacked(finder, prefix, e):
        alternate = i if sizes.interleaved and sizes.gated else None
        first, inputs_first = first_projection(prefix, sizes), sizes.inputs_first
        ups = [Projection(first, rows, h, (), 0, e, alternate, inputs_first)]
        downs = [Projection(f"{prefix}.{last}", h, i, (), 0, e, None, inputs_first)]
    else:
        ups = [
            Projection(f"{prefix}.{x}.{name}", i, h, (x, slice(part * i, (part + 1) * i)), part)
            for x in range(e)
            for part, name in enumerate(names)
        ]
        downs = [Projection(f"{prefix}.{x}.{last}", h, i, (x,)) for x in range(e)]
    return (
        Product(f"{prefix} gate and up", (e,), rows, h, sizes.parts, ups),
        Product(f"{prefix} down", (e,), h, i, 1, downs),
    )


def is_stacked(finder: Finder, prefix: str, num_experts: int) -> bool:
    """Return whether one tensor holds a projection of all experts.

    A file without any experts counts as one that stores them one by one.
    """

    def used(stem):
        return next(finder.tensors.under(stem), None) is not None

    down = PROJECTIONS[-1]
    each = any(used(f"{prefix}.{expert}.{down}.") for expert in range(num_experts))
    return not each and used(f"{prefix}.{down}")


def first_projection(prefix: str, sizes: ExpertSizes) -> str:
    """Return the name of the first product's tensor in a file that stacks experts."""
    return f"{prefix}.gate_up_proj" if sizes.gated else f"{prefix}.up_proj"


def packed_name(finder: Finder, stem: str) -> tuple[str, str]:
    """Find the tensor that holds the weights of one projection of all experts.

    Returns:
      The name of the tensor, and the text before the names of its scales.
    """
    packed = finder.names.packed
    for name in (stem, f"{stem}.{packed}", f"{stem}_{packed}", f"{stem}.weight"):
        if name in finder.tensors:
            return name, stem + (name.removeprefix(stem)[:1] or "_")
    return stem, f"{stem}_"
