"""Test that on a mesh of four CPU devices each parameter has the gradient of one device."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from given import CHECKPOINTS
from host_devices import difference, make_mesh
from mixer_cases import TWO_LAYERS
from resized import write_resized
from unquantized import first_layer_dequantized

from jax_nvfp4_moe import load_model
from jax_nvfp4_moe.parallel.shard_order import to_one_device
from jax_nvfp4_moe.parallel.sharded_variable import find_layout

pytestmark = pytest.mark.eight_devices

# Bound for float32 sums in another order, forward and backward through a few layers.
BOUND = 1e-5
SHARDS = 4
# For each model, a parameter that shards hold in a special way. olmoe has two key heads for four
# shards, and output biases. deepseek_v3 has latents of keys and values, but not of queries.
# qwen3_next has a delta net with four key heads.
KINDS = {"olmoe": "out.bias", "deepseek_v3": "kv_up.keys", "qwen3_next": "attention.norm"}
DENSE = {
    "olmoe": "olmoe-bias-modelopt-w4a16",
    "deepseek_v3": "deepseek_v3-direct-modelopt-w4a16",
}


@nnx.jit
def gradients(model, ids, weights):
    """Return the gradients of a weighted sum of logits to every parameter."""

    def loss(model):
        return jnp.sum(model(ids) * weights)

    return nnx.grad(loss)(model)


@functools.partial(jax.jit, static_argnames="layouts")
def in_order(values, layouts):
    """Return gradients in the order of entries on one device."""
    return [to_one_device(*each) for each in zip(values, layouts, strict=True)]


def flat(model, state):
    """Return path -> gradient, in the order of entries on one device."""
    variables = {path: variable for path, variable in nnx.to_flat_state(nnx.state(model))}
    paths, gradients = zip(*nnx.to_flat_state(state), strict=True)
    values = in_order(
        [gradient.get_value() for gradient in gradients],
        tuple(find_layout(variables[path]) for path in paths),
    )
    named = zip(paths, values, strict=True)
    return {".".join(map(str, path)): np.asarray(value, np.float64) for path, value in named}


def copies_differ(state):
    """Return the largest difference between gradients of shards that hold the same rows."""
    worst = 0.0
    for _, gradient in nnx.to_flat_state(state):
        layout = find_layout(gradient)
        if layout is None:
            continue
        axis = 0 if layout.axis == "rows" else 1
        blocks = np.split(np.asarray(gradient.get_value()), SHARDS, axis)
        start = 0
        for width, parts in layout.segments:
            each = [np.take(block, range(start, start + width), axis) for block in blocks]
            for shard in range(SHARDS):
                first = each[shard * parts // SHARDS * SHARDS // parts]
                worst = max(worst, float(np.abs(each[shard] - first).max()))
            start += width
    return worst


def write(name, folder):
    """Write a model with one layer of each kind, because the compiler's time grows with layers."""
    if name in DENSE:
        return first_layer_dequantized(DENSE[name], folder)
    given, changes = TWO_LAYERS
    write_resized(CHECKPOINTS / given, folder, **changes)
    return folder


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """Return a function from a model's name to its gradients.

    It returns path -> gradient of one device, the same of four devices, and the gradients as the
    four devices hold them.
    """

    @functools.cache
    def find(name):
        load = functools.partial(
            load_model, write(name, tmp_path_factory.mktemp(name)), dtype=jnp.float32
        )
        one, cut = load(), load(mesh=make_mesh((1, SHARDS)))
        ids = np.random.default_rng(0).integers(0, 64, (2, 7)).astype(np.int32)
        shape = (*ids.shape, one.config.vocab_size)
        weights = np.random.default_rng(1).standard_normal(shape, np.float32)
        sharded = gradients(cut, ids, weights)
        return flat(one, gradients(one, ids, weights)), flat(cut, sharded), sharded

    return find


@pytest.mark.parametrize("name", KINDS)
def test_gradients_are_those_of_one_device(found, name):
    """Output biases count once. A part that shards share has the sum of their gradients."""
    expected, actual, _ = found(name)
    assert expected.keys() == actual.keys()
    moving = [path for path, gradient in expected.items() if gradient.any()]
    assert any(KINDS[name] in path for path in moving)
    errors = {path: difference(actual[path], expected[path]) for path in moving}
    assert {path: error for path, error in errors.items() if not error <= BOUND} == {}


@pytest.mark.parametrize("name", KINDS)
def test_copies_stay_equal(found, name):
    """The copies of a key head on two shards have equal gradients, bit for bit."""
    assert copies_differ(found(name)[2]) == 0.0
