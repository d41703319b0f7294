"""Qwen1.5-MoE and Qwen2-MoE.

They have attention with biases, in some layers over a window, and a shared expert with a gate.

Source: `modeling_qwen2_moe` of transformers; arXiv:2407.10671.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

from jax_nvfp4_moe.models.config import Fields
from jax_nvfp4_moe.models.decoder import Architecture, Decoder, build_decoder
from jax_nvfp4_moe.models.grouped_query_config import read_grouped_query
from jax_nvfp4_moe.models.keys import DECODER_KEYS, gated_mlp_keys, gqa_keys, moe_keys
from jax_nvfp4_moe.models.qwen3_next import build_moe
from jax_nvfp4_moe.models.sparse import SparseConfig, read_sparse, read_sparse_step, read_top_k
from jax_nvfp4_moe.nn.attention.grouped_query import build_attention
from jax_nvfp4_moe.nn.building.builder import Builder
from jax_nvfp4_moe.numerics.routing import Router

_EXPERTS = ("num_experts", "num_local_experts")
_EPS = 1e-6
_SLIDING, _FULL = "sliding_attention", "full_attention"


def read_config(config: Mapping[str, Any]) -> SparseConfig:
    """Read a parsed ``config.json``.

    Raises:
      CheckpointError: lists all values that are missing, wrong or not supported.
    """
    fields = Fields(config)
    attention = read_grouped_query(fields, config, eps=_EPS, bias=fields.flag("qkv_bias", True))
    windows = _read_windows(fields, fields.size("num_hidden_layers"))
    router = Router(read_top_k(fields, *_EXPERTS), renormalize=fields.flag("norm_topk_prob", False))
    return read_sparse(
        fields,
        tuple(dataclasses.replace(attention, window=window) for window in windows),
        router,
        eps=_EPS,
        experts=_EXPERTS,
        intermediate="moe_intermediate_size",
        dense_layers=read_sparse_step(fields),
        shared_intermediate="shared_expert_intermediate_size",
    )


def _read_windows(fields, layers):
    """Return the window of each layer, None for a layer that sees all keys.

    Without ``layer_types``, the even ones of the first ``max_window_layers`` layers have a window.
    """
    if not fields.flag("use_sliding_window", False):
        return (None,) * layers
    first = fields.count("max_window_layers", 28)
    default = [_FULL if layer % 2 or layer >= first else _SLIDING for layer in range(layers)]
    types = fields.layer_types((_SLIDING, _FULL), default)
    window = fields.size("sliding_window", default=4096)
    return tuple(window if kind == _SLIDING else None for kind in types)


def build_model(config: SparseConfig, make: Builder) -> Decoder:
    """Make the whole model."""
    return build_decoder(config, make, build_attention, build_moe)


_BLOCK = "model.layers.*.mlp"
KEYS = {
    **DECODER_KEYS,
    **gqa_keys("layers.*.attention", "model.layers.*.self_attn"),
    **gated_mlp_keys("layers.*.mlp", _BLOCK),
    **moe_keys(_BLOCK, shared="shared_expert"),
    "layers.*.mlp.shared_gate": f"{_BLOCK}.shared_expert_gate",
}
ARCHITECTURE = Architecture(read_config, build_model, build_moe, KEYS)
