"""Over which mesh axes values vary inside `jax.shard_map`, as its default check tracks it.

Inside `jax.shard_map`, the type of a value names the axes of the mesh along which devices may hold
different values. JAX's own operations cast their operands to a common type. Derivative rules,
kernels and the carries of loops need operands that agree already. A cast costs nothing at run time.
Its transpose adds up the cotangents of all devices, so that a weight that all devices share gets
the sum of their gradients.
"""

from typing import Any, TypeVar

import jax
from jax import lax
from jax.sharding import AxisType, get_abstract_mesh

Tree = TypeVar("Tree")


def inside_shard_map() -> bool:
    """Return whether a program of one device is traced, along one axis of the mesh at least."""
    return AxisType.Manual in get_abstract_mesh().axis_types


def varying_axes(tree: Any) -> frozenset[str]:
    """Return the mesh axes along which any array of `tree` varies; none outside `shard_map`."""
    if not inside_shard_map():
        return frozenset()  # quickly, because ops outside of `jax.jit` ask at each call
    kinds = map(jax.typeof, jax.tree.leaves(tree))
    return frozenset().union(*(kind.manual_axis_type.varying for kind in kinds))


def vary_together(tree: Tree) -> Tree:
    """Return `tree` with arrays that all vary along the axes along which any of them varies."""
    return vary_like(tree, tree)


def vary_like(tree: Tree, operands: Any) -> Tree:
    """Return `tree` with arrays that also vary along the axes of `operands`.

    Args:
      tree: arrays, such as the first carry of a loop or the result of a kernel.
      operands: arrays from which the loop or the kernel computes.
    """
    axes = varying_axes(operands)
    if not axes:
        return tree

    def cast(leaf):
        missing = tuple(sorted(axes - varying_axes(leaf)))
        return lax.pcast(leaf, missing, to="varying") if missing else leaf

    return jax.tree.map(cast, tree)
