"""Mistral Small 4 and Mistral Large 3, the language models.

They have the latent attention of DeepSeek-V3 with queries that grow with their position, and a
softmax router that chooses groups of experts first. `checkpoint.mistral_format` reads their files.

Source: `modeling_mistral4` of transformers.
"""

from collections.abc import Mapping
from typing import Any

from jax_nvfp4_moe.checkpoint.errors import quoted
from jax_nvfp4_moe.models import deepseek_v3
from jax_nvfp4_moe.models.config import Fields, find_rope_fields, read_rope
from jax_nvfp4_moe.models.decoder import Architecture, Decoder, build_decoder
from jax_nvfp4_moe.models.sparse import (
    SparseConfig,
    build_block,
    read_grouped_router,
    read_leading_dense,
    read_sparse,
)
from jax_nvfp4_moe.nn.attention.latent_attention import MLAConfig
from jax_nvfp4_moe.nn.building.builder import Builder
from jax_nvfp4_moe.nn.experts.moe import NVFP4MoE

_EXPERTS = ("n_routed_experts", "num_local_experts")
_EPS = 1e-6
_YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 128.0,
    "original_max_position_embeddings": 8192,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale_all_dim": 1.0,
    "mscale": 1.0,
    "llama_4_scaling_beta": 0.1,
}


def read_config(config: Mapping[str, Any]) -> SparseConfig:
    """Read a parsed ``config.json`` with the values of ``text_config`` at its top level.

    Raises:
      CheckpointError: lists all values that are missing, wrong or not supported.
    """
    if not find_rope_fields(config):
        config = {**config, "rope_parameters": _YARN}
    fields = Fields(config)
    return read_sparse(
        fields,
        _read_attention(fields, config),
        read_grouped_router(fields, *_EXPERTS, score="softmax"),
        eps=_EPS,
        experts=_EXPERTS,
        intermediate="moe_intermediate_size",
        dense_layers=read_leading_dense(fields, 0),
        shared_experts=fields.count("n_shared_experts", 1),
    )


def _read_attention(fields, config) -> MLAConfig:
    plain, width = fields.size("qk_nope_head_dim"), fields.size("qk_rope_head_dim")
    positions = fields.size("max_position_embeddings")
    given = find_rope_fields(config)
    given = given if isinstance(given, dict) else {}
    # partial_rotary_factor must be the share of the rotated channels, which the widths say too.
    share = given.get("partial_rotary_factor", width / (plain + width))
    rope = read_rope(
        fields,
        {**config, "rope_scaling": None, "rope_parameters": given | {"partial_rotary_factor": 1.0}},
        width,
        positions,
    )
    fields.relate(
        isinstance(share, float) and 0 < share <= 1 and int((plain + width) * share) == width,
        f"partial_rotary_factor: expected {width / (plain + width)}, the share of "
        f"qk_rope_head_dim {width} in a head of {plain + width} channels; got {quoted(share)}",
    )
    return MLAConfig(
        hidden=fields.size("hidden_size"),
        num_heads=fields.size("num_attention_heads"),
        q_lora_rank=fields.size("q_lora_rank") if fields.present("q_lora_rank") else None,
        kv_lora_rank=fields.size("kv_lora_rank"),
        qk_nope_head_dim=plain,
        qk_rope_head_dim=width,
        v_head_dim=fields.size("v_head_dim"),
        interleaved=fields.flag("rope_interleave", True),
        bias=fields.flag("attention_bias", False),
        rope=rope,
        temperature=read_temperature(fields, config),
    )


def read_temperature(fields: Fields, config: Mapping[str, Any]) -> tuple[float, float] | None:
    """Return the scale and the length by which queries grow, or None without a scale.

    Args:
      fields: the fields of ``config.json``, which receive the problems.
      config: the parsed ``config.json``.
    """
    given = find_rope_fields(config)
    rope = Fields(given if isinstance(given, dict) else {})
    scale = rope.number("llama_4_scaling_beta", 0.0)
    longest = fields.size("max_position_embeddings")
    floor = rope.size("original_max_position_embeddings", default=longest)
    fields.problems += rope.problems
    return (scale, float(floor)) if scale else None


def build_moe(config: SparseConfig, layer: int, make: Builder) -> NVFP4MoE:
    """Make the expert block of `layer`; raises the errors of `sparse.build_block`."""
    return build_block(config, layer, make)


def build_model(config: SparseConfig, make: Builder) -> Decoder:
    """Make the whole model."""
    return build_decoder(config, make, deepseek_v3.build_attention, build_moe)


ARCHITECTURE = Architecture(read_config, build_model, build_moe, deepseek_v3.KEYS)
