"""Phi-3.5-MoE.

It has grouped-query attention with biases, layer norms, and two experts for each token, each of
which is weighed against the experts with almost the same logit (sparsemixer).

Its rotation for texts within the original context differs from that for longer texts (LongRoPE).

Source: `modeling_phimoe` of transformers; arXiv:2404.14219, arXiv:2402.13753. transformers 5.24
keeps the frequencies of short texts in long ones; the code beside the published files and vLLM do
not.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

from jax_nvfp4_moe.models.config import Fields, find_rope_fields, read_rope_kind
from jax_nvfp4_moe.models.decoder import Architecture, Decoder, DecoderLayer, build_around
from jax_nvfp4_moe.models.grouped_query_config import read_grouped_query, read_window
from jax_nvfp4_moe.models.keys import DECODER_KEYS, gqa_keys, moe_keys
from jax_nvfp4_moe.models.long_rope import LONG_ROPE, read_long_rope
from jax_nvfp4_moe.models.sparse import SparseConfig, build_block, read_sparse
from jax_nvfp4_moe.nn.attention.grouped_query import GQAConfig, build_attention
from jax_nvfp4_moe.nn.building.builder import Builder, as_stored
from jax_nvfp4_moe.nn.experts.moe import NVFP4MoE
from jax_nvfp4_moe.numerics.routing import Router

_EXPERTS = ("num_local_experts", "num_experts")
_EPS, _THETA = 1e-5, 1e6
_CHOSEN = 2  # experts of a token, whatever the config says
_ORIGINAL = "original_max_position_embeddings"


@dataclasses.dataclass(frozen=True)
class PhimoeConfig(SparseConfig):
    """The sizes of a Phi-3.5-MoE model.

    Attributes:
      head_bias: whether the head has a bias.
    """

    head_bias: bool


def read_config(config: Mapping[str, Any]) -> PhimoeConfig:
    """Read a parsed ``config.json``.

    Raises:
      CheckpointError: lists all values that are missing, wrong or not supported.
    """
    fields = Fields(config)
    fields.only("num_experts_per_tok", (_CHOSEN,), _CHOSEN)
    total, jitter = fields.size(*_EXPERTS), fields.number("router_jitter_noise", 0.01)
    fields.relate(total >= _CHOSEN, f"{_EXPERTS[0]}: expected {_CHOSEN} or more, got {total}")
    fields.require(jitter >= 0, f"router_jitter_noise: expected 0 or more, got {jitter}")
    head_bias = fields.flag("lm_head_bias", False)
    read = read_sparse(
        fields,
        _read_attention(fields, config),
        Router(_CHOSEN, select="near", distance=2 * jitter),
        eps=_EPS,
        experts=_EXPERTS,
        intermediate="intermediate_size",
    )
    return PhimoeConfig(**vars(read), head_bias=head_bias)


def _read_attention(fields, config) -> GQAConfig:
    """Return the sizes of the attention, with the rotations of short and of long texts."""
    given = find_rope_fields(config)
    long = isinstance(given, dict) and read_rope_kind(given) == LONG_ROPE
    plain = {**given, "rope_type": "default", "type": "default"} if long else given
    bias = fields.flag("attention_bias", False)
    attention = read_grouped_query(
        fields,
        {**config, "rope_scaling": None, "rope_parameters": plain},
        eps=_EPS,
        theta=_THETA,
        bias=bias,
        out_bias=bias,
        window=read_window(fields),
    )
    if not long or attention.rope is None:
        return attention
    own = Fields(given)
    original = own.size(_ORIGINAL)
    scales = [own.number(name) for name in ("short_mscale", "long_mscale")]
    for scale in scales:
        own.require(scale > 0, f"short_mscale, long_mscale: expected positive numbers, got {scale}")
    fields.problems += own.problems
    ropes = read_long_rope(fields, given, attention.rope, original)
    short, other = (
        dataclasses.replace(rope, scale=scale) for rope, scale in zip(ropes, scales, strict=True)
    )
    return dataclasses.replace(attention, rope=short, long_rope=(original, other))


def build_moe(config: PhimoeConfig, layer: int, make: Builder) -> NVFP4MoE:
    """Make the expert block of `layer`; raises the errors of `sparse.build_block`."""
    return build_block(config, layer, make)


def build_model(config: PhimoeConfig, make: Builder) -> Decoder:
    """Make the whole model."""
    h, eps = config.hidden, config.eps

    def build_layer(layer):
        return DecoderLayer(
            make.layer_norm(f"layers.{layer}.attention_norm", h, eps),
            build_attention(config, layer, make),
            make.layer_norm(f"layers.{layer}.mlp_norm", h, eps),
            build_moe(config, layer, make),
        )

    return build_around(
        config,
        make,
        build_layer,
        tied=config.tied,
        norm=make.layer_norm("norm", h, eps),
        head_bias=as_stored(config.head_bias),
    )


# The name of the expert block in published files, and its names in memory of transformers 5.
_BLOCKS = ("model.layers.*.block_sparse_moe", "model.layers.*.mlp")
KEYS = {
    **DECODER_KEYS,
    **gqa_keys("layers.*.attention", "model.layers.*.self_attn"),
    **moe_keys(*_BLOCKS),
    "layers.*.mlp.token_router.weight": (
        f"{_BLOCKS[0]}.gate.weight",
        f"{_BLOCKS[1]}.router.weight",
    ),
}
ARCHITECTURE = Architecture(
    read_config, build_model, build_moe, KEYS, renamed={".block_sparse_moe.": ".mlp."}
)
