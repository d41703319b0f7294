"""Granite, the dense models.

Numbers from the configuration scale the embedding, each part of a layer and the logits.

Source: `modeling_granite` of transformers.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

from jax_nvfp4_moe.models.config import Fields
from jax_nvfp4_moe.models.decoder import Architecture, Decoder
from jax_nvfp4_moe.models.dense import KEYS, DenseConfig, read_dense, refuse_experts
from jax_nvfp4_moe.models.granite_moe import Multipliers, build_scaled, read_multipliers
from jax_nvfp4_moe.models.grouped_query_config import read_grouped_query
from jax_nvfp4_moe.nn.attention.grouped_query import build_attention
from jax_nvfp4_moe.nn.building.builder import Builder
from jax_nvfp4_moe.nn.experts.gated_mlp import build_gated_mlp

_EPS = 1e-6


@dataclasses.dataclass(frozen=True)
class GraniteConfig(DenseConfig):
    """The sizes of a Granite model.

    Attributes:
      multipliers: the numbers that scale vectors and logits.
    """

    multipliers: Multipliers


def read_config(config: Mapping[str, Any]) -> GraniteConfig:
    """Read a parsed ``config.json``.

    Raises:
      CheckpointError: lists all values that are missing, wrong or not supported.
    """
    fields = Fields(config)
    bias = fields.flag("attention_bias", False)
    fields.only("mlp_bias", (False,), False)
    scale = fields.number("attention_multiplier", 1.0)
    attention = read_grouped_query(fields, config, eps=_EPS, bias=bias, out_bias=bias, scale=scale)
    multipliers = read_multipliers(fields)
    return GraniteConfig(**vars(read_dense(fields, attention, eps=_EPS)), multipliers=multipliers)


def build_model(config: GraniteConfig, make: Builder) -> Decoder:
    """Make the whole model."""

    def build_mlp(config, layer, make):
        width = config.dense_intermediate
        return build_gated_mlp(make, f"layers.{layer}.mlp", config.hidden, width)

    return build_scaled(config, make, build_attention, build_mlp)


ARCHITECTURE = Architecture(read_config, build_model, refuse_experts, KEYS)
