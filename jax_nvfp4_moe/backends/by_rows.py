"""`by_rows`: let each device run a kernel on the rows that it holds.

XLA does not know what a custom call computes. It gathers sharded operands, and every device then
computes all rows. Most ops of this package compute each row by itself, from weights that every
device holds. `by_rows` tells XLA so. The results are sharded like the rows, and no row is gathered.

A rule names the dimensions of rows; all other dimensions are replicated. For an expert layer with
tokens ``[t, h]``, weights, ids ``[t, k]`` and expert weights ``[t, k]``, the rule is::

  "t, -, t, t -> t"

It has an entry for each argument and for each result, which may be pytrees of such arrays:

| entry | meaning |
|---|---|
| names, such as `b t` | the first dimensions are rows; dimensions of one name are the same rows |
| `... _ _` | all dimensions are rows, except as many as there are underscores |
| `-` | no dimension: every device holds the whole array |
| `+` | a result that adds up all rows, such as the gradient of a bias |
"""

import functools
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from jax import lax
from jax.custom_batching import custom_vmap
from jax.experimental.custom_partitioning import (
    ArrayMapping,
    SdyShardingRule,
    custom_partitioning,
)
from jax.extend.core import jaxpr_as_fun
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec, use_abstract_mesh

from jax_nvfp4_moe.numerics.auto_axes import find_explicit_mesh, on_auto_axes
from jax_nvfp4_moe.numerics.varying import inside_shard_map

_NO_MESH = AbstractMesh((), ())
_SUM = "+"
# For each of several arrays, the names of its first dimensions. That of a sum ends with `_SUM`.
_Rows = Sequence[tuple[str, ...]]
# Name of a dimension -> the mesh axes along which it is sharded.
_Parts = Mapping[str, tuple[str, ...]]


def by_rows(run: Callable[..., Any], rule: str) -> Callable[..., Any]:
    """Return `run` as a function that devices run on the rows that they hold.

    XLA's partitioner decides how the rows are sharded, and calls back for the program of a device.
    If the rows are on Explicit axes, `on_auto_axes` runs the function, and the results have the
    types that follow from the rule. For a single device, the program is that of `run`.

    Derivatives must be defined around the function: it has none.

    Args:
      run: function of arrays, or of pytrees of arrays, that computes each row by itself. It is
        traced again with the shapes of one device, and must not close over arrays of a trace.
      rule: the dimensions that are rows; see the top of this file.

    Returns:
      A function of the same positional arguments. Under `jax.vmap`, the mapped dimension is one of
      rows too.
    """
    given, _, returned = rule.partition("->")
    entries, results = given.split(","), returned.split(",")

    def call(*operands):
        if _is_on_one_device(operands):
            return run(*operands)
        if find_explicit_mesh(operands) is not None:
            place = functools.partial(_place_results, entries, results)
            return on_auto_axes(call, place=place)(*operands)
        leaves, tree = jax.tree.flatten(operands)
        rows = _expand(entries, operands)
        if any(0 in leaf.shape[: len(names)] for names, leaf in zip(rows, leaves, strict=True)):
            return run(*operands)

        def again(*leaves):
            return run(*tree.unflatten(leaves))

        closed, shapes = jax.make_jaxpr(again, return_shape=True)(*leaves)
        own = _expand(results, shapes if isinstance(shapes, (tuple, list)) else (shapes,))
        traced = jaxpr_as_fun(closed)
        if closed.consts:  # The partitioner takes no function with constants, such as tables.
            traced, again = jax.jit(traced), jax.jit(again)
        found = _shard(traced, again, rows, own)(*leaves)
        return jax.tree.unflatten(jax.tree.structure(shapes), found)

    return call


def is_on_mesh(array: Any) -> bool:
    """Return whether an array, possibly of a trace, is known to lie on several devices.

    Inside of `jax.shard_map` an array is the part of one device.
    """
    mesh = jax.typeof(array).sharding.mesh
    return not mesh.empty and mesh.size > 1 and not mesh.are_all_axes_manual


def _is_on_one_device(operands):
    """Return whether a program on `operands` runs on one device, or on the part of one device."""
    if inside_shard_map():
        return True
    # The types of arrays do not show the argument `in_shardings` of `jax.jit`.
    return jax.device_count() == 1 and not any(map(is_on_mesh, jax.tree.leaves(operands)))


def _place_results(entries, results, operands, y):
    """Return how each array of the results `y` is sharded, from operands on Explicit axes."""
    types = [jax.typeof(leaf) for leaf in jax.tree.leaves(operands)]
    mesh = find_explicit_mesh(operands)
    specs = [(one.shape, one.sharding.spec) for one in types]
    parts = _find_parts(_expand(entries, operands), specs, mesh)
    rows = _expand(results, y if isinstance(y, tuple | list) else (y,))
    return [_spec(parts, names, len(names)) for names in rows]


def _expand(entries: Sequence[str], trees: Sequence[Any]) -> _Rows:
    """Return the names of rows for each leaf of `trees`, of which each has an entry."""
    return [
        _name_rows(entry.split(), leaf.ndim)
        for entry, tree in zip(entries, trees, strict=True)
        for leaf in jax.tree.leaves(tree)
    ]


def _name_rows(names, ndim):
    """Return the names of the dimensions of rows, for one entry of a rule."""
    if names[0] == "...":
        return tuple(f"row{axis}" for axis in range(ndim - len(names) + 1))
    return () if names == ["-"] else tuple(names)


def _shard(traced, again, rows: _Rows, results: _Rows):
    """Return a function that devices run on the rows that they hold, also under `jax.vmap`.

    Args:
      traced: function of arrays, for the whole program.
      again: function of the same arrays, to trace for one device. It may return a pytree.
      rows: the rows of the operands.
      results: the rows of the results.
    """
    mapped = custom_vmap(_partition(traced, again, rows, results))

    @mapped.def_vmap
    def _map(size, batched, *leaves):
        del size  # That of one device may be smaller.
        over = functools.partial(jax.vmap, in_axes=tuple(0 if one else None for one in batched))
        name = (f"mapped{max(map(len, rows))}",)
        inner = [name + names if one else names for one, names in zip(batched, rows, strict=True)]
        outer = [name + names for names in results]
        run = _shard(over(traced), over(again), inner, outer)
        return run(*leaves), [True] * len(outer)

    return mapped


def _partition(traced, again, rows: _Rows, results: _Rows):
    """Return a function with a rule for XLA's partitioner; the arguments are those of `_shard`."""

    def partition(mesh, operands, returned):
        parts = _find_parts(rows, _read_specs(mesh, operands), mesh)

        def run(*leaves):
            # This is a program of one device. If `jax.set_mesh` has set a mesh, JAX 0.11 would put
            # shardings on it into the program, which nothing removes.
            with use_abstract_mesh(_NO_MESH):
                return _run_part(again, results, parts, *leaves)

        shardings = _place(mesh, parts, results, returned), _place(mesh, parts, rows, operands)
        return mesh, run, list(shardings[0]), shardings[1]

    def infer(mesh, operands, returned):
        parts = _find_parts(rows, _read_specs(mesh, operands), mesh)
        return list(_place(mesh, parts, results, returned))

    def rule(mesh, operands, returned):
        del mesh
        named = _name_all("operand", rows, operands), _name_all("result", results, returned)
        whole = tuple(name for part in named for names in part for name in names if "_" in name)
        mappings = (tuple(ArrayMapping(*names) for names in part) for part in named)
        return SdyShardingRule(*mappings, need_replication_factors=whole)

    # The partitioner finds positional arguments by the signature of the function.
    sharded = custom_partitioning(lambda *leaves: list(traced(*leaves)))
    sharded.def_partition(
        partition,
        infer_sharding_from_operands=infer,
        sharding_rule=rule,
        decode_shardings=False,  # JAX fails for those that are not along whole axes of a mesh.
    )
    return sharded


def _run_part(again, results: _Rows, parts: _Parts, *leaves):
    """Run the rows of one device, and add up what is a sum over the rows of all devices."""
    y = jax.tree.leaves(again(*leaves))
    return [_add_up(one, names, parts) for one, names in zip(y, results, strict=True)]


def _add_up(y, names, parts):
    """Return the sum of `y` over all devices, if it is one over all rows."""
    axes = tuple(axis for name, axes in parts.items() if name not in names for axis in axes)
    return lax.psum(y, axes) if _SUM in names and axes else y


def _read_specs(mesh, operands):
    """Return the shape of each operand of the partitioner, and its specification on a mesh."""
    return [
        (operand.shape, _read_spec(mesh, operand.sharding, len(operand.shape)))
        for operand in operands
    ]


@functools.lru_cache(maxsize=4096)
def _read_spec(mesh, sharding, ndim) -> PartitionSpec:
    """Return the specification of a sharding along axes of a mesh.

    It is that of a replicated array if there is none: if the sharding splits an axis of the mesh
    between two dimensions, or if the program has Manual axes beside Auto ones.
    """
    names = [name for name, size in mesh.shape.items() if size > 1]
    specs = (PartitionSpec(*axes) for axes in _list_specs(names, ndim))
    fits = (one for one in specs if NamedSharding(mesh, one).is_equivalent_to(sharding, ndim))
    return next(fits, PartitionSpec())


def _list_specs(names, ndim):
    """Yield all ways in which mesh axes with these names can shard an array."""
    if not ndim:
        yield ()
        return
    for count in range(len(names) + 1):
        for own in itertools.permutations(names, count):
            for others in _list_specs([name for name in names if name not in own], ndim - 1):
                yield own, *others


def _find_parts(rows: _Rows, specs, mesh) -> _Parts:
    """Return how a mesh shards the rows.

    Rows whose shards would not be equal are gathered. XLA would fill up the last
    part, and a sum over all rows would add what it is filled with.

    Args:
      rows: the rows of the operands.
      specs: shape and specification of each operand.
      mesh: the mesh of the specifications.
    """
    parts: dict[str, tuple[str, ...]] = {}
    for names, (shape, spec) in zip(rows, specs, strict=True):
        for name, size, axes in zip(names, shape, spec, strict=False):
            axes = (axes,) if isinstance(axes, str) else tuple(axes or ())
            taken = [axis for own in parts.values() for axis in own]
            count = math.prod(mesh.shape[axis] for axis in axes)
            if count > 1 and size % count == 0 and not set(axes) & set(taken):
                parts.setdefault(name, axes)
    return parts


def _place(mesh, parts: _Parts, rows: _Rows, arrays):
    """Return the sharding of each array."""
    return tuple(
        NamedSharding(mesh, _spec(parts, names, len(array.shape)))
        for names, array in zip(rows, arrays, strict=True)
    )


def _spec(parts: _Parts, names, ndim):
    """Return the specification of an array whose first dimensions have `names`."""
    axes = [parts.get(name) for name in names if name != _SUM]
    return PartitionSpec(*axes, *(None,) * (ndim - len(axes)))


def _name_all(prefix, rows: _Rows, arrays):
    """Return a name for each dimension. One with an underscore belongs to a single array."""
    named = []
    for index, (names, array) in enumerate(zip(rows, arrays, strict=True)):
        own = [name for name in names if name != _SUM]
        rest = range(len(own), len(array.shape))
        named.append((*own, *(f"{prefix}{index}_{axis}" for axis in rest)))
    return named
