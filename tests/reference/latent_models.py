"""Tiny configurations of models whose keys and values are made from a latent."""

from tests.reference.architecture import EXPERTS, MLA, YARN, Architecture, dense

INDEXER = {
    "num_hidden_layers": 3,
    "index_topk": 6,
    "index_head_dim": 16,
    "index_n_heads": 8,
}

GLM5_NEXT = dense(**EXPERTS, **{k: v for k, v in MLA.items() if k != "first_k_dense_replace"}) | {
    "num_hidden_layers": 2,
    "layer_types": ["linear_attention", "indexed_attention"],
    "mlp_layer_types": ["dense", "sparse"],
    "n_routed_experts": 4,
    "routed_scaling_factor": 1.5,
    "qk_rope_head_dim": 0,
    "index_n_heads": 8,
    "index_head_dim": 16,
    "index_topk": 6,
    "index_kpool": 3,
    "linear_head_dim": 16,
    "linear_num_heads": 4,
    "linear_lower_bound": -4.0,
    "swiglu_limit": 1.0,
    "hc_mult": 3,
    "hc_sinkhorn_iters": 4,
}

LATENT_MODELS = {
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
    "glm5_next": Architecture(
        "glm5_next",
        {
            "text_config": GLM5_NEXT,
            "vision_config": {
                "depth": 1,
                "hidden_size": 16,
                "intermediate_size": 16,
                "num_heads": 2,
                "out_hidden_size": 64,
                "projection_intermediate_size": 16,
                "image_size": 28,
                "patch_size": 14,
            },
        },
        prompt=(1, 68),
        model="Glm5NextForConditionalGeneration",
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
}
