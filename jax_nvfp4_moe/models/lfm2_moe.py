"""LFM2-MoE.

Most layers have a gated short convolution, and the others have attention.

Source: `modeling_lfm2_moe` of transformers.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

from jax_nvfp4_moe.models.config import Fields
from jax_nvfp4_moe.models.decoder import Architecture, Decoder, build_decoder
from jax_nvfp4_moe.models.grouped_query_config import read_grouped_query
from jax_nvfp4_moe.models.keys import DECODER_KEYS, gqa_keys, moe_keys
from jax_nvfp4_moe.models.sparse import (
    SparseConfig,
    build_block,
    read_first_layers,
    read_sparse,
    read_top_k,
)
from jax_nvfp4_moe.nn.attention.grouped_query import GQAConfig, build_attention
from jax_nvfp4_moe.nn.building.builder import Builder
from jax_nvfp4_moe.nn.building.keys import below
from jax_nvfp4_moe.nn.experts.moe import NVFP4MoE
from jax_nvfp4_moe.nn.recurrent.short_convolution import (
    ShortConvolutionSizes,
    build_short_convolution,
)
from jax_nvfp4_moe.numerics.routing import Router

_EXPERTS = ("num_experts", "num_local_experts")
_EPS, _THETA = 1e-5, 1e6
_CONVOLUTION, _ATTENTION = "conv", "full_attention"


@dataclasses.dataclass(frozen=True)
class Mixers:
    """The mixers of all layers.

    Attributes:
      attention: the sizes of the attention.
      convolution: the sizes of the convolution.
      types: "conv" or "full_attention" for each layer.
      router_bias: whether the routers have a correction bias.
    """

    attention: GQAConfig
    convolution: ShortConvolutionSizes
    types: tuple[str, ...]
    router_bias: bool


def read_config(config: Mapping[str, Any]) -> SparseConfig:
    """Read a parsed ``config.json``.

    Raises:
      CheckpointError: lists all values that are missing, wrong or not supported.
    """
    config = {**config, "rms_norm_eps": config.get("norm_eps", _EPS)}
    fields = Fields(config)
    router = Router(
        read_top_k(fields, *_EXPERTS),
        score="sigmoid",
        renormalize=fields.flag("norm_topk_prob", True),
        scaling=fields.number("routed_scaling_factor", 1.0),
        epsilon=1e-6,
    )
    tied = fields.flag("tie_embedding", True)  # the name of tie_word_embeddings in older files
    return read_sparse(
        fields,
        _read_mixers(fields, config),
        router,
        eps=_EPS,
        experts=_EXPERTS,
        intermediate="moe_intermediate_size",
        dense_layers=read_first_layers(fields, "num_dense_layers", 2),
        tied=tied,
    )


def _read_mixers(fields, config) -> Mixers:
    layers, hidden = fields.size("num_hidden_layers"), fields.size("hidden_size")
    fields.require(fields.present("layer_types"), "layer_types: missing")
    default = [_ATTENTION] * layers
    return Mixers(
        read_grouped_query(fields, config, eps=_EPS, theta=_THETA, normalize="heads"),
        ShortConvolutionSizes(
            hidden,
            hidden,
            fields.size("conv_L_cache", default=3),
            fields.flag("conv_bias", False),
        ),
        fields.layer_types((_CONVOLUTION, _ATTENTION), default),
        fields.flag("use_expert_bias", True),
    )


def build_mixer(config: SparseConfig, layer: int, make: Builder):
    """Make the attention or the convolution of `layer`."""
    mixers = config.attention
    if mixers.types[layer] == _CONVOLUTION:
        return build_short_convolution(mixers.convolution, f"layers.{layer}.attention", make)
    return build_attention(dataclasses.replace(config, attention=mixers.attention), layer, make)


def build_moe(config: SparseConfig, layer: int, make: Builder) -> NVFP4MoE:
    """Make the expert block of `layer`; raises the errors of `sparse.build_block`."""
    declared = config.attention.router_bias
    stored = make.has(f"layers.{layer}.mlp.token_router.correction_bias")
    if stored and not declared:
        make.warn("use_expert_bias is false, but the file stores expert_bias; it is used")
    return build_block(config, layer, make, bias=declared or stored)


def build_model(config: SparseConfig, make: Builder) -> Decoder:
    """Make the whole model."""
    return build_decoder(config, make, build_mixer, build_moe)


_MIXER = "model.layers.*.self_attn"
_CONV = {"in_proj": "in_proj", "out_proj": "out_proj"}
_CONV |= {"conv_weight": "conv.weight", "conv_bias": "conv.bias"}
KEYS = {
    **DECODER_KEYS,
    "layers.*.attention_norm": "model.layers.*.operator_norm",
    "layers.*.mlp_norm": "model.layers.*.ffn_norm",
    "norm": "model.embedding_norm",
    **gqa_keys("layers.*.attention", _MIXER),
    "layers.*.attention.out": f"{_MIXER}.out_proj",
    "layers.*.attention.q_norm": f"{_MIXER}.q_layernorm",
    "layers.*.attention.k_norm": f"{_MIXER}.k_layernorm",
    **below("layers.*.attention", "model.layers.*.conv", _CONV),
    **below(
        "layers.*.mlp",
        "model.layers.*.feed_forward",
        {"gate_up.gate": "w1", "gate_up.up": "w3", "down": "w2"},
    ),
    **moe_keys("model.layers.*.feed_forward", bias="expert_bias"),
}
ARCHITECTURE = Architecture(read_config, build_model, build_moe, KEYS)
