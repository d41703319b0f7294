"""All architectures: the tables by kind of mixer, published spellings, and variants."""

import dataclasses
from typing import Any

from tests.reference.architecture import YARN
from tests.reference.dense_models import DENSE_MODELS
from tests.reference.grouped_query_models import GROUPED_QUERY_MODELS
from tests.reference.latent_models import GLM5_NEXT, LATENT_MODELS
from tests.reference.recurrent_models import RECURRENT_MODELS

PUBLISHED_NEMOTRON = {
    "layers_block_type": None,
    "hybrid_override_pattern": "M*E-",
    "num_hidden_layers": 4,
}
PUBLISHED_NEXT = {"layer_types": None, "full_attention_interval": 2}
ARCHITECTURES = GROUPED_QUERY_MODELS | LATENT_MODELS | RECURRENT_MODELS | DENSE_MODELS
ARCHITECTURES |= {
    f"{name}-published": dataclasses.replace(ARCHITECTURES[name], edits=edits, old_rope=old_rope)
    for name, edits, old_rope in (
        ("qwen3_moe", {}, True),
        ("qwen3_next", PUBLISHED_NEXT, True),
        ("nemotron_h", PUBLISHED_NEMOTRON, False),
        ("glm4_moe", {}, True),
        ("mixtral", {}, True),
    )
}

# Fields that change numbers, each with another value than in the tiny models above.
VARIANTS: dict[str, dict[str, Any]] = {
    "qwen3_moe": {
        "num_hidden_layers": 3,
        "decoder_sparse_step": 2,
        "attention_bias": True,
        "norm_topk_prob": False,
        "tie_word_embeddings": True,
        "rope_parameters": {"rope_type": "linear", "rope_theta": 5000.0, "factor": 2.0},
    },
    "qwen3_next": {
        "attention_bias": True,
        "norm_topk_prob": False,
        "mlp_only_layers": [0],
        "linear_num_key_heads": 4,
        "linear_conv_kernel_dim": 3,
        "tie_word_embeddings": True,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 5000.0,
            "partial_rotary_factor": 0.5,
        },
    },
    "qwen3_5_moe_text": {
        "attention_bias": True,
        "linear_num_key_heads": 1,
        "linear_value_head_dim": 32,
        "tie_word_embeddings": True,
    },
    "nemotron_h": {
        "use_bias": True,
        "mlp_bias": True,
        "attention_bias": True,
        "mamba_proj_bias": True,
        "use_conv_bias": False,
        "norm_topk_prob": False,
        "n_groups": 1,
        "time_step_limit": [0.3, 0.9],
        "tie_word_embeddings": True,
    },
    "mixtral": {"sliding_window": 8, "tie_word_embeddings": True},
    "deepseek_v3": {
        "q_lora_rank": None,
        "n_shared_experts": 2,
        "rope_interleave": False,
        "norm_topk_prob": False,
        "first_k_dense_replace": 0,
        "num_hidden_layers": 2,
        "attention_bias": True,
        "rope_parameters": YARN | {"mscale": 0.7, "mscale_all_dim": 0.5},
    },
    "glm4_moe": {
        "use_qk_norm": False,
        "attention_bias": False,
        "n_group": 2,
        "topk_group": 1,
        "norm_topk_prob": False,
        "n_shared_experts": 2,
        "num_hidden_layers": 2,
    },
    "minimax_m2": {
        "rotary_dim": 4,
        "partial_rotary_factor": 0.25,
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 5000.0,
            "partial_rotary_factor": 0.25,
            "factor": 4.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 32,
        },
    },
    "llama4_text": {
        "use_qk_norm": False,
        "attn_temperature_tuning": False,
        "num_experts_per_tok": 2,
        "interleave_moe_layer_step": 1,
        "num_hidden_layers": 2,
        "attention_bias": True,
        "no_rope_layer_interval": 2,
    },
    "gpt_oss": {
        "attention_bias": False,
        "layer_types": ["full_attention", "sliding_attention"],
        "sliding_window": 4,
        "num_experts_per_tok": 3,
        "rope_parameters": {"rope_type": "default", "rope_theta": 5000.0},
    },
    "laguna": {
        "gating": "per-element",
        "attention_bias": True,
        "moe_router_logit_softcapping": 0.0,
        "tie_word_embeddings": True,
    },
    "cohere2_moe": {
        "rms_norm_eps": 1e-3,
        "expert_selection_fn": "softmax",
        "shared_expert_combination_strategy": "sum",
        "prefix_dense_sliding_window_pattern": 2,
        "attention_bias": True,
        "tie_word_embeddings": False,
    },
    "mimo_v2_flash": {
        "n_group": 2,
        "topk_group": 1,
        "norm_topk_prob": False,
        "routed_scaling_factor": 2.5,
        "attention_bias": True,
        "attention_value_scale": None,
        "tie_word_embeddings": True,
    },
    "glm5_next": {
        "text_config": GLM5_NEXT
        | {
            "num_hidden_layers": 4,
            "layer_types": ["indexed_attention", "linear_attention"] * 2,
            "mlp_layer_types": ["sparse"] * 4,
            "linear_lower_bound": None,
            "attention_bias": True,
            "norm_topk_prob": False,
            "n_group": 2,
            "topk_group": 1,
            "index_kpool": 2,
            "tie_word_embeddings": True,
        },
        "tie_word_embeddings": True,
    },
    "olmoe": {
        "clip_qkv": None,
        "norm_topk_prob": True,
        "attention_bias": True,
        "num_key_value_heads": 1,
    },
}
ARCHITECTURES |= {
    f"{name}-variant": dataclasses.replace(
        ARCHITECTURES[name], fields=ARCHITECTURES[name].fields | fields
    )
    for name, fields in VARIANTS.items()
}
