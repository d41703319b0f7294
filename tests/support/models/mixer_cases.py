"""Models with several kinds of mixers, at sizes that meshes divide."""

# Name -> a given checkpoint, and changes of its config that make experts and heads divisible. The
# delta nets of qwen3_5 keep their two key heads, which four devices cannot divide.
EXPERTS = {"moe_intermediate_size": 64}
SHARED = EXPERTS | {"num_experts": 8, "shared_expert_intermediate_size": 64}
CASES = {
    "qwen3_next": (
        "qwen3_next-options-modelopt-w4a16",
        SHARED
        | {"intermediate_size": 128, "linear_num_key_heads": 4, "linear_num_value_heads": 12},
    ),
    "qwen3_5": ("qwen3_5_moe-modelopt-w4a16", SHARED),
    "nemotron_h": (
        "nemotron_h-modelopt-w4a16",
        EXPERTS
        | {
            "n_routed_experts": 8,
            "moe_shared_expert_intermediate_size": 128,
            "intermediate_size": 128,
            "n_groups": 4,
        },
    ),
    "granite": (
        "granitemoehybrid-modelopt-w4a16",
        {
            "intermediate_size": 64,
            "num_local_experts": 8,
            "shared_intermediate_size": 128,
            "mamba_n_groups": 4,
        },
    ),
}
# A delta net with four key heads, and gated attention; routed experts, and gated shared experts.
TWO_LAYERS = ("qwen3_next-modelopt-w4a16", CASES["qwen3_next"][1])
