"""Tiny configurations of models with delta nets, Mamba-2 or convolutions beside attention."""

from tests.reference.architecture import EXPERTS, GRANITE, MLA, VISION, Architecture, dense

DELTA = {
    "vocab_size": 64,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "head_dim": 32,
    "layer_types": ["linear_attention", "full_attention"],
    "num_hidden_layers": 2,
}
MAMBA = {
    "mamba_num_heads": 8,
    "mamba_head_dim": 16,
    "ssm_state_size": 16,
    "n_groups": 2,
    "chunk_size": 32,
    "head_dim": 16,
    "intermediate_size": 96,
    "moe_shared_expert_intermediate_size": 96,
    "n_routed_experts": 8,
    "routed_scaling_factor": 2.5,
}
OF_EXPERTS = ("moe_shared_expert_intermediate_size", "n_routed_experts", "routed_scaling_factor")
KIMI_LACKS = ("first_k_dense_replace", "n_routed_experts")

RECURRENT_MODELS = {
    "qwen3_next": Architecture(
        "qwen3_next",
        dense(
            **DELTA,
            **EXPERTS,
            intermediate_size=96,
            num_experts=6,
            shared_expert_intermediate_size=48,
        ),
        prompt=(1, 68),
    ),
    "qwen3_5_moe": Architecture(
        "qwen3_5_moe",
        {
            "text_config": dense(
                **DELTA, **EXPERTS, num_experts=4, shared_expert_intermediate_size=48
            ),
            "vision_config": VISION,
        },
        prompt=(1, 68),
        model="Qwen3_5MoeForConditionalGeneration",
    ),
    "qwen3_5_moe_text": Architecture(
        "qwen3_5_moe_text",
        dense(**DELTA, **EXPERTS, num_experts=6, shared_expert_intermediate_size=48),
        prompt=(1, 68),
    ),
    "qwen3_5": Architecture(
        "qwen3_5",
        {"text_config": dense(**DELTA, intermediate_size=96), "vision_config": VISION},
        prompt=(1, 68),
        model="Qwen3_5ForConditionalGeneration",
    ),
    "qwen3_5_text": Architecture(
        "qwen3_5_text",
        dense(
            **DELTA
            | {"num_hidden_layers": 3, "layer_types": ["full_attention", *DELTA["layer_types"]]},
            intermediate_size=96,
            attention_bias=True,
            tie_word_embeddings=True,
        ),
        prompt=(1, 68),
    ),
    "nemotron_h": Architecture(
        "nemotron_h",
        {k: v for k, v in dense(**MAMBA, **EXPERTS).items() if k != "num_hidden_layers"}
        | {"hybrid_override_pattern": "M*E-"},
        prompt=(1, 68),
    ),
    "nemotron_h-latent": Architecture(
        "nemotron_h",
        {k: v for k, v in dense(**MAMBA, **EXPERTS).items() if k != "num_hidden_layers"}
        | {
            "hybrid_override_pattern": "ME*E",
            "moe_latent_size": 32,
            "num_experts_per_tok": 3,
            "n_group": 2,
            "topk_group": 1,
        },
        prompt=(1, 48),
    ),
    "nemotron_h_dense": Architecture(
        "nemotron_h",
        {k: v for k, v in dense(**MAMBA).items() if k not in ("num_hidden_layers", *OF_EXPERTS)}
        | {"hybrid_override_pattern": "M-*-", "vocab_size": 64},
        prompt=(1, 68),
    ),
    "nemotron_h-odd": Architecture(
        "nemotron_h",
        {k: v for k, v in dense(**MAMBA, **EXPERTS).items() if k != "num_hidden_layers"}
        | {
            "hidden_size": 80,
            "hybrid_override_pattern": "E*",
            "moe_intermediate_size": 112,
            "n_routed_experts": 12,
            "num_experts_per_tok": 3,
        },
    ),
    "granitemoehybrid": Architecture(
        "granitemoehybrid",
        dense(
            **GRANITE,
            shared_intermediate_size=96,
            layer_types=["linear_attention", "full_attention"],
            mamba_n_heads=8,
            mamba_n_groups=2,
            mamba_d_state=16,
            mamba_d_head=16,
            mamba_chunk_size=32,
            time_step_limit=[0.3, 0.9],
        )
        | {"vocab_size": 64},
        prompt=(1, 68),
        stacked="rows",
    ),
    "qwen4_exp": Architecture(
        "qwen4_exp_text",
        dense(
            **EXPERTS,
            vocab_size=64,
            num_hidden_layers=2,
            layer_types=["linear_attention", "indexed_attention"],
            head_dim=16,
            shared_expert_intermediate_size=48,
            num_experts=4,
            linear_num_key_heads=2,
            linear_num_value_heads=4,
            linear_key_head_dim=16,
            linear_value_head_dim=16,
            hc_count=2,
            hc_lowrank=16,
            ple_layer_ids=[1],
            ple_embed_dim=64,
            ple_conv_kernel_size=3,
            ngram_size=3,
            heads_per_ngram=2,
            ngram_vocab_size_base=29,
            make_ngram_vocab_size_divisible_by=8,
            split_ngram_parts=4,
            indexer_n_heads=8,
            indexer_kv_heads=1,
            indexer_head_dim=16,
            indexer_budget=6,
            indexer_compress_ratio=3,
            output_gate_type="sigmoid",
            rope_parameters={
                "rope_type": "default",
                "rope_theta": 5000.0,
                "partial_rotary_factor": 0.5,
            },
        )
        | {"vocab_size": 64, "eos_token_id": 5},
        prompt=(1, 68),
    ),
    "lfm2_moe": Architecture(
        "lfm2_moe",
        dense(
            **EXPERTS,
            intermediate_size=96,
            num_experts=8,
            num_hidden_layers=3,
            num_dense_layers=1,
            routed_scaling_factor=1.5,
            layer_types=["conv", "full_attention", "conv"],
        ),
    ),
    "kimi_linear": Architecture(
        "kimi_linear",
        dense(
            **EXPERTS,
            **{k: v for k, v in MLA.items() if k not in KIMI_LACKS},
            num_local_experts=8,
            layer_types=["linear_attention", "full_attention"],
            mlp_layer_types=["dense", "sparse"],
            linear_head_dim=16,
            linear_num_heads=4,
        ),
        prompt=(1, 68),
        stacked="rows",
    ),
    "bailing_hybrid": Architecture(
        "bailing_hybrid",
        dense(
            **EXPERTS,
            **{k: v for k, v in MLA.items() if k not in (*KIMI_LACKS, "q_lora_rank")},
            num_local_experts=8,
            n_group=4,
            topk_group=2,
            head_dim=16,
            layer_types=["linear_attention", "full_attention"],
            mlp_layer_types=["dense", "sparse"],
        ),
        prompt=(1, 68),
    ),
}
