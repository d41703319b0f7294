"""Modules sharded along `tensor`: each shard computes a part of the heads or of the columns.

The static sizes of a module are those of one shard, and its arrays are global. Inside `run_shards`
each shard sees its own rows of the first linear layers and its own columns of the last one. So it
runs the same code as a module on one device. The sum over the shards is the output of the whole
module::

  y = psum(part(x))
"""

import contextlib
import contextvars
import functools
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jaxtyping import Array, Float, Int

from jax_nvfp4_moe.ops.moves import read_rows
from jax_nvfp4_moe.ops.state_window import StateWindow
from jax_nvfp4_moe.parallel.dispatch import share_rows
from jax_nvfp4_moe.parallel.expert_mesh import TENSOR, ExpertMesh
from jax_nvfp4_moe.parallel.shard_spec import ShardLayout, axis_spec, widen_spec
from jax_nvfp4_moe.parallel.sharded_variable import (
    find_layout,
    module_axes,
    sharded_axes,
    variables,
)


def run_shards(
    expert_mesh: ExpertMesh,
    run: Callable,
    module: nnx.Module | nnx.Variable,
    *args: Any,
    specs: Any = None,
) -> Any:
    """Run ``run(part, *args)`` on each shard, and return the result.

    Args:
      expert_mesh: the mesh of the shards.
      run: function that each shard runs on its part of the module.
      module: an `nnx.Module` or `nnx.Variable` whose variables say how they are sharded.
      args: further arguments, sharded by `specs`.
      specs: pair of the specifications of `args` and of the result; None (default) if the first
        axis of all has the rows of a batch.
    """
    rows = expert_mesh.spec(expert_mesh.rows(args[0].shape[0]))
    given, returned = specs or ((rows,) * len(args), rows)
    leaves, unflatten = _open(module, expert_mesh)

    def body(leaves, *args):
        return run(unflatten(leaves), *args)

    own = [axis_spec(expert_mesh, axis) for axis in module_axes(module)]
    return expert_mesh.shard_map(body, (own, *given), returned)(leaves, *args)


def _open(module, expert_mesh):
    """Return the leaves of a module, and a function that makes a module of one shard's leaves."""
    leaves, tree = jax.tree.flatten(module)
    layouts, mesh_axis = [], expert_mesh.name(TENSOR)
    for variable in variables(module):
        layouts += [(find_layout(variable), axis) for axis in sharded_axes(variable)]

    def unflatten(leaves):
        return tree.unflatten(
            [
                _tie(leaf, layout, axis, mesh_axis)
                for leaf, (layout, axis) in zip(leaves, layouts, strict=True)
            ]
        )

    return leaves, unflatten


def _tie(leaf, layout: ShardLayout | None, axis: int | None, mesh_axis: str):
    """Return `leaf` with one common gradient for all shards that hold the same entries."""
    if layout is None or axis != 0 or not jnp.issubdtype(leaf.dtype, jnp.floating):
        return leaf
    shards = lax.axis_size(mesh_axis)
    if all(parts == shards for _, parts in layout.segments):
        return leaf
    return _tied((layout, mesh_axis), leaf)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _tied(how, leaf):
    """Return `leaf`; its derivative is `_tied_bar`."""
    return leaf


def _tied_bar(how, _, bar):
    """Add up the cotangents of all shards that hold the same entries."""
    layout, mesh_axis = how
    shards, index = lax.axis_size(mesh_axis), lax.axis_index(mesh_axis)
    everyone = lax.all_gather(bar, mesh_axis)
    summed, start = [], 0
    for width, parts in layout.segments:
        mine = jnp.arange(shards) * parts // shards == index * parts // shards
        segment = lax.slice_in_dim(everyone, start, start + width, axis=1)
        keep = jnp.expand_dims(mine, range(1, segment.ndim))
        summed.append(jnp.sum(jnp.where(keep, segment, jnp.zeros_like(segment)), axis=0))
        start += width
    return (jnp.concatenate(summed),)


_tied.defvjp(lambda how, leaf: (leaf, None), _tied_bar)


class TensorParallel(nnx.Module):
    """A module that maps rows, on one device or sharded along `tensor`.

    A subclass implements `run` with the sizes of one shard. It may also implement `finish`.

    Attributes:
      expert_mesh: the mesh of the shards, static; None (default) on one device.
    """

    expert_mesh: ExpertMesh | None = None

    def run(self, x: Float[Array, "... h"]) -> Float[Array, "... n"]:
        """Compute the part of one shard."""
        raise NotImplementedError

    def finish(self, y: Float[Array, "... n"]) -> Float[Array, "... n"]:
        """Return the result from the sum `y` of all parts. By default it is that sum."""
        return y

    def __call__(self, x: Float[Array, "... h"]) -> Float[Array, "... n"]:
        """Compute all parts of the rows `x`, add them up in float32, and finish the sum."""
        if self.expert_mesh is None:
            return self.finish(self.run(x))
        return run_shards(self.expert_mesh, _run_part, self, x)


def _run_part(part: TensorParallel, x):
    """Return the result of the whole module, from the part of one shard."""
    return part.finish(_add_up(part.run(x), part.expert_mesh))


class HeadParallel(nnx.Module):
    """An attention or another mixer, on one device or sharded by heads with their caches.

    A subclass implements `mix` and `empty_cache` with the sizes of one shard.

    Attributes:
      expert_mesh: the mesh of the shards, static; None (default) on one device.
      cache_axes: name of a cache entry -> the axis along which it is sharded among the shards; None
        for a replicated entry.
    """

    expert_mesh: ExpertMesh | None = None
    cache_axes: ClassVar[Mapping[str, int | None]]

    @property
    def states(self) -> Collection[str]:
        """The names of the cache entries that are not stored by position.

        They change with every token, so that going back to an earlier token needs a copy; see
        `ops.state_window`.
        """
        return ()

    def mix(self, *args: Any, **named: Any) -> Any:
        """Compute the part of one shard, with the arguments and results of `__call__`."""
        raise NotImplementedError

    def empty_cache(self, batch: int, max_length: int) -> Mapping[str, Array]:
        """Return the empty cache entries of one shard."""
        raise NotImplementedError

    def init_cache(self, batch: int, max_length: int) -> Mapping[str, Array]:
        """Return empty cache entries for `batch` rows of at most `max_length` tokens."""
        if self.expert_mesh is None:
            return self.empty_cache(batch, max_length)
        # The entries depend on static sizes only, so the function needs no arguments.
        role = self.expert_mesh.rows(batch)
        own = batch // self.expert_mesh.data if role else batch
        make = functools.partial(self.empty_cache, own, max_length)
        return self.expert_mesh.shard_map(make, (), self._cache_specs(role))()

    def __call__(self, x, positions, entries, *further):
        """Mix tokens at their positions.

        Args:
          x: ``[b, t, h]``.
          positions: int32 ``[b, t]``.
          entries: cache entries, or None without a cache.
          *further: further arguments of `mix`, with rows as their first axis.

        Returns:
          ``[b, t, h]``, the cache entries, and as many further results as there are `further`
          arguments.
        """
        if self.expert_mesh is None:
            return self.mix(x, positions, entries, *further)

        def run(part, x, positions, entries, *further):
            y, *others = part.mix(x, positions, entries, *further)
            return _add_up(y, self.expert_mesh), *others

        # Packed tokens are not in the rows of their positions.
        role = self.expert_mesh.rows(len(x)) if len(x) == len(positions) else None
        rows = self.expert_mesh.spec(role)
        cache = self._entry_specs(entries, role)
        others = (rows,) * len(further)
        specs = (rows, rows, cache, *others), (rows, cache, *others)
        return run_shards(self.expert_mesh, run, self, x, positions, entries, *further, specs=specs)

    def _entry_specs(self, entries, rows: str | None):
        """Return the specification of cache entries, which may be None or a `StateWindow`."""
        if entries is None:
            return None
        assert self.expert_mesh is not None
        own, of_rows = self._cache_specs(rows), self.expert_mesh.spec(rows)
        if not isinstance(entries, StateWindow):
            return own
        window: Any = StateWindow  # of specifications in place of arrays
        states = {name: widen_spec(own[name]) for name in entries.states}
        return window(states, {name: own[name] for name in entries.others}, of_rows)

    def _cache_specs(self, rows: str | None):
        """Return the specification of each cache entry, whose rows are sharded along `rows`."""
        assert self.expert_mesh is not None
        return {
            name: axis_spec(self.expert_mesh, axis, rows) for name, axis in self.cache_axes.items()
        }


def run_by_rows(
    module: Any, expert_mesh: ExpertMesh, x: Float[Array, "... h"]
) -> Float[Array, "... n"]:
    """Run a module on rows that are sharded along `data` and `expert`.

    Without this function, every device of `expert` would compute all rows of its part of `data`.

    Args:
      module: maps rows, and must not change its own state.
      expert_mesh: the mesh of the devices.
      x: rows ``[..., h]``.

    Returns:
      The result of the module ``[..., n]``, sharded like the rows of a dispatch.
    """
    sharded = isinstance(module, TensorParallel) and module.expert_mesh is not None
    leaves, unflatten = _open(module, expert_mesh)
    own = [axis_spec(expert_mesh, axis) for axis in module_axes(module)]

    def run(rows, leaves):
        part = unflatten(leaves) if sharded else jax.tree.unflatten(tree, leaves)
        return _run_part(part, rows) if sharded else part(rows)

    tree = jax.tree.structure(module)
    y = share_rows(run, expert_mesh, x.reshape(-1, x.shape[-1]), leaves, specs=(own,))
    return y.reshape(*x.shape[:-1], y.shape[1])


def look_up(
    table: nnx.Variable, ids: Int[Array, "b t"], expert_mesh: ExpertMesh
) -> Float[Array, "b t h"]:
    """Return the rows `ids` of a table ``[v, h]`` that is sharded by rows.

    The result is exact: in the sum over the shards, at most one term is not zero.
    """

    def look(table, ids):
        table = table.get_value()
        own = ids - lax.axis_index(axis) * table.shape[0]
        here = (own >= 0) & (own < table.shape[0])
        rows = read_rows(table, jnp.where(here, own, 0))
        rows = jnp.where(here[..., None], rows, jnp.zeros((), rows.dtype))
        if expert_mesh.adds_up_by_peers(rows.nbytes, TENSOR):
            return expert_mesh.add_up(rows, TENSOR)
        return lax.psum(rows, axis)

    axis = expert_mesh.name(TENSOR)
    return run_shards(expert_mesh, look, table, ids)


# Whether the logits of each shard stay apart, in `own_columns`.
_OWN_COLUMNS: contextvars.ContextVar[bool] = contextvars.ContextVar("own_columns", default=False)
# A float32 holds all integers up to this one.
EXACT_INDEX = 1 << 24


@contextlib.contextmanager
def own_columns() -> Iterator[None]:
    """Let `gather_columns` return the columns of one shard, in the program of each device."""
    token = _OWN_COLUMNS.set(True)
    try:
        yield
    finally:
        _OWN_COLUMNS.reset(token)


def find_largest(
    own: Float[Array, "... n"], expert_mesh: ExpertMesh
) -> tuple[Int[Array, "..."], Float[Array, "..."]]:
    """Return the index of the largest column of all shards, and its value in float32.

    They are those of `jnp.argmax` over the columns of all shards side by side: NaN counts as the
    largest number, and the first of equal columns is taken. Shards exchange two numbers for each
    row. Call the function in the program of each device.

    Args:
      own: the columns of this shard. All shards together have at most `EXACT_INDEX`.
      expert_mesh: the mesh of the shards.
    """
    own, shard = own.astype(jnp.float32), lax.axis_index(expert_mesh.name(TENSOR))
    index = jnp.argmax(own, axis=-1)
    value = jnp.take_along_axis(own, index[..., None], axis=-1)[..., 0]
    index += shard * own.shape[-1]
    both = jnp.stack([value, index.astype(jnp.float32)])[None]
    room = jnp.zeros((expert_mesh.tensor, *both.shape[1:]), jnp.float32)
    beside = lax.dynamic_update_slice_in_dim(room, both, shard, 0)
    values, indices = jnp.moveaxis(expert_mesh.add_up(beside, TENSOR), 1, 0)
    best = jnp.argmax(values, axis=0)[None]
    index, value = (jnp.take_along_axis(each, best, axis=0)[0] for each in (indices, values))
    return index.astype(jnp.int32), value


def gather_columns(
    run: Callable, module: Any, x: Float[Array, "... h"], expert_mesh: ExpertMesh
) -> Float[Array, "... n"]:
    """Return the columns of ``run(part, x)`` of all shards side by side; see also `own_columns`.

    Logits are the only values that are gathered in this way. If connected GPUs add up an array of
    the size of the result, the result is the sum of the columns of all shards, each beside zeros,
    which is exact.

    Args:
      run: computes the columns of one shard.
      module: a variable or a module that is sharded by rows.
      x: the rows.
      expert_mesh: the mesh of the shards.
    """

    def score(part, x):
        axis, own = expert_mesh.name(TENSOR), run(part, x)
        if _OWN_COLUMNS.get():
            return own
        columns = own.shape[-1]
        if not expert_mesh.adds_up_by_peers(own.nbytes * expert_mesh.tensor, TENSOR):
            return lax.all_gather(own, axis, axis=x.ndim - 1, tiled=True)
        zeros = jnp.zeros((*own.shape[:-1], columns * expert_mesh.tensor), own.dtype)
        first = lax.axis_index(axis) * columns
        beside = lax.dynamic_update_slice_in_dim(zeros, own, first, own.ndim - 1)
        return expert_mesh.add_up(beside, TENSOR)

    return run_shards(expert_mesh, score, module, x)


def _add_up(y, expert_mesh):
    """Add up the results of all shards along `tensor` in float32."""
    return expert_mesh.add_up(y, TENSOR)
