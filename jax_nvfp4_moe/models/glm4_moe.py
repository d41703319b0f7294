"""GLM-4.5, 4.6 and 4.7.

They have grouped-query attention with partial rotation, and the expert block of DeepSeek-V3.

Source: `modeling_glm4_moe` of transformers; arXiv:2508.06471.
"""

from collections.abc import Mapping
from typing import Any

from jax_nvfp4_moe.models.config import Fields
from jax_nvfp4_moe.models.decoder import Architecture, Decoder, build_decoder
from jax_nvfp4_moe.models.drafting_layers import BEHIND, one_layer
from jax_nvfp4_moe.models.grouped_query_config import read_grouped_query
from jax_nvfp4_moe.models.keys import DECODER_KEYS, gated_mlp_keys, gqa_keys, moe_keys
from jax_nvfp4_moe.models.sparse import (
    SparseConfig,
    build_block,
    read_grouped_router,
    read_leading_dense,
    read_sparse,
)
from jax_nvfp4_moe.nn.attention.grouped_query import build_attention
from jax_nvfp4_moe.nn.building.builder import Builder
from jax_nvfp4_moe.nn.experts.moe import NVFP4MoE

_EXPERTS = ("n_routed_experts", "num_local_experts", "num_experts")
_EPS = 1e-5


def read_config(config: Mapping[str, Any]) -> SparseConfig:
    """Read a parsed ``config.json``.

    Raises:
      CheckpointError: lists all values that are missing, wrong or not supported.
    """
    fields = Fields(config)
    attention = read_grouped_query(
        fields,
        config,
        eps=_EPS,
        share=0.5,
        bias=fields.flag("attention_bias", False),
        normalize="heads" if fields.flag("use_qk_norm", False) else None,
    )
    return read_sparse(
        fields,
        attention,
        read_grouped_router(fields, *_EXPERTS),
        eps=_EPS,
        experts=_EXPERTS,
        intermediate="moe_intermediate_size",
        dense_layers=read_leading_dense(fields, 1),
        shared_experts=fields.count("n_shared_experts", 1),
    )


def build_moe(config: SparseConfig, layer: int, make: Builder) -> NVFP4MoE:
    """Make the expert block of `layer`; raises the errors of `sparse.build_block`."""
    return build_block(config, layer, make, bias=True)


def build_model(config: SparseConfig, make: Builder) -> Decoder:
    """Make the whole model."""
    return build_decoder(config, make, build_attention, build_moe)


KEYS = {
    **DECODER_KEYS,
    **gqa_keys("layers.*.attention", "model.layers.*.self_attn"),
    **gated_mlp_keys("layers.*.mlp", "model.layers.*.mlp"),
    **moe_keys("model.layers.*.mlp", bias="gate.e_score_correction_bias", shared="shared_experts"),
}
ARCHITECTURE = Architecture(
    read_config,
    build_model,
    build_moe,
    KEYS,
    drafting=one_layer(BEHIND, build_attention, build_moe),
)
