"""OLMoE.

Queries and keys are normalized over all heads together. The router has softmax scores.

Source: `modeling_olmoe` of transformers; arXiv:2409.02060.
"""

from collections.abc import Mapping
from typing import Any

from jax_nvfp4_moe.models.config import Fields
from jax_nvfp4_moe.models.decoder import Architecture, Decoder, build_decoder
from jax_nvfp4_moe.models.grouped_query_config import read_grouped_query
from jax_nvfp4_moe.models.keys import DECODER_KEYS, gqa_keys, moe_keys
from jax_nvfp4_moe.models.sparse import SparseConfig, build_block, read_sparse, read_top_k
from jax_nvfp4_moe.nn.attention.grouped_query import build_attention
from jax_nvfp4_moe.nn.building.builder import Builder
from jax_nvfp4_moe.nn.experts.moe import NVFP4MoE
from jax_nvfp4_moe.numerics.routing import Router

_EXPERTS = ("num_experts", "num_local_experts")
_EPS = 1e-5


def read_config(config: Mapping[str, Any]) -> SparseConfig:
    """Read a parsed ``config.json``.

    Raises:
      CheckpointError: lists all values that are missing, wrong or not supported.
    """
    fields = Fields(config)
    bias = fields.flag("attention_bias", False)
    clip = fields.number("clip_qkv") if fields.present("clip_qkv") else None
    fields.require(clip is None or clip > 0, f"clip_qkv: expected a positive number, got {clip}")
    attention = read_grouped_query(
        fields, config, eps=_EPS, bias=bias, out_bias=bias, normalize="whole", clip=clip
    )
    fields.relate(
        attention.num_heads * attention.head_dim == attention.hidden,
        f"head_dim: expected hidden_size {attention.hidden} divided by {attention.num_heads} "
        f"heads, got {attention.head_dim}",
    )
    router = Router(read_top_k(fields, *_EXPERTS), renormalize=fields.flag("norm_topk_prob", False))
    return read_sparse(
        fields,
        attention,
        router,
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
    **moe_keys("model.layers.*.mlp"),
}
ARCHITECTURE = Architecture(read_config, build_model, build_moe, KEYS)
