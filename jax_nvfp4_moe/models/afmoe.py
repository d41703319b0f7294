"""AFMoE (Trinity Nano, Mini and Large).

Most layers attend over a window, with rotation. The other layers see all keys, without rotation. A
gate for each channel multiplies the output of every attention. Each layer has norms before and
after both of its parts.

Source: `modeling_afmoe` of transformers.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp

from jax_nvfp4_moe.models.config import Fields
from jax_nvfp4_moe.models.decoder import Architecture, Decoder, build_around, build_parts
from jax_nvfp4_moe.models.grouped_query_config import read_grouped_query
from jax_nvfp4_moe.models.keys import DECODER_KEYS, gated_mlp_keys, gqa_keys, moe_keys
from jax_nvfp4_moe.models.post_norms import PostNormLayer
from jax_nvfp4_moe.models.sparse import (
    SparseConfig,
    build_block,
    read_first_layers,
    read_sparse,
    read_top_k,
)
from jax_nvfp4_moe.models.step3p7 import HeadGatedAttention
from jax_nvfp4_moe.nn.attention.grouped_query import build_heads
from jax_nvfp4_moe.nn.building.builder import Builder
from jax_nvfp4_moe.nn.experts.moe import NVFP4MoE
from jax_nvfp4_moe.numerics.routing import Router

_EXPERTS = ("num_experts", "num_local_experts")
_EPS = 1e-5
_SLIDING, _FULL = "sliding_attention", "full_attention"
# Options of published files that have these values in all models. transformers does not read them.
_ONLY = {
    "score_func": "sigmoid",
    "route_norm": True,
    "n_group": 1,
    "topk_group": 1,
    "num_expert_groups": 1,
    "num_limited_groups": 1,
}


@dataclasses.dataclass(frozen=True)
class AfmoeConfig(SparseConfig):
    """The sizes of an AFMoE model.

    Attributes:
      embedding_factor: multiplies the vectors that the embedding returns.
    """

    embedding_factor: float


def read_config(config: Mapping[str, Any]) -> AfmoeConfig:
    """Read a parsed ``config.json``.

    Raises:
      CheckpointError: lists all values that are missing, wrong or not supported.
    """
    fields = Fields(config)
    for name, value in _ONLY.items():
        fields.only(name, (value,), value)
    scaled = fields.flag("mup_enabled", False)
    router = Router(
        read_top_k(fields, *_EXPERTS),
        score="sigmoid",
        scaling=fields.number("route_scale", 1.0),
    )
    read = read_sparse(
        fields,
        _read_attentions(fields, config),
        router,
        eps=_EPS,
        experts=_EXPERTS,
        intermediate="moe_intermediate_size",
        dense_layers=read_first_layers(fields, "num_dense_layers", 1),
        shared_experts=fields.count("num_shared_experts", 2),
    )
    return AfmoeConfig(**vars(read), embedding_factor=read.hidden**0.5 if scaled else 1.0)


def _read_attentions(fields, config):
    """Return the sizes of the attention of each layer."""
    layers, every = (
        fields.size("num_hidden_layers"),
        fields.size("global_attn_every_n_layers", default=4),
    )
    default = [_SLIDING if (layer + 1) % every else _FULL for layer in range(layers)]
    types = fields.layer_types((_SLIDING, _FULL), default)
    bias = fields.flag("attention_bias", False)
    options = {"head_dim": 128, "bias": bias, "out_bias": bias, "normalize": "heads"}
    plain = read_grouped_query(fields, config, eps=_EPS, **options)
    window = fields.size("sliding_window", default=1024)
    sliding = dataclasses.replace(plain, window=window)
    full = dataclasses.replace(plain, rope=None)
    return tuple(sliding if kind == _SLIDING else full for kind in types)


class GatedAttention(HeadGatedAttention):
    """Grouped-query attention in which each channel of a query head has a gate for its output."""

    by_channel = True


class AfmoeDecoder(Decoder):
    """A decoder whose embedding is multiplied by ``config.embedding_factor``."""

    def embed(self, table, input_ids):
        """Return the vectors of tokens ``[b, t, h]``; `table` is the embedding's value."""
        x = super().embed(table, input_ids)
        return (x.astype(jnp.float32) * self.config.embedding_factor).astype(x.dtype)


def build_attention(config: AfmoeConfig, layer: int, make: Builder) -> GatedAttention:
    """Make the attention of `layer`, whose heads are sharded along the mesh axis `tensor`."""
    path = f"layers.{layer}.attention"
    return build_heads(config.attention[layer], path, make, GatedAttention)


def build_moe(config: AfmoeConfig, layer: int, make: Builder) -> NVFP4MoE:
    """Make the expert block of `layer`; raises the errors of `sparse.build_block`."""
    return build_block(config, layer, make, bias=True)


def build_model(config: AfmoeConfig, make: Builder) -> Decoder:
    """Make the whole model."""

    def build_layer(layer):
        parts = build_parts(config, layer, make, build_attention, build_moe)
        attention_norm, attention, mlp_norm, mlp = parts
        attention_post_norm, mlp_post_norm = (
            make.norm(f"layers.{layer}.{name}_post_norm", config.hidden, config.eps)
            for name in ("attention", "mlp")
        )
        return PostNormLayer(
            attention_norm, attention, attention_post_norm, mlp_norm, mlp, mlp_post_norm
        )

    return build_around(config, make, build_layer, tied=config.tied, decoder=AfmoeDecoder)


_LAYER = "model.layers.*"
KEYS = {
    **DECODER_KEYS,
    **gqa_keys("layers.*.attention", f"{_LAYER}.self_attn"),
    "layers.*.attention.gate": f"{_LAYER}.self_attn.gate_proj",
    "layers.*.attention_post_norm": f"{_LAYER}.post_attention_layernorm",
    "layers.*.mlp_norm": f"{_LAYER}.pre_mlp_layernorm",
    "layers.*.mlp_post_norm": f"{_LAYER}.post_mlp_layernorm",
    **gated_mlp_keys("layers.*.mlp", f"{_LAYER}.mlp"),
    **moe_keys(f"{_LAYER}.mlp", router="router.gate", bias="expert_bias", shared="shared_experts"),
}
ARCHITECTURE = Architecture(read_config, build_model, build_moe, KEYS)
