"""Test attention, delta nets and Mamba-2 sharded by heads over eight CPU devices."""

import functools
import logging
import unittest.mock

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from support.devices.host_devices import (
    BOUND,
    IDS,
    SHAPES,
    call,
    decode,
    difference,
    make_mesh,
    name_path,
    name_shape,
    over_shapes,
    run_counted,
)
from support.files.given import CHECKPOINTS
from support.files.resized import write_resized
from support.models.mixer_cases import CASES

from jax_nvfp4_moe import load_model
from jax_nvfp4_moe.nn.building.sharding import say_replicated
from jax_nvfp4_moe.parallel.shard_spec import ShardSpec
from jax_nvfp4_moe.parallel.tensor_parallel import HeadParallel

pytestmark = [pytest.mark.slow, pytest.mark.eight_devices]

# What is replicated on each device: global scales, biases that are added once, and norms that heads
# share.
WHOLE = ("global_scale", "out.bias.value", "q_norm.weight.value", "k_norm.weight.value")
# One all-reduce for each mixer, dense part, shared expert and expert layer, and for the embedding.
# If `tensor` is the whole mesh, experts and shared experts add up over the same devices, and XLA
# merges their all-reduces. On four shards, the delta net of qwen3_5 is replicated.
CUT = {
    "qwen3_next": {"4x2": 3 + 1 + 2 + 2 + 1, "2x4": 3 + 1 + 2 + 2 + 1, "1x2": 3 + 1 + 2 + 1},
    "qwen3_5": {"4x2": 2 + 2 + 2 + 1, "2x4": 1 + 2 + 2 + 1, "1x2": 2 + 2 + 1},
    "nemotron_h": {"4x2": 2 + 1 + 1 + 1 + 1, "2x4": 2 + 1 + 1 + 1 + 1, "1x2": 2 + 1 + 1 + 1},
    "granite": {"4x2": 2 + 2 + 2 + 1, "2x4": 2 + 2 + 2 + 1, "1x2": 2 + 2 + 1},
}
# Rows of joined queries, keys and values over those of one of four shards. There are four heads of
# queries, and two of keys and of values. In qwen3, each query has a gate.
JOINED = {
    "qwen3_next": (8 + 2 + 2) / (2 + 1 + 1),
    "qwen3_5": (8 + 2 + 2) / (2 + 1 + 1),
    "nemotron_h": (4 + 2 + 2) / (1 + 1 + 1),
    "granite": (4 + 2 + 2) / (1 + 1 + 1),
}
EXPERT_LAYERS = {"qwen3_next": 2, "qwen3_5": 2, "nemotron_h": 1, "granite": 2}


load = functools.partial(load_model, dtype=jnp.float32)


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """Return a function from a model's name to its folder, which it writes once."""

    @functools.cache
    def write(name):
        given, changes = CASES[name]
        folder = tmp_path_factory.mktemp(name)
        write_resized(CHECKPOINTS / given, folder, **changes)
        return folder

    return write


@functools.cache
def one_device(folder):
    """Return token ids within the model's vocabulary, and the logits of one device."""
    model = load(folder)
    ids = IDS % model.config.vocab_size
    return ids, call(model, ids)


@over_shapes
@pytest.mark.parametrize("name", CASES)
def test_a_model_over_a_mesh_equals_one_device(written, name, shape):
    ids, logits = one_device(written(name))
    found, sent = run_counted(load(written(name), mesh=make_mesh(shape)), ids)
    assert difference(found, logits) <= BOUND
    if shape == (8, 1):
        assert sent == {"all-reduce": EXPERT_LAYERS[name]}
    else:
        assert sent == {"all-reduce": CUT[name][name_shape(shape)], "all-gather": 1}


def held(tree, whole):
    """Return path -> bytes of the whole array divided by the bytes that one device holds."""
    paths, _ = jax.tree_util.tree_flatten_with_path(tree)
    leaves = jax.tree.leaves(whole)
    return {
        name_path(path): leaf.nbytes / own.addressable_shards[0].data.nbytes
        for (path, own), leaf in zip(paths, leaves, strict=True)
    }


@pytest.mark.parametrize("name", CASES)
def test_decoding_with_cut_states(written, name):
    """A prefill, one token and two more agree with the whole prompt. States are sharded by heads.

    Each key is held twice, because four shards share the two key heads of each model. They also
    share everything that is replicated.
    """
    ids, logits = one_device(written(name))
    steps, whole = decode(load(written(name)), ids)
    assert difference(steps, logits) <= BOUND
    found, cache = decode(load(written(name), mesh=make_mesh((2, 4))), ids)
    assert difference(found, steps) <= BOUND
    entries = held(cache.layers, whole.layers)
    assert len(entries) == 2 * (3 if name == "qwen3_next" else 2)
    recurrent = 1.0 if name == "qwen3_5" else 4.0
    for path, count in entries.items():
        assert count == (2.0 if path.endswith(("['k']", "['v']")) else recurrent)


@pytest.mark.parametrize("name", CASES)
def test_a_device_holds_its_part_of_a_mixer(written, name):
    """On four shards, a device holds a quarter of a mixer, but half of its two key heads.

    The test uses the canonical layout, which pads nothing.
    """
    whole = dict(nnx.iter_modules(load(written(name), backend="reference")))
    cut = load(written(name), backend="reference", mesh=make_mesh((2, 4)))
    mixers = [
        held(module, whole[path])
        for path, module in nnx.iter_modules(cut)
        if isinstance(module, HeadParallel) and module.expert_mesh is not None
    ]
    assert len(mixers) == {"qwen3_next": 3, "qwen3_5": 1, "nemotron_h": 2, "granite": 2}[name]
    for leaves in mixers:
        delta = ".A_log.value" in leaves and ".D.value" not in leaves  # Mamba-2 has a D
        for path, count in leaves.items():
            if path.startswith(".qkv.q_k_v."):
                assert count == JOINED[name]
            elif path.endswith(WHOLE) or (delta and path == ".norm.value"):
                assert count == 1.0
            else:
                assert count == 4.0


@pytest.mark.parametrize("name", CASES)
def test_what_stays_whole_is_said(written, name, caplog):
    """The log names it once for all meshes: qwen3_5 has fewer key heads than four shards."""
    caplog.set_level(logging.INFO, logger="jax_nvfp4_moe")
    say_replicated.cache_clear()  # it logs each message once in a process
    for shape in SHAPES:
        load(written(name), mesh=make_mesh(shape))
    lines = [line for line in caplog.messages if "are replicated on all" in line]
    assert len(lines) == (1 if name == "qwen3_5" else 0)
    for line in lines:
        assert "out_proj are replicated on all 4 shards" in line
        assert "2 key heads cannot be divided into 4 equal parts" in line


def one_range(split, width, index):
    """Shard as if there were no segments: the negative control of their order."""
    own = width // split.parts
    return [slice(index * own, (index + 1) * own)]


@pytest.mark.parametrize("name", CASES)
def test_channels_in_a_wrong_order_are_seen(written, name):
    """Sharding rows without regard to queries, keys and values gives a large error."""
    ids, logits = one_device(written(name))
    with unittest.mock.patch.object(ShardSpec, "ranges", one_range):
        wrong = call(load(written(name), mesh=make_mesh((1, 2))), ids)
    assert difference(wrong, logits) > 1e-2
