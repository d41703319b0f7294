"""Phi-3 and Phi-4.

One linear computes queries, keys and values, and another one gate and up. Models for long texts
have one rotation for texts within their original context, and another one for longer texts.

Source: `modeling_phi3` of transformers; arXiv:2404.14219, arXiv:2402.13753.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

from jax_nvfp4_moe.models.config import Fields, find_rope_fields, read_rope_kind
from jax_nvfp4_moe.models.decoder import Architecture, Decoder, DecoderLayer, build_around
from jax_nvfp4_moe.models.dense import DenseConfig, read_dense, refuse_experts
from jax_nvfp4_moe.models.grouped_query_config import read_grouped_query, read_window
from jax_nvfp4_moe.models.keys import DECODER_KEYS, gqa_keys
from jax_nvfp4_moe.models.long_rope import LONG_ROPE, read_long_rope
from jax_nvfp4_moe.nn.attention.grouped_query import build_attention
from jax_nvfp4_moe.nn.building.builder import Builder
from jax_nvfp4_moe.nn.building.keys import below
from jax_nvfp4_moe.nn.experts.gated_mlp import build_joined_mlp

_EPS = 1e-5
_ORIGINAL = "original_max_position_embeddings"
# Older files call the same rotation so.
_OLD_NAMES = ("su", "yarn")


def read_config(config: Mapping[str, Any]) -> DenseConfig:
    """Read a parsed ``config.json``.

    Raises:
      CheckpointError: lists all values that are missing, wrong or not supported.
    """
    config = _rename_rope(config)
    fields = Fields(config)
    given = find_rope_fields(config)
    long = isinstance(given, dict) and read_rope_kind(given) == LONG_ROPE
    plain = {**given, "rope_type": "default"} if long else given
    attention = read_grouped_query(
        fields,
        {**config, "rope_scaling": None, "rope_parameters": plain},
        eps=_EPS,
        share=1.0,
        types=("default", LONG_ROPE),
        window=read_window(fields),
        joined=True,
    )
    if long:
        assert attention.rope is not None
        original = fields.size(_ORIGINAL, default=4096)
        rope, other = read_long_rope(fields, given, attention.rope, original)
        attention = dataclasses.replace(attention, rope=rope, long_rope=(original, other))
    return read_dense(fields, attention, eps=_EPS)


def _rename_rope(config):
    """Return the config with the name of the rotation that newer files have."""
    given = config.get("rope_scaling") or config.get("rope_parameters")
    if isinstance(given, dict) and read_rope_kind(given) in _OLD_NAMES:
        return {**config, "rope_scaling": {**given, "rope_type": LONG_ROPE}}
    return config


def build_model(config: DenseConfig, make: Builder) -> Decoder:
    """Make the whole model."""

    def build_layer(index):
        path, h = f"layers.{index}", config.hidden
        return DecoderLayer(
            make.norm(f"{path}.attention_norm", h, config.eps),
            build_attention(config, index, make),
            make.norm(f"{path}.mlp_norm", h, config.eps),
            build_joined_mlp(make, f"{path}.mlp", h, config.dense_intermediate),
        )

    return build_around(config, make, build_layer, tied=config.tied)


_LAYER = "model.layers.*"
KEYS = {
    **DECODER_KEYS,
    **gqa_keys("layers.*.attention", f"{_LAYER}.self_attn"),
    "layers.*.attention.qkv": f"{_LAYER}.self_attn.qkv_proj",
    **below("layers.*.mlp", f"{_LAYER}.mlp", {"input": "gate_up_proj", "output": "down_proj"}),
}
ARCHITECTURE = Architecture(read_config, build_model, refuse_experts, KEYS)
