"""Test one mesh of models whose shards need more than their rows of a matrix.

The slow tests of this folder cover all models, meshes and operations. These few run by default, so
that a fault in what mixers alone shard is seen at once.
"""

import types

import jax.numpy as jnp
import numpy as np
import pytest
from support.devices.divided_attention import load_attention
from support.devices.host_devices import BOUND, IDS, call, difference, make_mesh, tokens
from support.files.checkpoint_edits import edited
from support.files.unquantized import dequantized

from jax_nvfp4_moe import load_model, load_moe
from jax_nvfp4_moe.models import afmoe, deepseek_v3, kimi_linear, minimax_m3, qwen3_moe, step3p7
from jax_nvfp4_moe.parallel import ExpertMesh

pytestmark = pytest.mark.eight_devices

FOLDERS = (
    "olmoe-bias-modelopt-w4a16",  # norms over the heads of all shards
    "lfm2_moe-modelopt-w4a16",  # the channels of a convolution, and of its three inputs
    "nemotron_h-modelopt-w4a16",  # channels of x, B and C, each in parts of its own
    "qwen3_next-modelopt-w4a16",  # channels of queries, keys and values
    "gemma3-modelopt-w4a16",  # norms of what all shards add up
    "gemma4_edge-modelopt-w4a16",  # keys of an earlier layer, and the rows of a second embedding
)


@pytest.mark.parametrize("name", FOLDERS)
def test_logits_equal_those_of_one_device(tmp_path, name):
    """The weights are not quantized: blocks of 16 do not divide the sizes of these models."""
    folder = dequantized(name, tmp_path)
    one = load_model(folder, dtype=jnp.float32)
    cut = load_model(folder, dtype=jnp.float32, mesh=make_mesh((1, 2)))
    ids = IDS % one.config.vocab_size
    assert difference(call(cut, ids), call(one, ids)) <= BOUND


KIMI = types.SimpleNamespace(
    read_config=kimi_linear.read_config,
    build_attention=kimi_linear.build_mixer,
    KEYS=kimi_linear.ARCHITECTURE.keys,
)
# The folder, its architecture, and the layer of a mixer that four devices share. If there are two
# key heads, pairs of devices hold the same one.
MIXERS = {
    "a gate for each channel": ("afmoe-modelopt-w4a16", afmoe, 1),
    "a gate for each head": ("step3p7-modelopt-w4a16", step3p7, 1),
    "queries of an indexer": ("minimax_m3-modelopt-w4a16", minimax_m3, 1),
    "a convolution of Kimi delta attention": ("kimi_linear-modelopt-w4a16", KIMI, 0),
}


def outputs(folder, architecture, expert_mesh, layer=0, scheme=None):
    """Return what one mixer makes of nine tokens."""
    mixer = load_attention(folder, architecture, expert_mesh, scheme=scheme, layer=layer)
    assert (mixer.expert_mesh is None) == (expert_mesh is None)
    positions = np.arange(9, dtype=np.int32)[None]
    given = tokens(9, width=32 if architecture is afmoe else 64)
    return call(mixer, given[None], positions, None)[0]


@pytest.mark.parametrize("name", MIXERS)
def test_a_mixer_equals_that_of_one_device(tmp_path, name):
    given, architecture, layer = MIXERS[name]
    folder = dequantized(given, tmp_path)
    one, four = (
        outputs(folder, architecture, mesh, layer) for mesh in (None, ExpertMesh(make_mesh((1, 4))))
    )
    assert difference(four, one) <= BOUND


@pytest.mark.parametrize(
    ("name", "architecture", "scales"),
    [
        # Two of four devices have the first key head.
        ("qwen3_moe-ct-w4a4-kv8", qwen3_moe, [0.3, 1.7]),
        ("deepseek_v3-modelopt-mixed-w4a16-kv8", deepseek_v3, [0.3, 0.7, 1.1, 1.7]),
    ],
    ids=["keys", "latents"],
)
def test_each_head_keeps_its_scale_of_an_fp8_cache(tmp_path, name, architecture, scales):
    """Powers of two would round alike, so that no scale is one."""

    def scale(tensors):
        for key in [one for one in tensors if one.endswith((".k_scale", ".v_scale"))]:
            tensors[key] = np.array(scales, np.float32)

    folder = edited(tmp_path, name, scale)
    one, four = (
        outputs(folder, architecture, mesh, scheme="checkpoint")
        for mesh in (None, ExpertMesh(make_mesh((1, 4))))
    )
    assert difference(four, one) <= BOUND


def test_a_joined_mlp_keeps_gate_beside_up(tmp_path):
    """One matrix holds gate and up: each device has a part of both."""
    folder = dequantized("granitemoeshared-modelopt-w4a16", tmp_path)
    one, two = (
        load_moe(folder, 0, dtype=jnp.float32, mesh=mesh).shared_experts
        for mesh in (None, make_mesh((1, 2)))
    )
    assert two.expert_mesh is not None
    assert difference(call(two, tokens(9)), call(one, tokens(9))) <= BOUND


def test_groups_of_heads_of_compressed_attention(tmp_path):
    """DeepSeek-V4: each of four devices has two heads, whose results one matrix joins."""
    folder, positions = dequantized("deepseek_v4-modelopt-w4a16", tmp_path), np.arange(9)[None]
    one, four = (
        load_model(folder, dtype=jnp.float32, mesh=mesh).layers[0].attention
        for mesh in (None, make_mesh((1, 4)))
    )
    assert four.expert_mesh is not None
    given = tokens(9)[None], positions.astype(np.int32), None
    assert difference(call(four, *given)[0], call(one, *given)[0]) <= BOUND
