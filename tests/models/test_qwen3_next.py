"""Test configs and padding of Qwen3-Next and Qwen3.5-MoE; test_architectures checks numbers."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.files.given import CHECKPOINTS, reference_tensors
from support.models.architecture import KERNELS

from jax_nvfp4_moe import CheckpointError, load_model, load_moe
from jax_nvfp4_moe.checkpoint.folder import merge_text_config
from jax_nvfp4_moe.models import qwen3_5_moe, qwen3_next

NEXT = CHECKPOINTS / "qwen3_next-modelopt-w4a16"
# Three layers, one of them dense. Its options: YaRN, biases, a tied head, no renormalization, 3
# value heads per key head, values wider than keys, a convolution of 3 taps, an epsilon of 1e-3.
OPTIONS = CHECKPOINTS / "qwen3_next-options-modelopt-w4a16"
QWEN35 = CHECKPOINTS / "qwen3_5_moe-modelopt-w4a16"
step = jax.jit(lambda model, ids, cache, lengths: model(ids, cache, lengths=lengths))


def test_padding_leaves_states_as_they_are():
    """The row without tokens keeps states, keys and values bit for bit. The other row goes on."""
    model = load_model(OPTIONS, **KERNELS)
    ids = jnp.tile(jnp.asarray(reference_tensors(OPTIONS)["input_ids"], jnp.int32), (2, 1))
    _, cache = step(model, ids[:, :9], model.init_cache(2, 16), jnp.array([9, 9], jnp.int32))
    _, after = step(model, ids[:, 9:12], cache, jnp.array([0, 1], jnp.int32))
    for before, now in zip(cache.layers, after.layers, strict=True):
        for name in before:
            np.testing.assert_array_equal(now[name][0], before[name][0])
            assert np.abs(now[name][1] - before[name][1]).max() > 0


def config_of(folder, **changes):
    config = merge_text_config(json.loads((folder / "config.json").read_text())) | changes
    return {name: value for name, value in config.items() if value is not None}


def test_layers_that_attend():
    def attending(**changes):
        return qwen3_next.read_config(config_of(NEXT, **changes)).attention_layers

    assert attending() == {1}
    assert attending(layer_types=None, num_hidden_layers=9) == {3, 7}
    assert attending(layer_types=None, num_hidden_layers=9, full_attention_interval=3) == {2, 5, 8}
    assert attending(layer_types=["attention", "mamba"]) == {0}  # names in older files
    assert attending(layer_types=["full_attention"] * 2) == {0, 1}


def test_dense_layers():
    config = config_of(NEXT, layer_types=None, num_hidden_layers=4, decoder_sparse_step=2)
    assert qwen3_next.read_config(config).dense_layers == {0, 2}
    config |= {"decoder_sparse_step": 1, "mlp_only_layers": [3]}
    assert qwen3_next.read_config(config).dense_layers == {3}
    assert qwen3_5_moe.read_config(config).dense_layers == frozenset()
    config |= {"norm_topk_prob": False}
    assert not qwen3_next.read_config(config).router.renormalize
    assert qwen3_5_moe.read_config(config).router.renormalize


def test_spellings_of_one_rotation():
    """A missing factor means a quarter of the channels. Sections of positions change nothing."""
    missing = {"partial_rotary_factor": None, "rope_parameters": None}
    theta = {"rope_theta": 10000.0}
    given = qwen3_next.read_config(config_of(NEXT)).attention.rope
    assert len(given.frequencies) == 32 // 4 // 2
    for changes in (
        missing | theta,
        missing | theta | {"partial_rotary_factor": 0.25},
        missing | {"rope_parameters": theta},
        {"rope_parameters": theta | {"mrope_section": [2, 1, 1], "mrope_interleaved": True}},
    ):
        assert qwen3_next.read_config(config_of(NEXT, **changes)).attention.rope == given
        assert qwen3_5_moe.read_config(config_of(QWEN35, **changes)).attention.rope == given


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"layer_types": ["full_attention"]},
            "layer_types: expected a list of 2 values .* got a list of 1",
        ),
        (
            {"layer_types": ["full_attention", "sliding_attention"]},
            "layer_types: expected a list of 2",
        ),
        ({"layer_types": "full_attention"}, "layer_types: expected a list of 2"),
        ({"layer_types": None, "full_attention_interval": 0}, "full_attention_interval"),
        (
            {"linear_num_value_heads": 3},
            "linear_num_value_heads: expected a multiple of 2 key heads, got 3",
        ),
        ({"hidden_act": "gelu"}, "hidden_act: 'gelu' is not supported"),
        ({"attn_output_gate": False}, "attn_output_gate: False is not supported"),
        ({"layer_scale": True}, "layer_scale: True is not supported"),
        (
            {"num_key_value_heads": 3},
            "num_attention_heads: expected a multiple of 3 key heads, got 4",
        ),
        ({"num_experts_per_tok": 7}, "num_experts_per_tok: expected at most 6 experts, got 7"),
        ({"linear_conv_kernel_dim": "4"}, "linear_conv_kernel_dim"),
        ({"rope_parameters": {"rope_type": "longrope"}}, "rope_type: 'longrope'"),
        ({"attention_bias": None, "linear_key_head_dim": 0}, "linear_key_head_dim"),
    ],
)
def test_configs_that_no_model_fits(changes, message):
    with pytest.raises(CheckpointError, match=message):
        qwen3_next.read_config(config_of(NEXT, **changes))


def test_load_moe_names_a_layer_without_experts():
    with pytest.raises(ValueError, match=r"layer: expected .* not in \[1\]; got 1"):
        load_moe(OPTIONS, 1)
