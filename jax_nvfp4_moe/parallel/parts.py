"""Modules cut along `tensor`: each shard has an ordinary module of a part of the heads or columns.

A part is the module that one device would run, made with a share of the rows of its first linears
and of the columns of its last, so that the outputs of all parts add up to that of the whole::

  y = psum(part(x))

Its arrays have an axis more in front, ``[tensor, ...]``, which is cut. A part reads its own rows
and columns of the checkpoint and no others.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax
from jaxtyping import Array, Float, Int

from jax_nvfp4_moe.checkpoint.resolve import CacheScales, LinearWeights
from jax_nvfp4_moe.numerics.fp8 import FP8Tensor
from jax_nvfp4_moe.numerics.tensor import NVFP4Tensor
from jax_nvfp4_moe.parallel.dispatch import share_rows
from jax_nvfp4_moe.parallel.expert_mesh import TENSOR, ExpertMesh


class Split(NamedTuple):
    """How one linear or array is cut.

    Attributes:
      axis: its rows (outputs) or its columns (inputs).
      parts: into how many; fewer than shards where some of them hold the same part.
      segments: proportions of what stands side by side along the axis, such as queries, keys and
        values; each of them is cut into parts.
    """

    axis: Literal["rows", "columns"]
    parts: int
    segments: tuple[int, ...] = (1,)

    def ranges(self, width: int, index: int) -> list[slice]:
        """Return what the part `index` has of an axis of `width`, one range of each segment."""
        ranges, start, total = [], 0, sum(self.segments)
        for segment in self.segments:
            own = segment * width // (total * self.parts)
            ranges.append(slice(start + index * own, start + (index + 1) * own))
            start += own * self.parts
        return ranges


class PartWeights:
    """Answers as a `Weights` for the module of one shard, which asks for the sizes of its part."""

    def __init__(
        self, weights, splits: Mapping[str, Split], expert_mesh: ExpertMesh, index: int, device: Any
    ):
        """Make the source of one shard.

        Args:
          weights: the source of `checkpoint.resolve`.
          splits: how a module's or an array's name ends, such as "q_proj", or "conv1d" for
            "conv1d.weight" -> how it is cut; the rest is whole.
          expert_mesh: of all shards.
          index: of this one along `tensor`.
          device: that takes the arrays.
        """
        self._weights, self._splits = weights, splits
        self._shards, self._index, self._device = expert_mesh.tensor, index, device

    def has_under(self, prefix: str) -> bool:
        """As `Weights.has_under`."""
        return self._weights.has_under(prefix)

    def linear(self, prefix: str, n: int, k: int, *, bias: bool | None = False, dtype=None):
        """As `Weights.linear`; n and k are those of the part."""
        split = self._split(prefix)

        def place(name, value, checkpoint_scheme):
            return self._put(self._cut_linear(value, split))

        if split is not None and split.axis == "rows":
            n *= split.parts
        elif split is not None:
            k *= split.parts
        return self._weights.placing(place).linear(prefix, n, k, bias=bias, dtype=dtype)

    def array(self, name: str, shape: tuple[int, ...], *, dtype=None, optional: bool = False):
        """As `Weights.array`; `shape` is that of the part."""
        split = self._split(name)

        def place(name, value, checkpoint_scheme):
            return self._put(self._cut(value, split, 0))

        if split is not None:
            shape = (shape[0] * split.parts, *shape[1:])
        source = self._weights.placing(place)
        return source.array(name, shape, dtype=dtype, optional=optional)

    def cache_scales(self, prefix: str, **heads: int) -> CacheScales | None:
        """As `Weights.cache_scales`; keys and values are cut as their linears."""
        splits = {name: self._splits[f"{name}_proj"] for name in heads}

        def place(name, value, checkpoint_scheme):
            return {
                key: self._put(self._cut(scale, splits[key], 0)) for key, scale in value.items()
            }

        whole = {name: count * splits[name].parts for name, count in heads.items()}
        return self._weights.placing(place).cache_scales(prefix, **whole)

    def _split(self, name):
        name = f".{name.removesuffix('.weight')}"
        found = (split for end, split in self._splits.items() if name.endswith(f".{end}"))
        return next(found, None)

    def _cut(self, leaf, split: Split | None, axis: int):
        if leaf is None:
            return None
        if split is None:
            return leaf[()]
        index = self._index * split.parts // self._shards
        ranges = split.ranges(leaf.shape[axis], index)
        pieces = [leaf[(*(slice(None),) * axis, own)] for own in ranges]
        return pieces[0] if len(pieces) == 1 else np.concatenate(pieces, axis)

    def _cut_linear(self, value: LinearWeights, split: Split | None) -> LinearWeights:
        axis = 1 if split is not None and split.axis == "columns" else 0
        weight, bias = value.weight, value.bias
        if isinstance(weight, NVFP4Tensor):
            weight = dataclasses.replace(
                weight,
                packed=self._cut(weight.packed, split, axis),
                block_scale=self._cut(weight.block_scale, split, axis),
                global_scale=self._cut(weight.global_scale, None, 0),
                global_divisor=self._cut(weight.global_divisor, None, 0),
            )
        elif isinstance(weight, FP8Tensor):
            values = self._cut(weight.values, split, axis)
            scale = self._cut(weight.scale, None if axis else split, 0)
            weight = dataclasses.replace(weight, values=values, scale=scale)
        else:
            weight = self._cut(weight, split, axis)
        if axis:  # it counts once in the sum
            bias = self._cut(bias, None, 0)
            bias = bias * 0 if bias is not None and self._index else bias
        else:
            bias = self._cut(bias, split, 0)
        return dataclasses.replace(value, weight=weight, bias=bias)

    def _put(self, tree):
        return jax.block_until_ready(jax.device_put(tree, self._device))


def build_parts(
    build: Callable[[PartWeights], nnx.Module],
    weights,
    splits: Mapping[str, Split],
    expert_mesh: ExpertMesh,
) -> Any:
    """Build the part of each shard and put them together.

    Args:
      build: makes the module of one shard from a `PartWeights`.
      weights: the source of `checkpoint.resolve`.
      splits: see `PartWeights`.
      expert_mesh: of the shards.

    Returns:
      The module with arrays ``[tensor, ...]``; parts of other processes are not built here.
    """
    sharding = expert_mesh.sharding(TENSOR)
    owners: dict[int, list[Any]] = {}
    for device, index in sharding.addressable_devices_indices_map((expert_mesh.tensor,)).items():
        assert index is not None
        owners.setdefault(index[0].start or 0, []).append(device)
    leaves, tree = {}, None
    for index, devices in owners.items():
        with jax.default_device(devices[0]):
            module = build(PartWeights(weights, splits, expert_mesh, index, devices[0]))
        leaves[index], tree = jax.tree.flatten(module)
    assert tree is not None

    def stack(*parts):
        """Return one array of the parts of this process, in the order of `owners`."""
        pieces = [
            jax.device_put(_with_axis(part, device), device)
            for part, devices in zip(parts, owners.values(), strict=True)
            for device in devices
        ]
        shape = (expert_mesh.tensor, *parts[0].shape)
        return jax.make_array_from_single_device_arrays(shape, sharding, pieces)

    return tree.unflatten(map(stack, *leaves.values()))


def _with_axis(part, device):
    """Return ``part[None]``; on a CPU in the memory of `part`, which no XLA operation would do."""
    return (np.asarray(part) if device.platform == "cpu" else part)[None]


class Parts(nnx.Module):
    """A module cut along `tensor`: ``y = psum(part(x))``.

    Attributes:
      stacked: the module, its arrays ``[tensor, ...]``.
      expert_mesh: static.
    """

    def __init__(self, stacked: Any, expert_mesh: ExpertMesh):
        """Make one of what `build_parts` returns."""
        self.stacked, self.expert_mesh = stacked, expert_mesh

    def __call__(self, x: Float[Array, "... h"]) -> Float[Array, "... n"]:
        """Run all parts on `x`, whole on every device, and add up in float32."""
        return _run(self.expert_mesh, lambda part, x: _add_up(part(x)), self.stacked, x)


class ByRows(nnx.Module):
    """A module that each shard along `expert` runs on its own share of the rows.

    XLA cannot share out the rows of a custom call: all devices would run it on all of them.

    Attributes:
      module: whole on every device, or `Parts`.
      expert_mesh: static.
    """

    def __init__(self, module: Any, expert_mesh: ExpertMesh):
        """Make one of a module of rows, which must not change its own state."""
        self.module, self.expert_mesh = module, expert_mesh

    def __call__(self, x: Float[Array, "... h"]) -> Float[Array, "... n"]:
        """Run the module on `x`; the result is over the devices as rows of an exchange are."""
        parts = isinstance(self.module, Parts)
        arrays = self.module.stacked if parts else self.module
        spec = self.expert_mesh.spec(TENSOR) if parts else self.expert_mesh.spec()

        def run(rows, module):
            return _add_up(_own(module)(rows)) if parts else module(rows)

        y = share_rows(run, self.expert_mesh, x.reshape(-1, x.shape[-1]), arrays, specs=(spec,))
        return y.reshape(*x.shape[:-1], -1)


class HeadParts(nnx.Module):
    """An attention or another mixer cut along `tensor`, each part with its heads and their cache.

    Attributes:
      stacked, expert_mesh: as in `Parts`. The part has `cache_axes`: name of a cache entry -> the
        axis
        along which heads or channels have their own; None where all parts have the same, which is
        whole on every device.
    """

    def __init__(self, stacked: Any, expert_mesh: ExpertMesh):
        """Make one of what `build_parts` returns."""
        self.stacked, self.expert_mesh = stacked, expert_mesh

    def init_cache(self, batch: int, max_length: int) -> Mapping[str, Array]:
        """Return empty cache entries, cut as `cache_axes` of the part says."""

        def empty():
            return self.stacked.init_cache(batch, max_length)  # reads static sizes of the part

        return self.expert_mesh.shard_map(empty, (), self._cache_specs())()

    def __call__(self, x, positions, entries):
        """Attend from ``x [b, t, h]``; returns ``[b, t, h]`` and the cache entries."""

        def run(part, x, positions, entries):
            y, entries = part(x, positions, entries)
            return _add_up(y), entries

        whole = self.expert_mesh.spec()
        cache = None if entries is None else self._cache_specs()
        specs = (whole, whole, cache), (whole, cache)
        return _run(self.expert_mesh, run, self.stacked, x, positions, entries, specs=specs)

    def _cache_specs(self):
        spec = self.expert_mesh.spec
        return {
            name: spec() if axis is None else spec(*(None,) * axis, TENSOR)
            for name, axis in self.stacked.cache_axes.items()
        }


def look_up(
    table: Float[Array, "p v h"], ids: Int[Array, "b t"], expert_mesh: ExpertMesh
) -> Float[Array, "b t h"]:
    """Return the rows `ids` of a table of p parts; exact, for one term of the sum is not zero."""

    def look(table, ids):
        own = ids - lax.axis_index(TENSOR) * table.shape[0]
        here = (own >= 0) & (own < table.shape[0])
        rows = table[jnp.where(here, own, 0)]
        return lax.psum(jnp.where(here[..., None], rows, jnp.zeros((), rows.dtype)), TENSOR)

    return _run(expert_mesh, look, table, ids)


def join_columns(
    run: Callable, stacked: Any, x: Float[Array, "... h"], expert_mesh: ExpertMesh
) -> Float[Array, "... n"]:
    """Return ``run(part, x)`` of all parts side by side: the one gather, of logits.

    Args:
      run: makes the columns of one part.
      stacked: an array, or a module of arrays, ``[tensor, ...]``.
      x: whole on every device.
      expert_mesh: of the parts.
    """

    def score(part, x):
        return lax.all_gather(run(part, x), TENSOR, axis=x.ndim - 1, tiled=True)

    return _run(expert_mesh, score, stacked, x)


def _run(expert_mesh, run, stacked, *args, specs=None):
    """Return ``run(part, *args)`` of each shard; arguments and result whole, or as `specs` say."""
    given, returned = specs or ((expert_mesh.spec(),) * len(args), expert_mesh.spec())

    def body(stacked, *args):
        return run(_own(stacked), *args)

    return expert_mesh.shard_map(body, (expert_mesh.spec(TENSOR), *given), returned)(stacked, *args)


def _own(stacked):
    return jax.tree.map(lambda leaf: leaf[0], stacked)


def _add_up(y):
    return lax.psum(y.astype(jnp.float32), TENSOR).astype(y.dtype)
