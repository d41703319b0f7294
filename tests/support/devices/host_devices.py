"""Utilities for tests over a mesh of eight CPU devices: meshes, collectives and comparisons."""

import collections
import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType
from jax.tree_util import keystr

from jax_nvfp4_moe.ops.all_reduce import PeerGroups
from jax_nvfp4_moe.parallel import find_expert_mesh
from jax_nvfp4_moe.parallel.peers import SUMS

SHAPES = ((8, 1), (4, 2), (2, 4), (1, 2))
# Sharding changes the order of float32 sums: each all-reduce adds up to eight terms. Logits pass
# through several such layers.
BOUND = 1e-6
COLLECTIVE = re.compile(
    r" (all-reduce|all-gather|all-to-all|reduce-scatter|collective-\w+|ragged-\S+?)(?:-start)?\("
)
IDS = np.random.default_rng(0).integers(0, 512, (2, 12)).astype(np.int32)
call = jax.jit(lambda module, *args: module(*args))


def name_shape(value):
    """Return how a shape reads in the name of a test. For None, pytest chooses the name."""
    return "x".join(map(str, value)) if isinstance(value, tuple) else None


over_shapes = pytest.mark.parametrize("shape", SHAPES, ids=name_shape)


def make_mesh(shape, kind=AxisType.Auto, names=("expert", "tensor")):
    """Return a mesh of the first devices."""
    devices = jax.devices()[: int(np.prod(shape))]
    return jax.make_mesh(shape, names, (kind,) * len(names), devices=devices)


def connected(shape):
    """Return a mesh like that of `connect_peers`. The kernels of CPUs know no such sums."""
    peers = tuple((roles, PeerGroups("not there", 2)) for roles in SUMS)
    return dataclasses.replace(find_expert_mesh(make_mesh(shape)), peers=peers)


def collectives(compiled):
    """Return name -> how many collectives with that name a compiled program has."""
    return dict(collections.Counter(COLLECTIVE.findall(compiled.as_text())))


def run_counted(module, *args):
    """Return the result of a module, and the collectives of the compiled program."""
    compiled = call.lower(module, *args).compile()
    return compiled(module, *args), collectives(compiled)


def difference(actual, expected):
    """Return the largest difference, divided by the largest expected magnitude, in float64."""
    actual, expected = (np.asarray(x, np.float64) for x in (actual, expected))
    return float(np.abs(actual - expected).max() / np.abs(expected).max())


def name_path(path):
    """Return a path in a pytree as text, without the order that a divided variable names."""
    return re.sub(r"\.value(_\w+?)_shards", ".value", keystr(path))


def describe(module):
    """Return the path and the dtype of each array of a module."""
    leaves = jax.tree.leaves_with_path(nnx.state(module))
    return [[name_path(path), leaf.dtype.name] for path, leaf in leaves]


def differing_copies(module):
    """Return the paths of arrays for which two devices hold different copies of the same part."""
    found = []
    for path, leaf in jax.tree.leaves_with_path(nnx.state(module)):
        parts = {}
        for shard in leaf.addressable_shards:
            values = np.asarray(shard.data).tobytes()
            if parts.setdefault(str(shard.index), values) != values:
                found.append(jax.tree_util.keystr(path))
                break
    return found


def tokens(count, dtype=jnp.float32, width=64):
    """Return random tokens as a NumPy array. Fewer tokens are the first of more."""
    return np.random.default_rng(2).standard_normal((count, width)).astype(dtype)


def decode(model, ids, cuts=(9, 10)):
    """Prefill the first piece of `ids`, decode the others, and return all logits and the cache."""
    cache, pieces = model.init_cache(*ids.shape), []
    for piece in np.split(ids, cuts, axis=1):
        logits, cache = call(model, piece, cache)
        pieces.append(logits)
    return np.concatenate(pieces, axis=1), cache
