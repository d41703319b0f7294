"""Test configs of dense models as their owners publish them, and as older files spell them."""

import json
import logging

import numpy as np
import pytest
from support.files.checkpoint_edits import edited
from support.files.given import CHECKPOINTS, reference_tensors
from support.models.architecture import KERNELS, run

from jax_nvfp4_moe import load_model
from jax_nvfp4_moe.checkpoint.folder import merge_text_config
from jax_nvfp4_moe.models.config_keys import refuse_unread_keys
from jax_nvfp4_moe.models.loading import find_architecture

SLIDING, FULL = "sliding_attention", "full_attention"
QWEN_27B = {
    "architectures": ["Qwen3_5ForConditionalGeneration"],
    "model_type": "qwen3_5",
    "tie_word_embeddings": False,
    "text_config": {
        "attn_output_gate": True,
        "full_attention_interval": 4,
        "head_dim": 256,
        "hidden_size": 5120,
        "intermediate_size": 17408,
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 128,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 48,
        "linear_value_head_dim": 128,
        "mamba_ssm_dtype": "float32",
        "max_position_embeddings": 262144,
        "mtp_num_hidden_layers": 1,
        "mtp_use_dedicated_embeddings": False,
        "num_attention_heads": 24,
        "num_hidden_layers": 64,
        "num_key_value_heads": 4,
        "output_gate_type": "swish",
        "partial_rotary_factor": 0.25,
        "rope_parameters": {
            "mrope_interleaved": True,
            "mrope_section": [11, 11, 10],
            "partial_rotary_factor": 0.25,
            "rope_theta": 10000000,
            "rope_type": "default",
        },
        "vocab_size": 248320,
    },
}
# Published files of Gemma 3 leave out all that equals a default.
GEMMA3_4B = {
    "architectures": ["Gemma3ForConditionalGeneration"],
    "mm_tokens_per_image": 256,
    "model_type": "gemma3",
    "text_config": {
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "model_type": "gemma3_text",
        "num_hidden_layers": 34,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024,
    },
}
GEMMA3_27B = GEMMA3_4B | {
    "text_config": {
        "head_dim": 128,
        "hidden_size": 5376,
        "intermediate_size": 21504,
        "model_type": "gemma3_text",
        "num_attention_heads": 32,
        "num_hidden_layers": 62,
        "num_key_value_heads": 16,
        "query_pre_attn_scalar": 168,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024,
    }
}
GEMMA4_31B = {
    "architectures": ["Gemma4ForConditionalGeneration"],
    "model_type": "gemma4",
    "text_config": {
        "attention_k_eq_v": True,
        "enable_moe_block": False,
        "final_logit_softcapping": 30.0,
        "global_head_dim": 512,
        "head_dim": 256,
        "hidden_activation": "gelu_pytorch_tanh",
        "hidden_size": 5376,
        "hidden_size_per_layer_input": 0,
        "intermediate_size": 21504,
        "layer_types": ([SLIDING] * 5 + [FULL]) * 10,
        "max_position_embeddings": 262144,
        "model_type": "gemma4_text",
        "num_attention_heads": 32,
        "num_experts": None,
        "num_global_key_value_heads": 4,
        "num_hidden_layers": 60,
        "num_key_value_heads": 16,
        "num_kv_shared_layers": 0,
        "rope_parameters": {
            FULL: {
                "partial_rotary_factor": 0.25,
                "rope_theta": 1000000.0,
                "rope_type": "proportional",
            },
            SLIDING: {"rope_theta": 10000.0, "rope_type": "default"},
        },
        "sliding_window": 1024,
        "use_double_wide_mlp": False,
        "vocab_size": 262144,
        "vocab_size_per_layer_input": 262144,
    },
}
GEMMA4_E4B = {
    "architectures": ["Gemma4ForConditionalGeneration"],
    "model_type": "gemma4",
    "text_config": {
        **GEMMA4_31B["text_config"],
        "attention_k_eq_v": False,
        "hidden_size": 2560,
        "hidden_size_per_layer_input": 256,
        "intermediate_size": 10240,
        "layer_types": ([SLIDING] * 5 + [FULL]) * 7,
        "max_position_embeddings": 131072,
        "num_attention_heads": 8,
        "num_global_key_value_heads": None,
        "num_hidden_layers": 42,
        "num_key_value_heads": 2,
        "num_kv_shared_layers": 18,
        "sliding_window": 512,
    },
}
NEMOTRON_9B = {
    "architectures": ["NemotronHForCausalLM"],
    "attention_bias": False,
    "auto_map": {"AutoConfig": "configuration_nemotron_h.NemotronHConfig"},
    "chunk_size": 128,
    "conv_kernel": 4,
    "expand": 2,
    "head_dim": 128,
    "hidden_size": 4480,
    "hybrid_override_pattern": "M-M-M-MM-M-M-M*-M-M-M*-M-M-M-M*-M-M-M-M*-M-MM-M-M-M-M-M-",
    "intermediate_size": 15680,
    "layer_norm_epsilon": 1e-05,
    "mamba_head_dim": 80,
    "mamba_hidden_act": "silu",
    "mamba_num_heads": 128,
    "max_position_embeddings": 131072,
    "mlp_hidden_act": "relu2",
    "model_type": "nemotron_h",
    "n_groups": 8,
    "num_attention_heads": 40,
    "num_hidden_layers": 56,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-05,
    "sliding_window": None,
    "ssm_state_size": 128,
    "time_step_limit": [0.0, float("inf")],
    "vocab_size": 131072,
}
EXAONE_32B = {
    "architectures": ["Exaone4ForCausalLM"],
    "head_dim": 128,
    "hidden_size": 5120,
    "intermediate_size": 27392,
    "layer_types": ([SLIDING] * 3 + [FULL]) * 16,
    "max_position_embeddings": 131072,
    "num_attention_heads": 40,
    "num_hidden_layers": 64,
    "num_key_value_heads": 8,
    "rope_scaling": {
        "factor": 16.0,
        "high_freq_factor": 4.0,
        "low_freq_factor": 1.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
    "rope_theta": 1000000,
    "sliding_window": 4096,
    "sliding_window_pattern": "LLLG",
    "vocab_size": 102400,
}
SMOLLM3_3B = {
    "architectures": ["SmolLM3ForCausalLM"],
    "hidden_size": 2048,
    "intermediate_size": 11008,
    "layer_types": [FULL] * 36,
    "max_position_embeddings": 65536,
    "max_window_layers": 28,
    "no_rope_layer_interval": 4,
    "no_rope_layers": [1, 1, 1, 0] * 9,
    "num_attention_heads": 16,
    "num_hidden_layers": 36,
    "num_key_value_heads": 4,
    "rope_theta": 5000000.0,
    "sliding_window": None,
    "use_sliding_window": False,
    "vocab_size": 128256,
}


def read(config, **changes):
    """Return the sizes of a config, in which None removes a field."""
    config = {n: one for n, one in (merge_text_config(config) | changes).items() if one is not None}
    reader = find_architecture(config).read_config
    sizes = reader(config)
    refuse_unread_keys(config, sizes, reader)
    return sizes


def given(name):
    folder = CHECKPOINTS / f"{name}-modelopt-w4a16"
    return merge_text_config(json.loads((folder / "config.json").read_text()))


@pytest.mark.parametrize(
    ("config", "tied", "windows"),
    [
        (QWEN_27B, False, 0),
        (GEMMA3_4B, True, 29),
        (GEMMA3_27B, True, 52),
        (GEMMA4_31B, True, 50),
        (GEMMA4_E4B, True, 35),
        (NEMOTRON_9B, False, 0),
        (EXAONE_32B, False, 48),
        (SMOLLM3_3B, True, 0),
    ],
    ids=lambda value: value["architectures"][0] if isinstance(value, dict) else "",
)
def test_a_published_configuration_is_read(config, tied, windows):
    sizes, text = read(config), merge_text_config(config)
    assert (sizes.hidden, sizes.num_layers) == (text["hidden_size"], text["num_hidden_layers"])
    assert sizes.dense_intermediate == text["intermediate_size"]
    assert sizes.max_positions == text.get("max_position_embeddings", 131072)
    assert sizes.vocab_size == text.get("vocab_size", 262208)
    assert sizes.tied == tied
    attention = sizes.attention if isinstance(sizes.attention, tuple) else [sizes.attention]
    assert [one.window for one in attention if one.window] == [text.get("sliding_window")] * windows


def test_the_layers_of_qwen_27b():
    sizes = read(QWEN_27B)
    assert sizes.attention_layers == set(range(3, 64, 4))
    assert len(sizes.attention.rope.frequencies) == 32
    assert (sizes.delta.key_heads, sizes.delta.value_heads) == (16, 48)


def test_the_layers_of_gemma_3():
    sizes = read(GEMMA3_27B)
    assert [one.window is None for one in sizes.attention] == ([False] * 5 + [True]) * 10 + [
        False,
        False,
    ]
    sliding, full = sizes.attention[0], sizes.attention[5]
    assert sliding.scale == full.scale == 168**-0.5
    assert sliding.rope.frequencies[1] == pytest.approx(1e4 ** (-1 / 64))
    assert full.rope.frequencies[1] == pytest.approx(1e6 ** (-1 / 64) / 8)
    assert {one.scale for one in read(GEMMA3_4B).attention} == {256**-0.5}
    assert read(GEMMA3_4B).attention[0].head_dim == 256


def test_the_layers_of_gemma_4():
    sizes = read(GEMMA4_31B)
    sliding, full = sizes.attention[0], sizes.attention[5]
    assert (sliding.head_dim, sliding.num_kv_heads, sliding.values_from_keys) == (256, 16, False)
    assert (full.head_dim, full.num_kv_heads, full.values_from_keys) == (512, 4, True)
    assert sizes.logit_cap == 30.0
    apart = read(GEMMA4_31B, attention_k_eq_v=False).attention[5]
    assert (apart.num_kv_heads, apart.values_from_keys) == (16, False)


def test_the_layers_of_nemotron_9b():
    sizes = read(NEMOTRON_9B)
    assert [sizes.pattern.count(kind) for kind in "M*-E"] == [27, 4, 25, 0]
    assert sizes.experts is None


def test_layers_without_rotation():
    exaone, smollm = read(EXAONE_32B), read(SMOLLM3_3B)
    for sizes in (exaone, smollm):
        assert [one.rope is None for one in sizes.attention] == [False, False, False, True] * (
            sizes.num_layers // 4
        )
    assert read(EXAONE_32B, layer_types=None) == exaone
    assert read(SMOLLM3_3B, layer_types=None, no_rope_layers=None) == smollm
    # Without windows, all layers rotate.
    changes = {"layer_types": [FULL] * 64, "sliding_window_pattern": None}
    config = {**merge_text_config(EXAONE_32B), **changes, "sliding_window": None}
    plain = find_architecture(config).read_config(config)
    assert all(one.rope and one.window is None for one in plain.attention)
    windows = read(SMOLLM3_3B, layer_types=None, use_sliding_window=True, sliding_window=128)
    assert [one.window for one in windows.attention] == [None, None, None, 128] * 9


def test_spellings_of_the_rotations_of_gemma_3():
    """Older files have one base for each kind, and a scaling of the layers that see all keys."""
    config = given("gemma3")
    sizes = read(config)
    older = {"rope_theta": 5000.0, "rope_local_base_freq": 500.0}
    scaling = {"factor": 4.0, "type": "linear"}
    missing = {"rope_parameters": None, "rope_scaling": None}
    assert read(config, **missing | older | {"rope_scaling": scaling}) == sizes
    flat = {"rope_type": "linear", "factor": 4.0, "rope_theta": 5000.0}
    assert read(config, **missing | older | {"rope_parameters": flat}) == sizes
    nested = {FULL: {"rope_type": "linear", "factor": 4.0}, SLIDING: {"rope_type": "default"}}
    assert read(config, **older | {"rope_parameters": nested}) == sizes
    plain = read(config, **missing | older)
    assert plain.attention[0] == sizes.attention[0]
    assert plain.attention[1] != sizes.attention[1]


def test_the_factor_of_gemma_3_is_in_its_positions():
    config = given("gemma3")
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
    assert read(config).max_positions == config["max_position_embeddings"] == 512
    assert read(config, rope_parameters={FULL: yarn, SLIDING: {}}).max_positions == 256


def test_a_gemma_4_without_a_word_of_experts_is_dense():
    config = given("gemma4_dense")
    assert read(config, enable_moe_block=None) == read(config)


def test_the_layers_of_gemma_4_that_share_keys():
    """Each layer without keys attends to those of the last layer of its kind that has some."""
    sizes = read(given("gemma4_edge"))
    assert [sizes.shares(layer) for layer in range(5)] == [False, False, False, True, True]
    assert [sizes.hands_on(layer) for layer in range(5)] == [False, True, True, False, False]
    sizes = read(GEMMA4_E4B)
    assert [layer for layer in range(42) if sizes.shares(layer)] == list(range(24, 42))
    assert [layer for layer in range(42) if sizes.hands_on(layer)] == [22, 23]
    apart = read(given("gemma4_edge"), num_kv_shared_layers=None)
    assert not any(apart.shares(layer) or apart.hands_on(layer) for layer in range(5))


def test_keys_of_layers_that_share_those_of_others_are_left_out(tmp_path, caplog):
    """Published files hold them."""
    source = CHECKPOINTS / "gemma4_edge-modelopt-w4a16"
    stem = "model.language_model.layers"

    def change(tensors):
        for name in [name for name in tensors if name.startswith(f"{stem}.2.self_attn.")]:
            if ".k_" in name or ".v_" in name:
                tensors[name.replace(".2.", ".4.")] = tensors[name]

    folder = edited(tmp_path, source.name, change)
    caplog.set_level(logging.INFO, "jax_nvfp4_moe")
    ids = reference_tensors(source)["input_ids"].astype(np.int32)
    one, other = (run(load_model(path, **KERNELS), ids) for path in (source, folder))
    np.testing.assert_array_equal(one, other)
    assert "keys and values of layers that attend to those of others" in caplog.text
