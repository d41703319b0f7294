"""The configuration of Step-3.7 as its published files write it, for the sizes of the given one."""

# Lists have a value for each layer, also for the layers that draft tokens.
PUBLISHED = {
    "moe_num_experts": 8,
    "moe_top_k": 2,
    "num_attention_groups": 2,
    "num_nextn_predict_layers": 1,
    "layer_types": ["full_attention", "sliding_attention"] * 2,
    "moe_layers_enum": "1,2",
    "attention_other_setting": {"num_attention_heads": 8, "num_attention_groups": 2},
    "rope_theta": [5000.0, 10000.0] * 2,
    "partial_rotary_factors": [0.5, 1.0] * 2,
    "swiglu_limits": [0.0, None, 0.5, 0.0],
    "swiglu_limits_shared": [0.3, 0.0, 0.7, 0.0],
}
# Keys of transformers' form that published files do not have.
NOT_PUBLISHED = dict.fromkeys(
    (
        "n_routed_experts",
        "num_experts_per_tok",
        "num_key_value_heads",
        "mlp_layer_types",
        "per_layer_config",
        "num_sliding_attention_heads",
        "rope_parameters",
    )
)
