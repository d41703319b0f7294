"""DeepSeek-V3, R1, Kimi-K2 and GLM-4.7-Flash.

They have latent attention, and routers that choose groups of experts first.

Source: `modeling_deepseek_v3` and `modeling_glm4_moe_lite` of transformers; arXiv:2412.19437.
"""

from collections.abc import Mapping
from typing import Any

from jax_nvfp4_moe.models.config import Fields, read_rope
from jax_nvfp4_moe.models.decoder import Architecture, Decoder, build_decoder
from jax_nvfp4_moe.models.drafting_layers import BEHIND, one_layer
from jax_nvfp4_moe.models.keys import DECODER_KEYS, gated_mlp_keys, moe_keys
from jax_nvfp4_moe.models.sparse import (
    SparseConfig,
    build_block,
    read_dense_layers,
    read_grouped_router,
    read_leading_dense,
    read_sparse,
)
from jax_nvfp4_moe.nn.attention.latent_attention import MLAConfig, build_latent_attention
from jax_nvfp4_moe.nn.building.builder import Builder
from jax_nvfp4_moe.nn.building.keys import KeyTable, below
from jax_nvfp4_moe.nn.experts.moe import NVFP4MoE
from jax_nvfp4_moe.numerics.routing import Router

# The names that the number of experts may have.
EXPERTS = ("n_routed_experts", "num_local_experts")
_EPS = 1e-6


def read_config(config: Mapping[str, Any]) -> SparseConfig:
    """Read a parsed ``config.json`` of DeepSeek-V3, R1 or Kimi-K2.

    Raises:
      CheckpointError: lists all values that are missing, wrong or not supported.
    """
    fields = Fields(config)
    router = read_grouped_router(fields, *EXPERTS, groups=8, kept=4, scaling=2.5)
    return _read(fields, config, router, read_leading_dense(fields, 3), _EPS)


def read_lite_config(config: Mapping[str, Any]) -> SparseConfig:
    """Read a parsed ``config.json`` of GLM-4.7-Flash; raises the errors of `read_config`."""
    fields = Fields(config)
    router = read_grouped_router(fields, *EXPERTS, scaling=1.8)
    return _read(fields, config, router, read_dense_layers(fields, 1), 1e-5)


def _read(fields, config, router, dense, eps):
    """Read the sizes that both have in common."""
    attention = read_attention(fields, config)
    return read_model(fields, attention, router, dense, eps)


def read_attention(fields: Fields, config: Mapping[str, Any]) -> MLAConfig:
    """Read the sizes of a latent attention.

    Args:
      fields: the fields of ``config.json``.
      config: the parsed ``config.json``.
    """
    width, positions = fields.size("qk_rope_head_dim"), fields.size("max_position_embeddings")
    fields.relate(width % 2 == 0, f"qk_rope_head_dim: expected an even number, got {width}")
    rope = read_rope(fields, config, width, positions)
    fields.relate(
        2 * len(rope.frequencies) == width,
        "partial_rotary_factor: expected 1, because this architecture rotates all channels of "
        "qk_rope_head_dim",
    )
    return MLAConfig(
        hidden=fields.size("hidden_size"),
        num_heads=fields.size("num_attention_heads"),
        q_lora_rank=fields.size("q_lora_rank") if fields.present("q_lora_rank") else None,
        kv_lora_rank=fields.size("kv_lora_rank"),
        qk_nope_head_dim=fields.size("qk_nope_head_dim"),
        qk_rope_head_dim=width,
        v_head_dim=fields.size("v_head_dim"),
        interleaved=fields.flag("rope_interleave", True),
        bias=fields.flag("attention_bias", False),
        rope=rope,
    )


def read_model(
    fields: Fields, attention: Any, router: Router, dense: frozenset[int], eps: float
) -> SparseConfig:
    """Read the other sizes, and return all sizes.

    Args:
      fields: the fields of ``config.json``.
      attention: the sizes of the attention, or of the attention of each layer.
      router: the router.
      dense: the indices of the layers without experts.
      eps: the default epsilon of the norms.

    Raises:
      CheckpointError: lists all values that are missing, wrong or not supported.
    """
    fields.only("moe_layer_freq", (1,), 1)
    return read_sparse(
        fields,
        attention,
        router,
        eps=eps,
        experts=EXPERTS,
        intermediate="moe_intermediate_size",
        dense_layers=dense,
        shared_experts=fields.count("n_shared_experts", 1),
    )


def build_attention(config: SparseConfig, layer: int, make: Builder):
    """Make the attention of `layer`, whose heads are sharded along the mesh axis `tensor`."""
    return build_latent_attention(config.attention, f"layers.{layer}.attention", make)


def build_moe(config: SparseConfig, layer: int, make: Builder) -> NVFP4MoE:
    """Make the expert block of `layer`; raises the errors of `sparse.build_block`."""
    return build_block(config, layer, make, bias=True)


def build_model(config: SparseConfig, make: Builder) -> Decoder:
    """Make the whole model."""
    return build_decoder(config, make, build_attention, build_moe)


# Where the parts of a latent attention stand below its name in the file.
ATTENTION_PARTS = {
    "kv": "",
    "q_norm": "q_a_layernorm",
    "q": "q_b_proj",
    "down.q": "q_proj",  # in models without a latent for queries
    "down.q_a": "q_a_proj",
    "down.kv": "kv_a_proj_with_mqa",
    "kv_norm": "kv_a_layernorm",
    "kv_up": "kv_b_proj",
    "out": "o_proj",
}
_ATTENTION = "model.layers.*.self_attn"
KEYS: KeyTable = {
    **DECODER_KEYS,
    **below("layers.*.attention", _ATTENTION, ATTENTION_PARTS),
    **gated_mlp_keys("layers.*.mlp", "model.layers.*.mlp"),
    **moe_keys("model.layers.*.mlp", bias="gate.e_score_correction_bias", shared="shared_experts"),
}
_DRAFTING = one_layer(BEHIND, build_attention, build_moe)
ARCHITECTURE = Architecture(read_config, build_model, build_moe, KEYS, drafting=_DRAFTING)
LITE = Architecture(read_lite_config, build_model, build_moe, KEYS, drafting=_DRAFTING)
