"""Hy3.

It has grouped-query attention with normalized heads. Its router has sigmoid scores.

Source: `modeling_hy_v3` of transformers, and `hy_v3_mtp` of vLLM for the drafting layer.
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
    read_dense_layers,
    read_sparse,
    read_top_k,
)
from jax_nvfp4_moe.nn.attention.grouped_query import build_attention
from jax_nvfp4_moe.nn.building.builder import Builder
from jax_nvfp4_moe.nn.experts.moe import NVFP4MoE
from jax_nvfp4_moe.numerics.routing import Router

_EXPERTS = ("num_experts", "num_local_experts")
_EPS, _THETA = 1e-5, 11_158_840.0
# Options of published files that have these values in all models. transformers does not read them.
_ONLY = {
    "qk_norm": True,
    "route_norm": True,
    "moe_router_use_sigmoid": True,
    "moe_router_enable_expert_bias": True,
    "mlp_bias": False,
}


def read_config(config: Mapping[str, Any]) -> SparseConfig:
    """Read a parsed ``config.json``.

    Raises:
      CheckpointError: lists all values that are missing, wrong or not supported.
    """
    fields = Fields(config)
    for name, value in _ONLY.items():
        fields.only(name, (value,), value)
    bias = fields.flag("attention_bias", False)
    options = {"theta": _THETA, "head_dim": 128, "bias": bias, "out_bias": bias}
    router = Router(
        read_top_k(fields, *_EXPERTS),
        score="sigmoid",
        scaling=fields.number("router_scaling_factor", 2.826),
    )
    return read_sparse(
        fields,
        read_grouped_query(fields, config, eps=_EPS, normalize="heads", **options),
        router,
        eps=_EPS,
        experts=_EXPERTS,
        intermediate="moe_intermediate_size",
        dense_layers=read_dense_layers(fields, 1),
        shared_experts=fields.count("num_shared_experts", 1),
    )


def build_moe(config: SparseConfig, layer: int, make: Builder) -> NVFP4MoE:
    """Make the expert block of `layer`; raises the errors of `sparse.build_block`."""
    return build_block(config, layer, make, bias=True)


def build_model(config: SparseConfig, make: Builder) -> Decoder:
    """Make the whole model."""
    return build_decoder(config, make, build_attention, build_moe)


_BLOCK = "model.layers.*.mlp"
# For each part, the name in published files and the name that transformers 5 uses in memory.
KEYS = {
    **DECODER_KEYS,
    **gqa_keys("layers.*.attention", "model.layers.*.self_attn"),
    **gated_mlp_keys("layers.*.mlp", _BLOCK),
    **moe_keys(_BLOCK),
    **gated_mlp_keys(
        "layers.*.mlp.shared_experts", (f"{_BLOCK}.shared_mlp", f"{_BLOCK}.shared_experts")
    ),
    "layers.*.mlp.token_router.weight": (
        f"{_BLOCK}.router.gate.weight",
        f"{_BLOCK}.gate.weight",
    ),
    "layers.*.mlp.token_router.correction_bias": (
        f"{_BLOCK}.expert_bias",
        f"{_BLOCK}.e_score_correction_bias",
    ),
}
ARCHITECTURE = Architecture(
    read_config,
    build_model,
    build_moe,
    KEYS,
    renamed={".shared_mlp.": ".shared_experts."},
    drafting=one_layer(
        BEHIND | {"norm": "model.layers.{first}.final_layernorm"}, build_attention, build_moe
    ),
)
