"""Test models with grouped-query attention: spellings of their files, and their configs."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.files.checkpoint_edits import edited
from support.files.given import CHECKPOINTS, copy_with_config, reference_tensors

from jax_nvfp4_moe import CheckpointError, load_model, load_moe
from jax_nvfp4_moe.models import glm4_moe, minimax_m2, mixtral, olmoe, qwen3_moe
from jax_nvfp4_moe.nn.attention.grouped_query import GQAConfig

MIXTRAL, OLMOE, GLM, MINIMAX = FOLDERS = [
    CHECKPOINTS / f"{name}-modelopt-w4a16"
    for name in ("mixtral-window", "olmoe-bias", "glm4_moe-groups", "minimax_m2")
]
READERS = dict(zip(FOLDERS, (mixtral, olmoe, glm4_moe, minimax_m2), strict=True))
EXACT = {"dtype": jnp.float32, "backend": "reference"}
RENAMED = {
    "block_sparse_moe": "mlp",
    ".w1.": ".gate_proj.",
    ".w3.": ".up_proj.",
    ".w2.": ".down_proj.",
}


def read(folder, **changes):
    """Return the config of `folder` as its architecture reads it. None removes a field."""
    config = json.loads((folder / "config.json").read_text()) | changes
    return READERS[folder].read_config({n: v for n, v in config.items() if v is not None})


def rename(tensors):
    """Rename tensors as transformers 5 does in memory."""
    for name in list(tensors):
        new = name
        for old, other in RENAMED.items():
            new = new.replace(old, other)
        tensors[new] = tensors.pop(name)


@pytest.mark.parametrize("folder", [MIXTRAL, MINIMAX], ids=["mixtral", "minimax"])
def test_both_spellings_of_the_expert_block(folder, tmp_path):
    other = edited(tmp_path, folder.name, rename)
    x = jnp.asarray(reference_tensors(folder)["layers.0.moe.input"])
    np.testing.assert_array_equal(load_moe(other, 0, **EXACT)(x), load_moe(folder, 0, **EXACT)(x))
    load_model(other, **EXACT)


def test_a_tensor_that_is_left_over_is_named_in_either_spelling(tmp_path):
    def add(tensors):
        tensors["model.layers.0.block_sparse_moe.gate.bias"] = np.zeros(12, np.float32)

    with pytest.raises(CheckpointError, match=r"gate\.bias.*not part of the model"):
        load_moe(edited(tmp_path, MIXTRAL.name, add), 0)


def test_defaults_are_those_of_transformers():
    """Older files leave out fields of norms, rotation and routers."""
    plain = {"rope_parameters": None, "rms_norm_eps": None, "partial_rotary_factor": None}
    bases = {}
    for folder, eps in zip(FOLDERS, (1e-5, 1e-5, 1e-5, 1e-6), strict=True):
        config = read(folder, **plain)
        assert config.eps == config.attention.eps == eps
        frequencies = config.attention.rope.frequencies
        bases[folder] = frequencies[1] ** -len(frequencies)
    assert bases[MIXTRAL] == pytest.approx(1e6)
    assert bases[MINIMAX] == pytest.approx(5e6)
    assert bases[OLMOE] == pytest.approx(1e4)
    assert bases[GLM] == pytest.approx(1e4)
    assert not read(OLMOE, norm_topk_prob=None).router.renormalize
    assert read(GLM, norm_topk_prob=None).router.renormalize
    assert read(MIXTRAL, sliding_window=None).attention.window is None


def test_how_many_channels_rotate():
    def rotated(folder, **changes):
        return 2 * len(read(folder, **changes).attention.rope.frequencies)

    plain = {"rope_parameters": None, "partial_rotary_factor": None}
    assert rotated(GLM) == 4
    assert rotated(GLM, **plain) == 8
    assert rotated(MINIMAX) == rotated(MINIMAX, **plain) == 8
    assert rotated(MINIMAX, **plain, rotary_dim=None) == 16
    assert rotated(MINIMAX, **plain, rotary_dim=4) == 4
    assert rotated(MINIMAX, rotary_dim=4) == 8  # the factor takes precedence


def test_a_window_of_qwen_needs_its_switch():
    config = json.loads((CHECKPOINTS / "qwen3_moe-window-modelopt-w4a16/config.json").read_text())
    assert qwen3_moe.read_config(config).attention.window == 6
    off = config | {"use_sliding_window": False}
    assert qwen3_moe.read_config(off).attention.window is None


def test_clipping_bounds_queries_keys_and_values():
    model = load_model(OLMOE, **EXACT)
    clip = model.layers[0].attention.config.clip
    cache = model.init_cache(1, 8)
    _, cache = jax.jit(lambda m, i, c: m(i, c))(model, jnp.arange(8, dtype=jnp.int32)[None], cache)
    assert float(jnp.abs(cache.layers[0]["v"]).max()) == clip


@pytest.mark.parametrize(
    ("folder", "changes", "message"),
    [
        (MIXTRAL, {"sliding_window": -1}, "sliding_window: expected a positive integer"),
        (
            MIXTRAL,
            {"partial_rotary_factor": 0.5},
            "partial_rotary_factor: expected 1, because this architecture",
        ),
        (
            MIXTRAL,
            {"num_key_value_heads": 3},
            "num_attention_heads: expected a multiple of 3 key heads, got 4",
        ),
        (MIXTRAL, {"hidden_act": "relu"}, "hidden_act: 'relu' is not supported"),
        (OLMOE, {"clip_qkv": -2.0}, "clip_qkv: expected a positive number, got -2.0"),
        (OLMOE, {"head_dim": 8}, "head_dim: expected hidden_size 64 divided by 4 heads, got 8"),
        (
            OLMOE,
            {"num_experts_per_tok": 9},
            "num_experts_per_tok: expected at most 6 experts, got 9",
        ),
        (
            GLM,
            {"topk_group": 5},
            "num_experts_per_tok: 3 experts cannot be chosen from 5 of 4 groups",
        ),
        (GLM, {"scoring_func": "softmax"}, "scoring_func: 'softmax' is not supported"),
        (GLM, {"use_qk_norm": False}, "q_norm.weight.*not part of the model"),
        (MINIMAX, {"rotary_dim": -4}, "rotary_dim: expected a positive integer, got -4"),
        (MINIMAX, {"use_qk_norm": False}, "use_qk_norm: False is not supported"),
        (MINIMAX, {"qk_norm_type": "per_head"}, "qk_norm_type: 'per_head' is not supported"),
        (MINIMAX, {"shared_intermediate_size": 48}, "shared_intermediate_size: 48 is not"),
        (MINIMAX, {"attn_type_list": [1, 0]}, "attn_type_list: expected 1 for every layer, got 0"),
        (MINIMAX, {"scoring_func": "softmax"}, "scoring_func: 'softmax' is not supported"),
    ],
)
def test_configs_that_no_model_fits(tmp_path, folder, changes, message):
    with pytest.raises(CheckpointError, match=message):
        load_model(copy_with_config(folder, tmp_path / "m", **changes))


def test_a_gated_layer_has_no_option_that_would_be_ignored():
    sizes = {"hidden": 8, "num_heads": 2, "num_kv_heads": 1, "head_dim": 4, "eps": 1e-6}
    assert GQAConfig(**sizes, rope=None, gated=True, normalize="rotated").gated
    for option in (
        {"clip": 1.0},
        {"interleaved": True},
        {"normalize": "whole"},
        {"normalize_values": True},
        {"values_from_keys": True},
    ):
        with pytest.raises(ValueError, match="gated: expected False"):
            GQAConfig(**sizes, rope=None, gated=True, **option)
