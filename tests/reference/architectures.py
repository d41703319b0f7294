"""Describe each architecture as a tiny configuration of transformers."""

import dataclasses
from typing import Any

SMALL = {"vocab_size": 128, "max_position_embeddings": 512}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2}
SPECIAL = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
EXPERTS = {"moe_intermediate_size": 48, "num_experts_per_tok": 2}
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
MLA = {
    "vocab_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "intermediate_size": 96,
    "kv_lora_rank": 32,
    "q_lora_rank": 48,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "first_k_dense_replace": 1,
    "num_hidden_layers": 2,
    "n_routed_experts": 8,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "original_max_position_embeddings": 128,
}
GRANITE = {
    "intermediate_size": 48,
    "embedding_multiplier": 3.0,
    "attention_multiplier": 0.2,
    "residual_multiplier": 0.7,
    "logits_scaling": 2.0,
    "num_local_experts": 6,
    "num_experts_per_tok": 2,
}
INDEXER = {
    "num_hidden_layers": 3,
    "index_topk": 6,
    "index_head_dim": 16,
    "index_n_heads": 8,
}
KIMI_LACKS = ("first_k_dense_replace", "n_routed_experts")
VISION = {
    "depth": 1,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_heads": 2,
    "out_hidden_size": 64,
    "num_position_embeddings": 16,
    "patch_size": 4,
}
LLAMA4 = {
    **SMALL,
    **HEADS,
    **SPECIAL,
    "hidden_size": 64,
    "head_dim": 16,
    "intermediate_size": 48,
    "intermediate_size_mlp": 96,
    "num_hidden_layers": 4,
    "vocab_size": 64,
    "num_local_experts": 4,
    "interleave_moe_layer_step": 2,
    "attention_chunk_size": 16,
    "floor_scale": 8,
}


@dataclasses.dataclass(frozen=True)
class Architecture:
    """A model type of transformers, the fields that make it tiny, and the prompt's shape.

    Attributes:
      model_type: name of the type in transformers.
      fields: fields of its configuration.
      prompt: rows and tokens of the prompt. The tokens cross a chunk of recurrent mixers (64 tokens
        in transformers' delta net).
      model: class in transformers, if it is not the one that AutoModelForCausalLM chooses.
      stacked: how transformers stacks experts that llm-compressor writes one by one, if it cannot
        read them one by one. Gate and up are "rows" or "columns" of one matrix, or "interleaved"
        columns.
      mtp: where published files keep the layers that predict further tokens.
      old_rope: whether config.json gets the rope fields that were used before transformers 5.
      edits: fields of config.json as in published files, which transformers 5 reads but does not
        write. None removes a field.
    """

    model_type: str
    fields: dict[str, Any]
    prompt: tuple[int, int] = (2, 16)
    model: str = "AutoModelForCausalLM"
    stacked: str | None = None
    mtp: str = "mtp"
    old_rope: bool = False
    edits: dict[str, Any] = dataclasses.field(default_factory=dict)


def dense(**fields: Any) -> dict[str, Any]:
    """Return the fields that all tiny models share, changed by `fields`."""
    return {**SMALL, **HEADS, **SPECIAL, "hidden_size": 64, "num_hidden_layers": 2, **fields}


QWEN3 = {"head_dim": 16, "intermediate_size": 96, "num_experts": 8, "norm_topk_prob": True}

ARCHITECTURES = {
    "qwen3_moe": Architecture("qwen3_moe", dense(**EXPERTS, **QWEN3)),
    "qwen3_moe-odd": Architecture(
        "qwen3_moe",
        dense(
            **QWEN3
            | {
                "hidden_size": 320,
                "moe_intermediate_size": 112,
                "num_experts": 12,
                "num_experts_per_tok": 3,
                "num_hidden_layers": 1,
                "vocab_size": 64,
            }
        ),
        prompt=(1, 10),
    ),
    "qwen3_moe-small": Architecture(
        "qwen3_moe",
        dense(
            **QWEN3
            | {
                "moe_intermediate_size": 32,
                "num_attention_heads": 2,
                "num_experts": 4,
                "num_experts_per_tok": 2,
                "num_hidden_layers": 1,
                "num_key_value_heads": 1,
                "vocab_size": 64,
            }
        ),
    ),
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
    "gpt_oss": Architecture(
        "gpt_oss",
        dense(
            head_dim=16,
            intermediate_size=48,
            num_local_experts=6,
            num_experts_per_tok=2,
            sliding_window=8,
        ),
        stacked="interleaved",
    ),
    "gpt_oss-mxfp4": Architecture(
        "gpt_oss",
        dense(
            head_dim=16,
            intermediate_size=32,
            num_local_experts=4,
            num_experts_per_tok=2,
            sliding_window=8,
            vocab_size=64,
        ),
        stacked="interleaved",
    ),
    "llama4": Architecture(
        "llama4",
        {
            "text_config": LLAMA4,
            "vision_config": {
                "hidden_size": 16,
                "intermediate_size": 64,
                "num_attention_heads": 2,
                "num_hidden_layers": 1,
                "vision_output_dim": 16,
                "projector_input_dim": 16,
                "projector_output_dim": 16,
                "image_size": 28,
            },
        },
        prompt=(1, 32),
        model="Llama4ForConditionalGeneration",
        stacked="columns",
    ),
    "llama4_text": Architecture("llama4_text", LLAMA4, prompt=(1, 32), stacked="columns"),
    "mixtral": Architecture(
        "mixtral",
        dense(head_dim=16, intermediate_size=48, num_local_experts=6, num_experts_per_tok=2),
        stacked="rows",
    ),
    "glm4_moe": Architecture(
        "glm4_moe",
        dense(
            **EXPERTS,
            head_dim=16,
            intermediate_size=96,
            n_routed_experts=8,
            routed_scaling_factor=2.5,
            attention_bias=True,
            use_qk_norm=True,
            num_hidden_layers=3,
        ),
        mtp="model.layers.3",
    ),
    "minimax_m2": Architecture(
        "minimax_m2",
        dense(
            head_dim=16,
            rotary_dim=8,
            # transformers 5.17 reads only this name, and files have the other one
            partial_rotary_factor=0.5,
            intermediate_size=48,
            num_local_experts=8,
            num_experts_per_tok=2,
        ),
        stacked="rows",
    ),
    "olmoe": Architecture(
        "olmoe",
        dense(intermediate_size=48, num_experts=8, num_experts_per_tok=2, clip_qkv=2.5),
    ),
    "deepseek_v3": Architecture(
        "deepseek_v3",
        dense(**EXPERTS, **MLA | {"num_hidden_layers": 3}, n_group=4, topk_group=2)
        | {"num_experts_per_tok": 3},
        mtp="model.layers.3",
    ),
    "kimi_k2": Architecture(
        "deepseek_v3",
        dense(
            **EXPERTS,
            **MLA,
            n_group=1,
            topk_group=1,
            routed_scaling_factor=2.827,
            rope_parameters=YARN,
        ),
        edits={"model_type": "kimi_k2"},
        old_rope=True,
        mtp="model.layers.2",
    ),
    "mixtral-window": Architecture(
        "mixtral",
        dense(
            intermediate_size=112,
            num_local_experts=12,
            num_experts_per_tok=3,
            sliding_window=6,
            num_hidden_layers=1,
        ),
    ),
    "olmoe-bias": Architecture(
        "olmoe",
        dense(
            intermediate_size=48,
            num_experts=6,
            num_experts_per_tok=2,
            clip_qkv=1.0,
            attention_bias=True,
            norm_topk_prob=True,
            tie_word_embeddings=True,
        ),
    ),
    "glm4_moe-groups": Architecture(
        "glm4_moe",
        dense(
            **EXPERTS | {"num_experts_per_tok": 3},
            head_dim=16,
            intermediate_size=96,
            n_routed_experts=8,
            n_group=4,
            topk_group=2,
            n_shared_experts=2,
            norm_topk_prob=False,
            routed_scaling_factor=1.5,
            partial_rotary_factor=0.25,
            attention_bias=True,
            use_qk_norm=True,
        ),
    ),
    "glm4_moe_lite": Architecture(
        "glm4_moe_lite",
        dense(
            **EXPERTS,
            **{k: v for k, v in MLA.items() if k != "first_k_dense_replace"},
            mlp_layer_types=["sparse", "dense"],
            rms_norm_eps=1e-3,
        ),
    ),
    "deepseek_v3-direct": Architecture(
        "deepseek_v3",
        dense(
            **EXPERTS,
            **MLA | {"q_lora_rank": None, "first_k_dense_replace": 0},
            n_group=1,
            topk_group=1,
            rope_interleave=False,
            attention_bias=True,
            norm_topk_prob=False,
            n_shared_experts=2,
        ),
    ),
    "qwen3_moe-window": Architecture(
        "qwen3_moe",
        dense(
            **EXPERTS,
            **QWEN3 | {"norm_topk_prob": False},
            use_sliding_window=True,
            sliding_window=6,
            mlp_only_layers=[0],
            attention_bias=True,
            rope_parameters={"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0},
        ),
    ),
    "qwen3_vl_moe": Architecture(
        "qwen3_vl_moe",
        {
            "text_config": dense(
                **EXPERTS,
                head_dim=16,
                intermediate_size=96,
                num_experts=6,
                mlp_only_layers=[0],
                attention_bias=True,
                tie_word_embeddings=False,
                rope_parameters={
                    "rope_type": "default",
                    "rope_theta": 5000.0,
                    "mrope_section": [4, 2, 2],
                },
            ),
            "vision_config": VISION | {"deepstack_visual_indexes": [0]},
        },
        model="Qwen3VLMoeForConditionalGeneration",
        stacked="columns",
    ),
    "qwen2_moe": Architecture(
        "qwen2_moe",
        dense(
            **EXPERTS,
            intermediate_size=96,
            num_experts=6,
            shared_expert_intermediate_size=96,
            num_hidden_layers=3,
            mlp_only_layers=[1],
            use_sliding_window=True,
            sliding_window=6,
            max_window_layers=2,
        ),
    ),
    "ernie4_5_moe": Architecture(
        "ernie4_5_moe",
        dense(
            moe_intermediate_size=48,
            moe_k=3,
            moe_num_experts=8,
            moe_num_shared_experts=2,
            intermediate_size=96,
            num_hidden_layers=2,
            use_bias=False,
        ),
    ),
    "deepseek_v32": Architecture(
        "deepseek_v32",
        dense(
            **EXPERTS,
            **MLA | INDEXER,
            n_group=4,
            topk_group=2,
            rope_parameters=YARN,
        ),
        old_rope=True,
        mtp="model.layers.3",
    ),
    "glm_moe_dsa": Architecture(
        "glm_moe_dsa",
        dense(
            **EXPERTS,
            **MLA | INDEXER,
            indexer_types=["full", "full", "shared"],
            rope_parameters={"rope_type": "default", "rope_theta": 1e6},
        ),
        mtp="model.layers.3",
    ),
    "deepseek_v4": Architecture(
        "deepseek_v4",
        dense(
            **EXPERTS,
            num_hidden_layers=3,
            layer_types=[
                "sliding_attention",
                "compressed_sparse_attention",
                "heavily_compressed_attention",
            ],
            mlp_layer_types=["hash_moe", "moe", "moe"],
            compress_rates={"compressed_sparse_attention": 2, "heavily_compressed_attention": 5},
            head_dim=16,
            partial_rotary_factor=0.5,
            q_lora_rank=48,
            o_groups=4,
            o_lora_rank=16,
            sliding_window=3,
            index_n_heads=8,
            index_head_dim=16,
            index_topk=3,
            n_routed_experts=6,
            hc_mult=3,
            hc_sinkhorn_iters=4,
            swiglu_limit=1.5,
            compress_rope_theta=20000.0,
            rope_parameters={
                "rope_type": "yarn",
                "factor": 4.0,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "original_max_position_embeddings": 128,
            },
        )
        | {"vocab_size": 64, "num_attention_heads": 8, "num_key_value_heads": 1},
        stacked="rows",
    ),
    "mistral4": Architecture(
        "mistral4",
        dense(
            **EXPERTS,
            **MLA,
            n_group=4,
            topk_group=2,
            routed_scaling_factor=1.5,
            rope_parameters={
                "rope_type": "yarn",
                "rope_theta": 10000.0,
                "factor": 64.0,
                "original_max_position_embeddings": 8,
                "max_position_embeddings": 512,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "mscale": 1.0,
                "mscale_all_dim": 1.0,
                "llama_4_scaling_beta": 0.1,
            },
        ),
        model="Mistral4ForCausalLM",
        stacked="rows",
    ),
    "granitemoe": Architecture("granitemoe", dense(**GRANITE), stacked="rows"),
    "granitemoeshared": Architecture(
        "granitemoeshared",
        dense(
            **GRANITE,
            shared_intermediate_size=96,
            tie_word_embeddings=True,
        ),
        stacked="rows",
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
    "hunyuan_v1_moe": Architecture(
        "hunyuan_v1_moe",
        dense(
            head_dim=16,
            intermediate_size=48,
            num_experts=6,
            moe_topk=2,
            rope_parameters={
                "rope_type": "dynamic",
                "rope_theta": 10000.0,
                "factor": 1.0,
                "alpha": 1000.0,
            },
        ),
    ),
    "exaone_moe": Architecture(
        "exaone_moe",
        dense(
            **EXPERTS,
            head_dim=16,
            intermediate_size=96,
            num_experts=8,
            sliding_window=6,
            layer_types=["sliding_attention", "full_attention", "sliding_attention"],
            mlp_layer_types=["sparse", "dense", "sparse"],
            n_group=2,
            topk_group=1,
            num_hidden_layers=3,
        ),
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
    "step3p7": Architecture(
        "step3p7",
        {
            "text_config": dense(
                **EXPERTS,
                head_dim=16,
                intermediate_size=96,
                share_expert_dim=96,
                n_routed_experts=8,
                num_hidden_layers=3,
                mlp_layer_types=["dense", "sparse", "sparse"],
                layer_types=["full_attention", "sliding_attention", "full_attention"],
                sliding_window=6,
                num_sliding_attention_heads=8,
                moe_router_scaling_factor=3.0,
                swiglu_limits=[0.0, 0.0, 0.5],
                swiglu_limits_shared=[0.3, 0.0, 0.7],
                rope_theta=[5000.0, 10000.0, 5000.0],
                partial_rotary_factors=[0.5, 1.0, 0.5],
            )
            | {"pad_token_id": 0},
            "vision_config": {
                "hidden_size": 16,
                "num_hidden_layers": 1,
                "num_attention_heads": 2,
                "image_size": 28,
                "patch_size": 14,
            },
        },
        model="Step3p7ForConditionalGeneration",
        stacked="rows",
    ),
    "gemma4": Architecture(
        "gemma4",
        {
            "text_config": dense(
                moe_intermediate_size=48,
                top_k_experts=2,
                num_experts=6,
                enable_moe_block=True,
                intermediate_size=96,
                head_dim=16,
                global_head_dim=32,
                num_global_key_value_heads=1,
                attention_k_eq_v=True,
                sliding_window=6,
                layer_types=["sliding_attention", "full_attention"],
                hidden_size_per_layer_input=0,
                final_logit_softcapping=20.0,
                rope_parameters={
                    "sliding_attention": {"rope_type": "default", "rope_theta": 5000.0},
                    "full_attention": {
                        "rope_type": "proportional",
                        "rope_theta": 20000.0,
                        "partial_rotary_factor": 0.25,
                    },
                },
            )
            | {"pad_token_id": 0},
        },
        model="Gemma4ForConditionalGeneration",
        stacked="rows",
    ),
    "minimax_m3": Architecture(
        "minimax_m3_vl_text",
        dense(
            head_dim=16,
            intermediate_size=48,
            dense_intermediate_size=96,
            shared_intermediate_size=64,
            num_local_experts=8,
            num_experts_per_tok=2,
            mlp_layer_types=["dense", "sparse"],
            layer_types=["full_attention", "minimax_m3_sparse"],
            index_n_heads=2,
            index_head_dim=32,
            index_block_size=3,
            index_topk_blocks=3,
            swiglu_alpha=1.5,
            swiglu_limit=0.7,
            rope_parameters={
                "rope_type": "default",
                "rope_theta": 5000.0,
                "partial_rotary_factor": 0.5,
            },
        ),
        model="MiniMaxM3VLForCausalLM",
        stacked="rows",
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

PUBLISHED_NEMOTRON = {
    "layers_block_type": None,
    "hybrid_override_pattern": "M*E-",
    "num_hidden_layers": 4,
}
PUBLISHED_NEXT = {"layer_types": None, "full_attention_interval": 2}
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
