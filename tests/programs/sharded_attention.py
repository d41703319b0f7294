"""Attentions divided by heads over host devices; `test_sharded_attention.py` starts this.

python tests/programs/sharded_attention.py NAME ...  prints JSON for each: [name, figures]
"""

import functools
import os
import re
import tempfile
import unittest.mock

if __name__ == "__main__":
    given = os.environ.get("XLA_FLAGS", "")
    os.environ["XLA_FLAGS"] = f"{given} --xla_force_host_platform_device_count=8"
    os.environ["JAX_PLATFORMS"] = "cpu"

import jax
import jax.numpy as jnp
import numpy as np
from eight_devices_models import load_attention
from flax import nnx
from given import CHECKPOINTS
from host_devices import call, collectives, difference, make_mesh, run_checks
from unquantized import dequantized

import jax_nvfp4_moe as nvfp4
from jax_nvfp4_moe.models import deepseek_v3, llama4, minimax_m2, olmoe
from jax_nvfp4_moe.nn.grouped_query import Attention
from jax_nvfp4_moe.parallel import ExpertMesh
from jax_nvfp4_moe.parallel.shard_spec import divided_axes

SHAPES = ((4, 2), (2, 4), (1, 2))
IDS = jnp.asarray(np.random.default_rng(0).integers(0, 64, (2, 12)).astype(np.int32))
# Folder, its architecture, and the scheme to load with.
ATTENTIONS = {
    "latent-w4a16": ("glm4_moe_lite-modelopt-w4a16", deepseek_v3, None),
    "latent-biases": ("deepseek_v3-direct-modelopt-w4a16", deepseek_v3, None),
    "latent-w4a4": ("deepseekv3-modelopt-w4a4", deepseek_v3, "checkpoint"),
    "latent-fp8": ("deepseek_v3-modelopt-mixed-w4a16-kv8", deepseek_v3, "checkpoint"),
    "latent-fp8-weights": ("deepseek_v3-modelopt-mixed-w4a16-kv8", deepseek_v3, None),
    "llama4-w4a16": ("llama4_text-modelopt-w4a16", llama4, None),
    "llama4-w4a4": ("llama4-ct-w4a4", llama4, "checkpoint"),
    "normalized-biases": ("olmoe-bias-modelopt-w4a16", olmoe, None),
    "normalized": ("minimax_m2-modelopt-w4a16", minimax_m2, None),
}


def models(name, shapes=SHAPES):
    """Compare a whole model without quantization, its prefill and one step, with one device's."""
    figures = {}
    with tempfile.TemporaryDirectory() as folder:
        load = functools.partial(nvfp4.load_model, dequantized(name, folder), dtype=jnp.float32)
        one = load()
        logits, steps = call(one, IDS), decode(one)
        for shape in shapes:
            cut = load(mesh=make_mesh(shape))
            compiled = call.lower(cut, IDS).compile()
            errors = [difference(compiled(cut, IDS), logits)]
            if shape == (2, 4):
                errors.append(difference(decode(cut), steps))
            figures["x".join(map(str, shape))] = [max(errors), collectives(compiled)]
    return figures


def decode(model):
    """Return the logits of a prefill and one step."""
    first, cache = call(model, IDS[:, :11], model.init_cache(2, 12))
    last, _ = call(model, IDS[:, 11:], cache)
    return np.concatenate([first, last], axis=1)


def attentions():
    """Compare attentions alone, as their files quantize them: results, and the bytes on a device.

    Figures are the error of a prefill and one step, that of the cache, that where parts have
    another part's output; bytes of weights and of cache on one device alone and on each of four;
    of each module one part in how many a device holds.
    """
    figures = {}
    for case, (name, architecture, scheme) in ATTENTIONS.items():
        load = functools.partial(load_attention, CHECKPOINTS / name, architecture, scheme=scheme)
        one, cut = load(None), load(ExpertMesh(make_mesh((1, 4))))
        expected, found = run(one), run(cut)
        # Where four shards share two key heads, pairs of them keep the same one.
        both = zip(found, expected, strict=True)
        pairs = [(a, np.repeat(b, len(a[0]) // len(b[0]), axis=1)) for a, b in both]
        errors = [difference(a, b) for a, b in pairs]
        figures[case] = {
            "result": errors[0],
            "cache": max(errors[1:]),
            "control": difference(run(misplaced(cut))[0], expected[0]),
            "bytes": [held(one), held(cut)],
            "cache_bytes": [held(one.init_cache(2, 8)), held(cut.init_cache(2, 8))],
            "shares": shares(one, cut),
        }
    return figures


def run(attention):
    """Return what seven tokens and one after them see, and the entries of the cache."""
    hidden = attention.config.hidden
    x = jax.random.normal(jax.random.key(2), (2, 8, hidden))
    positions = jnp.broadcast_to(jnp.arange(8, dtype=jnp.int32), (2, 8))
    first, cache = call(attention, x[:, :7], positions[:, :7], attention.init_cache(2, 8))
    last, cache = call(attention, x[:, 7:], positions[:, 7:], cache)
    return [np.concatenate([first, last], axis=1), *map(np.asarray, cache.values())]


def misplaced(cut):
    """Return an attention whose parts have another part's columns of the output."""
    graph, state = nnx.split(cut.out)

    def roll(variable):
        leaves, tree = jax.tree.flatten(variable)
        axes = divided_axes(variable)
        rolled = [
            leaf if axis is None else jnp.roll(leaf, leaf.shape[axis] // 4, axis=axis)
            for leaf, axis in zip(leaves, axes, strict=True)
        ]
        return tree.unflatten(rolled)

    other = nnx.clone(cut)
    other.out = nnx.merge(graph, jax.tree.map(roll, state, is_leaf=is_variable))
    return other


def is_variable(leaf):
    return isinstance(leaf, nnx.Variable)


def held(tree):
    """Return the bytes of all arrays on the device 3, or on the only one; they are equally many."""
    found = 0
    for leaf in jax.tree.leaves(tree):
        on = {shard.device.id: shard.data.nbytes for shard in leaf.addressable_shards}
        assert len(set(on.values())) == 1
        found += on[max(on)]
    return found


def shares(one, stacked):
    """Return how many times larger than on each device the largest array of each module is."""
    largest, found = {}, {}
    wholes, parts = map(jax.tree_util.tree_leaves_with_path, (one, stacked))
    for (path, whole), (_, part) in zip(wholes, parts, strict=True):
        name = ".".join(str(getattr(key, "key", getattr(key, "name", key))) for key in path)
        name = re.match(r"((?:down|qkv)\.)?\w+", name.replace("..", ".").lstrip("."))[0]
        if whole.nbytes > largest.get(name, 0):
            largest[name], found[name] = whole.nbytes, whole.nbytes / held(part)
    return found


def unshared():
    """The error where each part normalizes its own heads alone: what the mean is for."""
    folder = CHECKPOINTS / "olmoe-bias-modelopt-w4a16"
    one = run(load_attention(folder, olmoe, None))
    cut = load_attention(folder, olmoe, ExpertMesh(make_mesh((1, 4))))
    with unittest.mock.patch.object(Attention, "_means", return_value=(None, None)):
        return difference(run(cut)[0], one[0])


CHECKS = {
    "latent": functools.partial(models, "kimi_k2-modelopt-w4a16", ((8, 1), *SHAPES)),
    "direct": functools.partial(models, "deepseek_v3-direct-modelopt-w4a16", ((2, 4),)),
    "llama4": functools.partial(models, "llama4_text-modelopt-w4a16"),
    "normalized": functools.partial(models, "olmoe-bias-modelopt-w4a16", ((2, 4), (1, 2))),
    "minimax": functools.partial(models, "minimax_m2-modelopt-w4a16", ((2, 4),)),
    "attentions": attentions,
    "unshared": unshared,
}

if __name__ == "__main__":
    run_checks(CHECKS)
