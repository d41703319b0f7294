"""Qwen3-MoE.

It has grouped-query attention with normalized queries and keys, and a softmax router.

Source: `modeling_qwen3_moe` of transformers.
"""

from collections.abc import Mapping
from typing import Any

from jax_nvfp4_moe.models.config import Fields
from jax_nvfp4_moe.models.decoder import Architecture, Decoder, build_decoder
from jax_nvfp4_moe.models.drafting_layers import MTP, one_layer
from jax_nvfp4_moe.models.grouped_query_config import read_grouped_query, read_window
from jax_nvfp4_moe.models.keys import DECODER_KEYS, gated_mlp_keys, gqa_keys, moe_keys
from jax_nvfp4_moe.models.sparse import (
    SparseConfig,
    build_block,
    read_sparse,
    read_sparse_step,
    read_top_k,
)
from jax_nvfp4_moe.nn.attention.grouped_query import build_attention
from jax_nvfp4_moe.nn.building.builder import Builder
from jax_nvfp4_moe.nn.experts.moe import NVFP4MoE
from jax_nvfp4_moe.numerics.routing import Router

_EXPERTS = ("num_experts", "num_local_experts")
_EPS = 1e-6


def read_config(config: Mapping[str, Any]) -> SparseConfig:
    """Read a parsed ``config.json``.

    Raises:
      CheckpointError: lists all values that are missing, wrong or not supported.
    """
    fields = Fields(config)
    bias = fields.flag("attention_bias", False)
    attention = read_grouped_query(
        fields,
        config,
        eps=_EPS,
        bias=bias,
        out_bias=bias,
        normalize="heads",
        # The window holds for all layers. Unlike Qwen2, this model does not read max_window_layers.
        window=read_window(fields) if fields.flag("use_sliding_window", False) else None,
    )
    router = Router(read_top_k(fields, *_EXPERTS), renormalize=fields.flag("norm_topk_prob", False))
    return read_sparse(
        fields,
        attention,
        router,
        eps=_EPS,
        experts=_EXPERTS,
        intermediate="moe_intermediate_size",
        dense_layers=read_sparse_step(fields),
    )


def build_moe(config: SparseConfig, layer: int, make: Builder) -> NVFP4MoE:
    """Make the expert block of `layer`; raises the errors of `sparse.build_block`."""
    return build_block(config, layer, make)


def build_model(config: SparseConfig, make: Builder) -> Decoder:
    """Make the whole model."""
    return build_decoder(config, make, build_attention, build_moe)


KEYS = {
    **DECODER_KEYS,
    **gqa_keys("layers.*.attention", "model.layers.*.self_attn"),
    **gated_mlp_keys("layers.*.mlp", "model.layers.*.mlp"),
    **moe_keys("model.layers.*.mlp"),
}
ARCHITECTURE = Architecture(
    read_config,
    build_model,
    build_moe,
    KEYS,
    drafting=one_layer(MTP, build_attention, build_moe),
)
