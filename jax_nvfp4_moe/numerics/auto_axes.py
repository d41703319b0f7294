"""`on_auto_axes`: run a function on a mesh with Explicit axes as on a mesh with Auto axes.

On Explicit axes, the type of an array says how it is sharded, and each operation must tell the type
of its result. Kernels cannot, and neither can operations such as sorting along a sharded dimension.
Inside of `on_auto_axes` the types say nothing, and XLA decides how each device computes its part.
"""

import contextlib
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.core import Tracer
from jax.sharding import (
    AbstractMesh,
    AxisType,
    Mesh,
    NamedSharding,
    PartitionSpec,
    get_abstract_mesh,
    reshard,
    use_abstract_mesh,
)


def on_auto_axes(
    run: Callable[..., Any],
    features: int = 1,
    place: Callable[[Sequence[Any], Any], Sequence[PartitionSpec]] | None = None,
) -> Callable[..., Any]:
    """Return `run`, for operands on any mesh.

    Args:
      run: function of arrays and pytrees of arrays, the first of which has rows. It must not close
        over arrays.
      features: number of trailing dimensions of the first array that are no rows. 1 by default.
      place: function of the operands and of the results that returns how each array of the results
        is sharded. None (default) shards dimensions of the results like those of the first array,
        as long as those are rows and their sizes are equal.

    Returns:
      A function of the same positional arguments.
    """

    @functools.wraps(run)
    def call(*operands):
        mesh = find_explicit_mesh(operands)
        if mesh is None:
            return run(*operands)
        devices = _find_devices(operands)
        if devices is not None:
            with jax.set_mesh(devices):
                return call(*operands)
        kinds = dict.fromkeys(_explicit_names(mesh), AxisType.Auto)
        inner_mesh = mesh.update_axis_types(kinds)
        inner = NamedSharding(inner_mesh, PartitionSpec())
        with use_abstract_mesh(inner_mesh):
            y = run(*jax.tree.map(lambda leaf: reshard(leaf, inner), operands))

        specs = like_first(operands, y) if place is None else place(operands, y)
        leaves, tree = jax.tree.flatten(y)
        current = get_abstract_mesh()
        with use_abstract_mesh(mesh) if current.empty else contextlib.nullcontext():
            places = [NamedSharding(mesh, spec) for spec in specs]
            return tree.unflatten(map(reshard, leaves, places))

    def like_first(operands, y):
        first = jax.typeof(jax.tree.leaves(operands)[0])
        rows = first.shape[: first.ndim - features], first.sharding.spec
        return [_rows_spec(leaf.shape, *rows) for leaf in jax.tree.leaves(y)]

    return call


def find_explicit_mesh(operands: Any) -> AbstractMesh | None:
    """Return the mesh of a call of arrays if it has Explicit axes, and None otherwise.

    It is the mesh that `jax.set_mesh` has set, or else that of the arrays.
    """
    here = get_abstract_mesh()
    if here.empty:
        meshes = [jax.typeof(leaf).sharding.mesh for leaf in jax.tree.leaves(operands)]
    else:
        meshes = [here]
    return next((mesh for mesh in meshes if _explicit_names(mesh)), None)


def _find_devices(operands) -> Mesh | None:
    """Return the mesh of the first array, if no trace and no `jax.set_mesh` says where to run."""
    leaves = jax.tree.leaves(operands)
    if not get_abstract_mesh().empty or any(isinstance(leaf, Tracer) for leaf in leaves):
        return None
    meshes = [getattr(getattr(leaf, "sharding", None), "mesh", None) for leaf in leaves]
    return next((mesh for mesh in meshes if mesh is not None and _explicit_names(mesh)), None)


def _explicit_names(mesh) -> list[str]:
    """Return the names of the Explicit axes of a mesh."""
    kinds = zip(mesh.axis_names, mesh.axis_types, strict=True)
    return [name for name, kind in kinds if kind == AxisType.Explicit]


def _rows_spec(shape, rows, spec) -> PartitionSpec:
    """Return the specification of a result from the sizes and the specification of the rows."""
    axes = []
    for size, own, axis in zip(shape, rows, spec, strict=False):
        if size != own:
            break
        axes.append(axis)
    return PartitionSpec(*axes)
