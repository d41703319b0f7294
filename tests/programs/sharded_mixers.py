"""Cut mixers over a mesh of eight host devices; `test_sharded_mixers.py` starts this and judges.

python tests/programs/sharded_mixers.py NAME ...  prints JSON for each: [name, figures]
"""

import functools
import logging
import os
import tempfile
import unittest.mock

if __name__ == "__main__":
    given = os.environ.get("XLA_FLAGS", "")
    os.environ["XLA_FLAGS"] = f"{given} --xla_force_host_platform_device_count=8"
    os.environ["JAX_PLATFORMS"] = "cpu"

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from given import CHECKPOINTS
from host_devices import IDS, SHAPES, call, collectives, difference, make_mesh, run_checks
from resized import write_resized

import jax_nvfp4_moe as nvfp4
from jax_nvfp4_moe.parallel.shard_spec import ShardSpec
from jax_nvfp4_moe.parallel.tensor_parallel import HeadParallel

# The given checkpoint of each, and the sizes that experts must have to be cut. The delta nets of
# qwen3_5 keep their two key heads, which do not make four parts.
EXPERTS = {"moe_intermediate_size": 64}
SHARED = EXPERTS | {"num_experts": 8, "shared_expert_intermediate_size": 64}
CASES = {
    "qwen3_next": (
        "qwen3_next-options-modelopt-w4a16",
        SHARED
        | {"intermediate_size": 128, "linear_num_key_heads": 4, "linear_num_value_heads": 12},
    ),
    "qwen3_5": ("qwen3_5_moe-modelopt-w4a16", SHARED),
    "nemotron_h": (
        "nemotron_h-modelopt-w4a16",
        EXPERTS
        | {
            "n_routed_experts": 8,
            "moe_shared_expert_intermediate_size": 128,
            "intermediate_size": 128,
            "n_groups": 4,
        },
    ),
}


class Said(logging.Handler):
    """Keeps what the log says to stay whole."""

    def __init__(self):
        super().__init__(logging.INFO)
        self.lines = []

    def emit(self, record):
        if "are whole on each" in record.getMessage():
            self.lines.append(record.getMessage())


def decode(model, ids):
    """Return the logits of a prefill, of one token and of two more, and the cache."""
    cache, pieces = model.init_cache(*ids.shape), []
    for piece in (ids[:, :9], ids[:, 9:10], ids[:, 10:]):
        logits, cache = call(model, piece, cache)
        pieces.append(logits)
    return np.concatenate(pieces, axis=1), cache


def held(tree, whole):
    """Return path -> bytes of the whole array over those that one device holds of it."""
    paths, _ = jax.tree_util.tree_flatten_with_path(tree)
    leaves = jax.tree.leaves(whole)
    return {
        jax.tree_util.keystr(path): leaf.nbytes / own.addressable_shards[0].data.nbytes
        for (path, own), leaf in zip(paths, leaves, strict=True)
    }


def mixers_held(load, one):
    """Return mixer -> `held` of each that is cut, in the canonical layout, which pads nothing."""
    whole = dict(nnx.iter_modules(load(backend="reference")))
    cut = load(backend="reference", mesh=make_mesh((2, 4)))
    return {
        ".".join(map(str, path)): held(module, whole[path])
        for path, module in nnx.iter_modules(cut)
        if isinstance(module, HeadParallel) and module.expert_mesh is not None
    }


def one_range(split, width, index):
    """Cut as if there were no segments: the negative control of their order."""
    own = width // split.parts
    return [slice(index * own, (index + 1) * own)]


def run(name):
    """Return differences, collectives, bytes and what is said of one model over the meshes."""
    given, changes = CASES[name]
    said, figures = Said(), {}
    with tempfile.TemporaryDirectory() as folder:
        write_resized(CHECKPOINTS / given, folder, **changes)
        load = functools.partial(nvfp4.load_model, folder, dtype=jnp.float32)
        one = load()
        ids = jnp.asarray(IDS % one.config.vocab_size)
        logits, (steps, whole) = call(one, ids), decode(one, ids)
        logger = logging.getLogger("jax_nvfp4_moe")
        logger.addHandler(said)
        logger.setLevel(logging.INFO)
        for shape in SHAPES:
            model = load(mesh=make_mesh(shape))
            compiled = call.lower(model, ids).compile()
            error = difference(compiled(model, ids), logits)
            figures["x".join(map(str, shape))] = [error, collectives(compiled)]
            if shape == (2, 4):
                found, cache = decode(model, ids)
                figures["decoding"] = difference(found, steps)
                figures["cache"] = held(cache.layers, whole.layers)
        with unittest.mock.patch.object(ShardSpec, "ranges", one_range):
            wrong = call(load(mesh=make_mesh((1, 2))), ids)
        figures["unordered"] = difference(wrong, logits)
        figures["mixers"] = mixers_held(load, one)
    figures["said"] = said.lines
    return figures


if __name__ == "__main__":
    run_checks({name: functools.partial(run, name) for name in CASES})
