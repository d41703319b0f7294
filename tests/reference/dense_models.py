"""Tiny configurations of dense models."""

from tests.reference.architecture import Architecture, dense

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 5000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
GEMMA_ROPES = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 500.0},
    "full_attention": {"rope_type": "linear", "rope_theta": 5000.0, "factor": 4.0},
}
GEMMA3 = {
    "intermediate_size": 96,
    "head_dim": 32,
    "query_pre_attn_scalar": 20,
    "sliding_window": 8,
    "layer_types": ["sliding_attention", "full_attention"],
    "rope_parameters": GEMMA_ROPES,
    "pad_token_id": 0,
}
GEMMA4 = {
    "intermediate_size": 96,
    "head_dim": 16,
    "global_head_dim": 32,
    "sliding_window": 6,
    "layer_types": ["sliding_attention", "full_attention"],
    "hidden_size_per_layer_input": 0,
    "final_logit_softcapping": 20.0,
    "rope_parameters": {
        "sliding_attention": {"rope_type": "default", "rope_theta": 5000.0},
        "full_attention": {
            "rope_type": "proportional",
            "rope_theta": 20000.0,
            "partial_rotary_factor": 0.25,
        },
    },
    "pad_token_id": 0,
}
SIGLIP = {
    "model_type": "siglip_vision_model",
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_attention_heads": 2,
    "num_hidden_layers": 1,
    "image_size": 16,
    "patch_size": 4,
}

# The factor of queries grows within the prompt.
MINISTRAL = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 64.0,
    "original_max_position_embeddings": 6,
    "max_position_embeddings": 512,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.5,
}
# The prompt is longer than the original context, so that the long factors apply.
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 5000.0,
    "partial_rotary_factor": 0.5,
    "short_factor": [1.0, 1.1, 1.2, 1.3],
    "long_factor": [1.0, 1.5, 3.0, 20.0],
}
PIXTRAL = {
    "model_type": "pixtral",
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
    "head_dim": 16,
    "image_size": 8,
    "patch_size": 4,
}
# Those of `GRANITE` without experts.
FACTORS = {
    "embedding_multiplier": 3.0,
    "attention_multiplier": 0.2,
    "residual_multiplier": 0.7,
    "logits_scaling": 2.0,
}

DENSE_MODELS = {
    "llama": Architecture(
        "llama", dense(intermediate_size=96, rope_parameters=LLAMA3, rms_norm_eps=1e-5)
    ),
    "mistral": Architecture("mistral", dense(intermediate_size=96, head_dim=32, sliding_window=8)),
    "qwen2": Architecture(
        "qwen2",
        dense(
            intermediate_size=96,
            use_sliding_window=True,
            sliding_window=8,
            max_window_layers=1,
            tie_word_embeddings=True,
        ),
    ),
    "qwen3": Architecture("qwen3", dense(intermediate_size=96, head_dim=32)),
    "gemma3": Architecture(
        "gemma3",
        {
            "text_config": dense() | GEMMA3,
            "vision_config": SIGLIP,
            "mm_tokens_per_image": 4,
        },
        model="Gemma3ForConditionalGeneration",
    ),
    "gemma3_text": Architecture(
        "gemma3_text",
        dense()
        | GEMMA3
        | {
            "final_logit_softcapping": 2.0,
            "attention_bias": True,
            "tie_word_embeddings": False,
        },
    ),
    "gemma4_dense": Architecture(
        "gemma4",
        {
            "text_config": dense()
            | GEMMA4
            | {"attention_k_eq_v": True, "num_global_key_value_heads": 1}
        },
        model="Gemma4ForConditionalGeneration",
    ),
    "gemma4_edge": Architecture(
        "gemma4",
        {
            "text_config": dense(num_hidden_layers=5)
            | GEMMA4
            | {
                "layer_types": ["sliding_attention", *GEMMA4["layer_types"] * 2],
                "hidden_size_per_layer_input": 16,
                "vocab_size_per_layer_input": 64,
                "vocab_size": 64,
                "num_kv_shared_layers": 2,
                "use_double_wide_mlp": True,
                "intermediate_size": 32,
            }
        },
        prompt=(1, 16),
        model="Gemma4ForConditionalGeneration",
    ),
    "gemma4_edge-variant": Architecture(
        "gemma4_text",
        dense(num_hidden_layers=4)
        | GEMMA4
        | {
            "layer_types": GEMMA4["layer_types"] * 2,
            "hidden_size_per_layer_input": 16,
            "vocab_size_per_layer_input": 128,
            "num_kv_shared_layers": 2,
            "attention_k_eq_v": True,
            "num_global_key_value_heads": 1,
        },
    ),
    "gemma4_unified": Architecture(
        "gemma4_unified_text",
        {n: v for n, v in (dense() | GEMMA4).items() if n != "hidden_size_per_layer_input"}
        | {"attention_k_eq_v": True, "num_global_key_value_heads": 1},
    ),
    "gemma4_dense_text": Architecture("gemma4_text", dense() | GEMMA4 | {"attention_bias": True}),
    "exaone4": Architecture(
        "exaone4",
        dense(
            intermediate_size=96,
            sliding_window=8,
            sliding_window_pattern=2,
            rope_parameters=LLAMA3,
        ),
    ),
    "exaone4-full": Architecture(
        "exaone4",
        dense(
            intermediate_size=96,
            sliding_window=None,
            layer_types=["full_attention"] * 2,
            tie_word_embeddings=True,
        ),
    ),
    "exaone4_5": Architecture(
        "exaone4_5",
        {
            "text_config": dense(
                intermediate_size=96,
                model_type="exaone4",
                sliding_window=8,
                sliding_window_pattern=2,
            ),
            "vision_config": {
                "depth": 1,
                "hidden_size": 16,
                "intermediate_size": 16,
                "num_heads": 2,
                "num_key_value_heads": 2,
                "out_hidden_size": 64,
                "patch_size": 4,
                "fullatt_block_indexes": [0],
            },
        },
        model="Exaone4_5_ForConditionalGeneration",
    ),
    "smollm3": Architecture(
        "smollm3",
        dense(
            intermediate_size=96,
            use_sliding_window=True,
            sliding_window=8,
            no_rope_layer_interval=2,
        ),
    ),
    "ministral3": Architecture(
        "mistral3",
        {
            "text_config": dense(
                model_type="ministral3",
                intermediate_size=96,
                head_dim=32,
                sliding_window=10,
                rope_parameters=MINISTRAL,
            ),
            "vision_config": PIXTRAL,
            "tie_word_embeddings": False,
        },
        model="Mistral3ForConditionalGeneration",
    ),
    "ministral3_text": Architecture(
        "ministral3", dense(intermediate_size=96, head_dim=32, rope_parameters=MINISTRAL)
    ),
    "mistral3": Architecture(
        "mistral3",
        {
            "text_config": dense(
                model_type="mistral", intermediate_size=96, head_dim=32, sliding_window=None
            ),
            "vision_config": PIXTRAL,
            "tie_word_embeddings": False,
        },
        model="Mistral3ForConditionalGeneration",
    ),
    "phi3": Architecture(
        "phi3",
        dense(
            intermediate_size=96,
            original_max_position_embeddings=8,
            sliding_window=10,
            rope_parameters=LONGROPE,
        ),
    ),
    "granite": Architecture("granite", dense(**FACTORS, intermediate_size=96, attention_bias=True)),
    "granitehybrid": Architecture(
        "granitemoehybrid",
        dense(
            **FACTORS,
            intermediate_size=96,
            num_local_experts=0,
            num_experts_per_tok=0,
            shared_intermediate_size=96,
            layer_types=["linear_attention", "full_attention"],
            mamba_n_heads=8,
            mamba_n_groups=2,
            mamba_d_state=16,
            mamba_d_head=16,
            mamba_chunk_size=32,
        ),
    ),
    "olmo2": Architecture("olmo2", dense(intermediate_size=96, attention_bias=True)),
    "olmo3": Architecture(
        "olmo3",
        dense(
            intermediate_size=96,
            sliding_window=6,
            layer_types=["sliding_attention", "full_attention"],
            rope_parameters={
                "sliding_attention": {"rope_type": "default", "rope_theta": 5000.0},
                "full_attention": {
                    "rope_type": "yarn",
                    "rope_theta": 5000.0,
                    "factor": 4.0,
                    "original_max_position_embeddings": 128,
                    "attention_factor": 1.3,
                },
            },
        ),
    ),
    "seed_oss": Architecture(
        "seed_oss", dense(intermediate_size=96, head_dim=32, attention_out_bias=True)
    ),
    "apertus": Architecture(
        "apertus",
        dense(
            intermediate_size=96, rope_parameters={**LLAMA3, "rope_theta": 10000.0, "factor": 8.0}
        ),
    ),
}
