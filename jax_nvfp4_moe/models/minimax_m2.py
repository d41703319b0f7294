"""MiniMax-M2.

Queries and keys are normalized over all heads together and partly rotated. The router has sigmoid
scores.

Source: `modeling_minimax_m2` of transformers, and the ``config.json`` of the published model.
"""

from collections.abc import Mapping
from typing import Any

from jax_nvfp4_moe.checkpoint.errors import quoted
from jax_nvfp4_moe.models.config import Fields
from jax_nvfp4_moe.models.decoder import Architecture, Decoder, build_decoder
from jax_nvfp4_moe.models.grouped_query_config import read_grouped_query
from jax_nvfp4_moe.models.keys import DECODER_KEYS, gqa_keys, moe_keys
from jax_nvfp4_moe.models.sparse import SparseConfig, build_block, read_sparse, read_top_k
from jax_nvfp4_moe.nn.attention.grouped_query import build_attention
from jax_nvfp4_moe.nn.building.builder import Builder
from jax_nvfp4_moe.nn.experts.moe import NVFP4MoE
from jax_nvfp4_moe.numerics.routing import Router

_EXPERTS = ("num_local_experts", "num_experts")
_EPS, _HEAD_DIM = 1e-6, 128
# The name of the expert block in published files, and its name in transformers 5.
_BLOCKS = ("model.layers.*.block_sparse_moe", "model.layers.*.mlp")
# Options of the config that have this value in all published models. No other is supported.
_ONLY = {
    "use_qk_norm": True,
    "qk_norm_type": "per_layer",
    "scoring_func": "sigmoid",
    "use_routing_bias": True,
    "shared_intermediate_size": 0,
}


def read_config(config: Mapping[str, Any]) -> SparseConfig:
    """Read a parsed ``config.json``.

    Raises:
      CheckpointError: lists all values that are missing, wrong or not supported.
    """
    fields = Fields(config)
    for name, value in _ONLY.items():
        fields.only(name, (value,), value)
    kind = next((kind for kind in fields.indices("attn_type_list") if kind != 1), 1)
    fields.require(kind == 1, f"attn_type_list: expected 1 for every layer, got {quoted(kind)}")
    attention = read_grouped_query(
        fields,
        config,
        eps=_EPS,
        theta=5e6,
        head_dim=_HEAD_DIM,
        share=_rotated(fields),
        normalize="whole",
    )
    return read_sparse(
        fields,
        attention,
        Router(read_top_k(fields, *_EXPERTS), score="sigmoid"),
        eps=_EPS,
        experts=_EXPERTS,
        intermediate="intermediate_size",
    )


def _rotated(fields):
    """Return the share of a head's channels that is rotated.

    ``partial_rotary_factor`` takes precedence over this default. Published files have only
    ``rotary_dim``, which transformers up to 5.17 does not read (its issue 48241).
    """
    head_dim = fields.size("head_dim", default=_HEAD_DIM)
    return min(fields.size("rotary_dim", default=head_dim) / head_dim, 1.0)


def build_moe(config: SparseConfig, layer: int, make: Builder) -> NVFP4MoE:
    """Make the expert block of `layer`; raises the errors of `sparse.build_block`."""
    return build_block(config, layer, make, bias=True)


def build_model(config: SparseConfig, make: Builder) -> Decoder:
    """Make the whole model."""
    return build_decoder(config, make, build_attention, build_moe)


KEYS = {
    **DECODER_KEYS,
    **gqa_keys("layers.*.attention", "model.layers.*.self_attn"),
    **moe_keys(*_BLOCKS, bias="e_score_correction_bias"),
}
ARCHITECTURE = Architecture(
    read_config, build_model, build_moe, KEYS, renamed={".block_sparse_moe.": ".mlp."}
)
