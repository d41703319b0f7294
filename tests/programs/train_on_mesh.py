"""Gradients over a mesh of four host devices; `test_training_mesh.py` starts this and judges.

python tests/programs/train_on_mesh.py NAME ...  prints JSON for each: [name, figures]
"""

import functools
import os
import tempfile

if __name__ == "__main__":
    given = os.environ.get("XLA_FLAGS", "")
    os.environ["XLA_FLAGS"] = f"{given} --xla_force_host_platform_device_count=4"
    os.environ["JAX_PLATFORMS"] = "cpu"

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from given import CHECKPOINTS
from host_devices import difference, make_mesh, run_checks
from resized import write_resized
from unquantized import dequantized

import jax_nvfp4_moe as nvfp4
from jax_nvfp4_moe.parallel.shard_order import to_one_device
from jax_nvfp4_moe.parallel.shard_spec import find_layout

SHARDS = 4
# Two key heads for four shards and biases of outputs; latents beside queries without one; a delta
# net of four key heads.
SIZES = {
    "olmoe": ("olmoe-bias-modelopt-w4a16", None),
    "deepseek_v3": ("deepseek_v3-direct-modelopt-w4a16", None),
    "qwen3_next": (
        "qwen3_next-options-modelopt-w4a16",
        {
            "moe_intermediate_size": 64,
            "num_experts": 8,
            "shared_expert_intermediate_size": 64,
            "intermediate_size": 128,
            "linear_num_key_heads": 4,
            "linear_num_value_heads": 12,
        },
    ),
}


@nnx.jit
def gradients(model, ids, weights):
    """Return the gradients of a weighted sum of logits to every parameter."""

    def loss(model):
        return jnp.sum(model(ids) * weights)

    return nnx.grad(loss)(model)


def flat(model, state):
    """Return path -> gradient, in the order of one device."""
    variables = {path: variable for path, variable in nnx.to_flat_state(nnx.state(model))}
    found = {}
    for path, gradient in nnx.to_flat_state(state):
        value, layout = gradient.get_value(), find_layout(variables[path])
        value = jax.jit(to_one_device, static_argnums=1)(value, layout)
        found[".".join(map(str, path))] = np.asarray(value, np.float64)
    return found


def copies_differ(state):
    """Return the largest difference of gradients of two shards that hold the same rows."""
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


def run(name):
    """Return path -> difference of a gradient from one device's, and that of copies."""
    given, changes = SIZES[name]
    with tempfile.TemporaryDirectory() as folder:
        if changes is None:
            source = dequantized(given, folder)
        else:
            write_resized(CHECKPOINTS / given, folder, **changes)
            source = folder
        one = nvfp4.load_model(source, dtype=jnp.float32)
        cut = nvfp4.load_model(source, dtype=jnp.float32, mesh=make_mesh((1, SHARDS)))
    ids = jnp.asarray(np.random.default_rng(0).integers(0, 64, (2, 7)), jnp.int32)
    weights = jax.random.normal(jax.random.key(1), (2, 7, one.config.vocab_size))
    expected = flat(one, gradients(one, ids, weights))
    state = gradients(cut, ids, weights)
    found = flat(cut, state)
    assert expected.keys() == found.keys()
    errors = {
        path: difference(found[path], truth) for path, truth in expected.items() if truth.any()
    }
    return {"errors": errors, "copies": copies_differ(state)}


if __name__ == "__main__":
    run_checks({name: functools.partial(run, name) for name in SIZES})
