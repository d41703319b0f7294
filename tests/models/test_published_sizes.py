"""Test families at the sizes that their configuration classes document.

``published_configurations.json`` holds the defaults of each class of transformers 5.23.0 or 5.24.0.
The defaults of dots.llm1 have no numbers of experts, and those of GLM-4.5V no width of heads: their
entries have the values of rednote-hilab/dots.llm1.inst and of zai-org/GLM-4.5V for these. Those of
Qwen3-Omni have 28 heads, which do not divide its width: its entry has the widths of
Qwen/Qwen3-Omni-30B-A3B-Instruct. The
defaults of Gemma 4 have no experts: its entry holds the values of google/gemma-4-26B-A4B-it. Those
of Step-3.7 have no windows and no limits: its entry holds the values of stepfun-ai/Step-3.7-Flash,
as transformers writes them. Those of Nemotron-H have widths that 16 does not divide: its entry has
the values of nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B, whose architecture Nemotron-3.5 Lightning has.
The entries of Laguna and MiMo-V2 are defaults of transformers 5.24.0. That of Cohere2-MoE has the
sizes of CohereLabs/North-Mini-Code-1.0.
"""

import json

import jax
import numpy as np
import pytest
from support.files.given import CHECKPOINTS
from support.files.resized import write_resized

from jax_nvfp4_moe import CheckpointError, load_model
from jax_nvfp4_moe.checkpoint.folder import merge_text_config, read_config
from jax_nvfp4_moe.models.loading import find_architecture

CONFIGURATIONS = json.loads((CHECKPOINTS / "published_configurations.json").read_text())
# Fields that order the layers. The small checkpoints decide them.
OF_LAYERS = (
    "num_hidden_layers",
    "layer_types",
    "hybrid_override_pattern",
    "indexer_types",
    "mlp_layer_types",
    "mlp_only_layers",
    "first_k_dense_replace",
    "num_dense_layers",
    "moe_layer_end_index",
    "swiglu_limits",
    "swiglu_limits_shared",
    "model_type",
)
# Smaller sizes. The numbers of experts suffice for the routers' groups and top-k.
FEWER = {
    "num_experts": 32,
    "num_local_experts": 4,
    "moe_num_experts": 8,
    "n_routed_experts": 16,
    "vocab_size": 256,
}


def given(name):
    return CHECKPOINTS / f"{name}-modelopt-w4a16"


def small_config(name):
    return merge_text_config(read_config(given(name)))


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_the_documented_configuration_is_read(name):
    """The reader of the family's files reads all layers and experts of the configuration."""
    published = CONFIGURATIONS[name]
    row = find_architecture(small_config(name))
    config = row.read_config(published)
    assert config.num_layers == published["num_hidden_layers"]
    assert config.hidden == published["hidden_size"]
    assert config.vocab_size == published["vocab_size"]
    names = ("num_experts", "num_local_experts", "moe_num_experts", "n_routed_experts")
    experts = config.experts.count if name == "nemotron_h" else config.num_experts
    assert experts == next(published[n] for n in names if n in published)
    assert config.tied == published["tie_word_embeddings"]


# Fields without which another value is taken than that of the published configuration. The sizes of
# heads follow from other fields, where a file leaves them out. The entries of Gemma 4, Step-3.7 and
# Nemotron-H hold the values of a model, not the defaults of a class.
OTHER_DEFAULTS = {
    "ernie4_5_moe": {"num_key_value_heads"},
    "lfm2_moe": {"num_key_value_heads"},
    "mistral4": {"q_lora_rank"},
    "bailing_hybrid": {"linear_head_dim"},
    "minimax_m3": {"num_key_value_heads", "rotary_dim"},
    "gemma4": {"attention_k_eq_v", "final_logit_softcapping", "head_dim", "num_key_value_heads"}
    | {"num_global_key_value_heads", "sliding_window", "enable_moe_block"},
    "cohere2_moe": {"expert_selection_fn", "layer_types", "logit_scale", "mlp_layer_types"}
    | {"norm_topk_prob", "num_key_value_heads", "prefix_dense_intermediate_size"}
    | {"rms_norm_eps", "rope_parameters"},
    "step3p7": {"layer_types", "moe_router_scaling_factor", "num_sliding_attention_heads"}
    | {"rope_parameters", "swiglu_limits", "swiglu_limits_shared"},
    "nemotron_h": {"mamba_num_heads", "num_key_value_heads", "routed_scaling_factor"},
    "hy_v3": {"num_key_value_heads"},
    "solar_open": {"num_key_value_heads"},
    "glm4v_moe": {"num_key_value_heads"},
    "phimoe": {"num_key_value_heads"},
    "qwen3_omni_moe": {"head_dim", "num_key_value_heads"},
}


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_a_field_that_is_left_out_has_its_documented_value(name):
    """Files may leave out fields that have the default of the family's configuration class."""
    published = CONFIGURATIONS[name]
    read = find_architecture(small_config(name)).read_config
    config, other, same = read(published), set(), 0
    for field in published:
        try:
            found = read({key: value for key, value in published.items() if key != field})
        except CheckpointError:  # the field has no default
            continue
        same += found == config
        other |= set() if found == config else {field}
    assert other == OTHER_DEFAULTS.get(name, set())
    assert same > 8


# The defaults of the configuration classes of transformers 5.23.0 in families without an entry.
DEFAULTS = {
    "qwen3moe": {
        "rms_norm_eps": 1e-6,
        "rope_parameters": {"rope_theta": 10000.0},
        "attention_bias": False,
        "use_sliding_window": False,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "norm_topk_prob": False,
    },
    "mixtral-window": {"rms_norm_eps": 1e-5, "rope_parameters": {"rope_theta": 1e6}},
    "olmoe-bias": {
        "num_key_value_heads": 4,  # as many as there are query heads
        "rms_norm_eps": 1e-5,
        "rope_parameters": {"rope_theta": 10000.0},
        "attention_bias": False,
        "norm_topk_prob": False,
    },
    "deepseek_v3-direct": {
        "rms_norm_eps": 1e-6,
        "n_shared_experts": 1,
        "first_k_dense_replace": 3,
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.5,
        "rope_interleave": True,
        "attention_bias": False,
        "rope_parameters": {"rope_theta": 10000.0},
    },
    "glm4_moe-groups": {
        "rms_norm_eps": 1e-5,
        "rope_parameters": {"rope_theta": 10000.0, "partial_rotary_factor": 0.5},
        "attention_bias": False,
        "use_qk_norm": False,
        "n_shared_experts": 1,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.0,
    },
    "minimax_m2": {
        "rms_norm_eps": 1e-6,
        "rope_parameters": {"rope_theta": 5e6},
        "head_dim": 128,
    },
    "gpt_oss": {
        "rms_norm_eps": 1e-5,
        "sliding_window": 128,
        "attention_bias": True,
        "layer_types": ["sliding_attention", "full_attention"],
        "max_position_embeddings": 131072,
    },
    "qwen3_next": {
        "rms_norm_eps": 1e-6,
        "num_key_value_heads": 2,
        "head_dim": 256,
        "max_position_embeddings": 32768,
        "attention_bias": False,
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 32,
        "decoder_sparse_step": 1,
        "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512,
        "norm_topk_prob": True,
        "mlp_only_layers": [],
        "layer_types": ["linear_attention"] * 2,
        "rope_parameters": {"rope_theta": 10000.0, "partial_rotary_factor": 0.25},
    },
    "ministral3": {
        "rms_norm_eps": 1e-5,
        "head_dim": 128,
        "sliding_window": None,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 1e6,
            "factor": 16.0,
            "original_max_position_embeddings": 16384,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "mscale_all_dim": 1.0,
            "mscale": 1.0,
            "llama_4_scaling_beta": 0.1,
        },
    },
    "phi3": {
        "num_key_value_heads": 4,  # as many as there are query heads
        "rms_norm_eps": 1e-5,
        "original_max_position_embeddings": 4096,
        "sliding_window": None,
    },
    "granite": {
        "num_key_value_heads": 4,
        "rms_norm_eps": 1e-6,
        "attention_bias": False,
        "mlp_bias": False,
        "embedding_multiplier": 1.0,
        "logits_scaling": 1.0,
        "residual_multiplier": 1.0,
        "attention_multiplier": 1.0,
        "rope_parameters": {"rope_theta": 10000.0},
    },
    "olmo2": {
        "num_key_value_heads": 4,
        "rms_norm_eps": 1e-5,
        "attention_bias": False,
        "rope_parameters": {"rope_theta": 10000.0},
    },
    "olmo3": {
        "num_key_value_heads": 4,
        "rms_norm_eps": 1e-5,
        "attention_bias": False,
        "sliding_window": 4096,
        "layer_types": ["sliding_attention"] * 2,
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 500000.0},
            "full_attention": {"rope_type": "default", "rope_theta": 500000.0},
        },
    },
    "seed_oss": {
        "rms_norm_eps": 1e-6,
        "attention_bias": True,
        "attention_out_bias": False,
        "mlp_bias": False,
        "head_dim": 128,
        "rope_parameters": {"rope_theta": 10000.0},
    },
    "apertus": {
        "num_key_value_heads": 4,
        "hidden_act": "xielu",
        "rms_norm_eps": 1e-5,
        "attention_bias": False,
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 12000000.0,
            "factor": 8.0,
            "original_max_position_embeddings": 8192,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
        },
    },
}


@pytest.mark.parametrize("name", DEFAULTS)
def test_a_field_that_is_left_out_has_the_default_of_its_class(name):
    defaults = {"hidden_act": "silu", "tie_word_embeddings": False} | DEFAULTS[name]
    config = small_config(name) | defaults
    for older in ("partial_rotary_factor", "rope_theta", "rope_scaling"):
        config.pop(older, None)
    read = find_architecture(config).read_config
    for field in defaults:
        without = {key: value for key, value in config.items() if key != field}
        assert read(without) == read(config), field


@pytest.mark.slow
@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_a_model_of_the_documented_widths_runs(name, tmp_path):
    """A default model with these widths, heads and top-k runs, with few layers and experts."""
    published = {n: v for n, v in CONFIGURATIONS[name].items() if n not in OF_LAYERS}
    fewer = {n: min(v, published[n]) for n, v in FEWER.items() if n in published}
    # Without it, all layers have the published number of heads.
    fewer |= {n: None for n in ("num_attention_heads_per_layer",) if n in published}
    write_resized(given(name), tmp_path / "m", **published | fewer)
    model = load_model(tmp_path / "m")
    assert model.config.hidden == published["hidden_size"]
    ids = np.arange(12, dtype=np.int32)[None] * 7 % 256
    logits = jax.jit(lambda model, ids: model(ids))(model, ids)
    assert logits.shape == (1, 12, 256)
    assert np.isfinite(logits).all()
    assert np.asarray(logits).std() > 0
