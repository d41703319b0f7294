"""What scripts of checks over host devices share; a test starts such a script and judges."""

import collections
import json
import re
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from given import PROGRAMS
from jax.sharding import AxisType

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")

SHAPES = ((8, 1), (4, 2), (2, 4), (1, 2))
NAMES = ["x".join(map(str, shape)) for shape in SHAPES]
# Sums of float32 in another order, up to eight of them for each all-reduce; logits pass through
# some layers of that.
BOUND = 1e-6
COLLECTIVE = re.compile(
    r" (all-reduce|all-gather|all-to-all|reduce-scatter|collective-\w+|ragged-\S+?)(?:-start)?\("
)
IDS = np.random.default_rng(0).integers(0, 512, (2, 12)).astype(np.int32)
call = jax.jit(lambda module, *args: module(*args))


def start(script, names):
    """Run the checks `names` of a script such as this in a process; return name -> figures."""
    done = subprocess.run(
        [sys.executable, PROGRAMS / script, *names],
        capture_output=True,
        text=True,
        timeout=1200,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return dict(map(json.loads, done.stdout.splitlines()))


def make_mesh(shape, kind=AxisType.Auto):
    devices = jax.devices()[: shape[0] * shape[1]]
    return jax.make_mesh(shape, ("expert", "tensor"), (kind, kind), devices=devices)


def collectives(compiled):
    return dict(collections.Counter(COLLECTIVE.findall(compiled.as_text())))


def run_checks(checks):
    """Print a line of JSON, [name, figures], for each check that the command line names."""
    for name in sys.argv[1:]:
        print(json.dumps([name, checks[name]()]), flush=True)


def difference(actual, expected):
    actual, expected = (np.asarray(x, np.float64) for x in (actual, expected))
    return float(np.abs(actual - expected).max() / np.abs(expected).max())


def compare(make, x, shapes=SHAPES, kind=AxisType.Auto):
    """Return for each mesh the difference of ``make(mesh=mesh)(x)`` and what it sends."""
    expected, figures = call(make(), x), {}
    for shape in shapes:
        module = make(mesh=make_mesh(shape, kind))
        compiled = call.lower(module, x).compile()
        error = difference(compiled(module, x), expected)
        figures["x".join(map(str, shape))] = [error, collectives(compiled)]
    return figures


def describe(module):
    """Return the path and the dtype of each array of a module."""
    leaves = jax.tree.leaves_with_path(nnx.state(module))
    return [[jax.tree_util.keystr(path), leaf.dtype.name] for path, leaf in leaves]


def differing_copies(module):
    """Return the paths of arrays of which two devices hold the same part with other values."""
    found = []
    for path, leaf in jax.tree.leaves_with_path(nnx.state(module)):
        parts = {}
        for shard in leaf.addressable_shards:
            values = np.asarray(shard.data).tobytes()
            if parts.setdefault(str(shard.index), values) != values:
                found.append(jax.tree_util.keystr(path))
                break
    return found


def tokens(count, dtype=jnp.float32):
    return jax.random.normal(jax.random.key(2), (count, 64), dtype)
