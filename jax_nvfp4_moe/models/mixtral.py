"""Mixtral.

It has grouped-query attention, in some models with a sliding window, and a softmax router.

Source: `modeling_mixtral` of transformers; arXiv:2401.04088.
"""

from collections.abc import Mapping
from typing import Any

from jax_nvfp4_moe.models.config import Fields
from jax_nvfp4_moe.models.decoder import Architecture, Decoder, build_decoder
from jax_nvfp4_moe.models.grouped_query_config import read_grouped_query, read_window
from jax_nvfp4_moe.models.keys import DECODER_KEYS, gqa_keys, moe_keys
from jax_nvfp4_moe.models.sparse import SparseConfig, build_block, read_sparse, read_top_k
from jax_nvfp4_moe.nn.attention.grouped_query import build_attention
from jax_nvfp4_moe.nn.building.builder import Builder
from jax_nvfp4_moe.nn.experts.moe import NVFP4MoE
from jax_nvfp4_moe.numerics.routing import Router

_EXPERTS = ("num_local_experts", "num_experts")
_EPS = 1e-5
# The name of the expert block in published files, and its name in transformers 5.
_BLOCKS = ("model.layers.*.block_sparse_moe", "model.layers.*.mlp")


def read_config(config: Mapping[str, Any]) -> SparseConfig:
    """Read a parsed ``config.json``.

    Raises:
      CheckpointError: lists all values that are missing, wrong or not supported.
    """
    fields = Fields(config)
    attention = read_grouped_query(fields, config, eps=_EPS, theta=1e6, window=read_window(fields))
    return read_sparse(
        fields,
        attention,
        Router(read_top_k(fields, *_EXPERTS)),
        eps=_EPS,
        experts=_EXPERTS,
        intermediate="intermediate_size",
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
    **moe_keys(*_BLOCKS),
}
ARCHITECTURE = Architecture(
    read_config, build_model, build_moe, KEYS, renamed={".block_sparse_moe.": ".mlp."}
)
