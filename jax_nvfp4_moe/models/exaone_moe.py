"""EXAONE-MoE (K-EXAONE).

Most layers attend over a window, with rotation. The other layers see all keys, without rotation.

Source: `modeling_exaone_moe` of transformers.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

from jax_nvfp4_moe.models.config import Fields
from jax_nvfp4_moe.models.decoder import Architecture, Decoder, build_decoder
from jax_nvfp4_moe.models.grouped_query_config import read_grouped_query, read_window
from jax_nvfp4_moe.models.keys import DECODER_KEYS, gated_mlp_keys, gqa_keys, moe_keys
from jax_nvfp4_moe.models.sparse import (
    SparseConfig,
    build_block,
    read_dense_layers,
    read_grouped_router,
    read_sparse,
)
from jax_nvfp4_moe.nn.attention.grouped_query import GQAConfig, build_attention
from jax_nvfp4_moe.nn.building.builder import Builder
from jax_nvfp4_moe.nn.experts.moe import NVFP4MoE

_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
_EPS = 1e-5
_SLIDING, _FULL = "sliding_attention", "full_attention"


def read_config(config: Mapping[str, Any]) -> SparseConfig:
    """Read a parsed ``config.json``.

    Raises:
      CheckpointError: lists all values that are missing, wrong or not supported.
    """
    fields = Fields(config)
    return read_sparse(
        fields,
        read_attentions(fields, config),
        read_grouped_router(fields, *_EXPERTS, scaling=2.5),
        eps=_EPS,
        experts=_EXPERTS,
        intermediate="moe_intermediate_size",
        dense_layers=read_dense_layers(fields, 1),
        shared_experts=fields.count("num_shared_experts", 1),
    )


def read_attentions(fields: Fields, config: Mapping[str, Any]) -> tuple[GQAConfig, ...]:
    """Return the sizes of the attention of each layer.

    Args:
      fields: the fields of ``config.json``, which receive the problems.
      config: the parsed ``config.json``.
    """
    layers, window = fields.size("num_hidden_layers"), read_window(fields)
    pattern = config.get("sliding_window_pattern", 4) if window is not None else None
    if isinstance(pattern, str) and pattern and set(pattern) <= set("LG"):
        letters = [pattern[layer % len(pattern)] for layer in range(layers)]
        default = [_SLIDING if one == "L" else _FULL for one in letters]
        default[-1] = _FULL
    elif type(pattern) is int and pattern > 0:
        default = [_FULL if (layer + 1) % pattern == 0 else _SLIDING for layer in range(layers)]
    else:
        default = [_FULL] * layers
    types = fields.layer_types((_SLIDING, _FULL), default)
    fields.relate(
        window is not None or _SLIDING not in types,
        "sliding_window: null, but layer_types has sliding_attention",
    )
    bias = fields.flag("attention_bias", False)
    plain = read_grouped_query(
        fields, config, eps=_EPS, bias=bias, out_bias=bias, normalize="heads"
    )
    # In a model with windows, only the layers with a window rotate queries and keys.
    full = plain if window is None else dataclasses.replace(plain, rope=None)
    sliding = dataclasses.replace(plain, window=window)
    return tuple(sliding if kind == _SLIDING else full for kind in types)


def build_moe(config: SparseConfig, layer: int, make: Builder) -> NVFP4MoE:
    """Make the expert block of `layer`; raises the errors of `sparse.build_block`."""
    return build_block(config, layer, make, bias=True)


def build_model(config: SparseConfig, make: Builder) -> Decoder:
    """Make the whole model."""
    return build_decoder(config, make, build_attention, build_moe)


_BLOCK = "model.layers.*.mlp"
KEYS = {
    **DECODER_KEYS,
    **gqa_keys("layers.*.attention", "model.layers.*.self_attn"),
    **gated_mlp_keys("layers.*.mlp", _BLOCK),
    **moe_keys(_BLOCK, shared="shared_experts"),
    # The name in published files, and the name that transformers 5 uses in memory.
    "layers.*.mlp.token_router.correction_bias": (
        f"{_BLOCK}.e_score_correction_bias",
        f"{_BLOCK}.gate.e_score_correction_bias",
    ),
}
ARCHITECTURE = Architecture(read_config, build_model, build_moe, KEYS)
