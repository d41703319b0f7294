"""OLMo 2 and OLMo 3.

A layer has its norms after the attention and after the MLP. Queries and keys are normalized over
all heads together. Most layers of OLMo 3 attend over a window; only the others have a rotation that
is stretched for long texts.

Source: `modeling_olmo2` and `modeling_olmo3` of transformers; arXiv:2501.00656, arXiv:2512.13961.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax

from jax_nvfp4_moe.models.config import Fields, find_rope_fields
from jax_nvfp4_moe.models.decoder import Architecture, Decoder, DecoderLayer, build_around
from jax_nvfp4_moe.models.dense import KEYS, DenseConfig, read_dense, refuse_experts
from jax_nvfp4_moe.models.grouped_query_config import read_grouped_query
from jax_nvfp4_moe.nn.attention.grouped_query import build_attention
from jax_nvfp4_moe.nn.building.builder import Builder
from jax_nvfp4_moe.nn.experts.gated_mlp import GatedMLP, build_gated_mlp
from jax_nvfp4_moe.nn.norm import Residual, RMSNorm

_EPS = 1e-5
_SLIDING, _FULL = "sliding_attention", "full_attention"


def read_olmo2(config: Mapping[str, Any]) -> DenseConfig:
    """Read a parsed ``config.json`` of OLMo 2.

    Raises:
      CheckpointError: lists all values that are missing, wrong or not supported.
    """
    fields = Fields(config)
    return read_dense(fields, _read_attention(fields, config, 10000.0), eps=_EPS)


def read_olmo3(config: Mapping[str, Any]) -> DenseConfig:
    """Read a parsed ``config.json`` of OLMo 3; raises as `read_olmo2`."""
    fields = Fields(config)
    layers = range(fields.size("num_hidden_layers"))
    default = [_SLIDING if (layer + 1) % 4 else _FULL for layer in layers]
    types = fields.layer_types((_SLIDING, _FULL), default)
    window = fields.size("sliding_window", default=4096)
    attentions = {
        kind: _read_attention(fields, _with_rope_of(config, kind), 500000.0)
        for kind in (_SLIDING, _FULL)
    }
    attentions[_SLIDING] = dataclasses.replace(attentions[_SLIDING], window=window)
    return read_dense(fields, tuple(attentions[kind] for kind in types), eps=_EPS)


def _read_attention(fields, config, theta):
    bias = fields.flag("attention_bias", False)
    return read_grouped_query(
        fields, config, eps=_EPS, theta=theta, bias=bias, out_bias=bias, normalize="whole"
    )


def _with_rope_of(config, kind):
    """Return the config with the rotary embedding of layers of this kind alone.

    Files have an object for each kind. One flat object applies to layers that see all keys. Those
    with a window have the same base, and nothing else of it.
    """
    given = find_rope_fields(config)
    if not isinstance(given, dict):
        return config
    if any(isinstance(given.get(name), dict) for name in (_SLIDING, _FULL)):
        own = given.get(kind) or {}
    elif kind == _FULL:
        own = given
    else:
        own = {name: given[name] for name in ("rope_theta",) if name in given}
    return {**config, "rope_scaling": None, "rope_parameters": own}


class Layer(DecoderLayer):
    """A layer with a norm after each part.

    ``x = x + attention_post_norm(attention(x)); y = x + mlp_post_norm(mlp(x))``

    Attributes:
      attention: the attention.
      attention_post_norm: the norm after the attention.
      mlp: the MLP.
      mlp_post_norm: the norm after the MLP.
    """

    def __init__(
        self, attention: Any, attention_post_norm: RMSNorm, mlp: GatedMLP, mlp_post_norm: RMSNorm
    ):
        """Make a layer of its parts."""
        self.attention, self.attention_post_norm = attention, attention_post_norm
        self.mlp, self.mlp_post_norm = mlp, mlp_post_norm

    def __call__(self, stream, positions, entries):
        """Run the layer with the arguments and results of `DecoderLayer`."""
        x = stream.x if stream.added is None else stream.x + stream.added
        with jax.named_scope("attention"):
            y, entries = self.attention(x, positions, entries)
            x = x + self.attention_post_norm(y)
        with jax.named_scope("mlp"):
            return Residual(x, self.mlp_post_norm(self.mlp(x))), entries


def build_model(config: DenseConfig, make: Builder) -> Decoder:
    """Make the whole model."""

    def build_layer(index):
        path, h, eps = f"layers.{index}", config.hidden, config.eps
        return Layer(
            build_attention(config, index, make),
            make.norm(f"{path}.attention_post_norm", h, eps),
            build_gated_mlp(make, f"{path}.mlp", h, config.dense_intermediate),
            make.norm(f"{path}.mlp_post_norm", h, eps),
        )

    return build_around(config, make, build_layer, tied=config.tied)


_KEYS = {
    **KEYS,
    "layers.*.attention_post_norm": "model.layers.*.post_attention_layernorm",
    "layers.*.mlp_post_norm": "model.layers.*.post_feedforward_layernorm",
}
OLMO2 = Architecture(read_olmo2, build_model, refuse_experts, _KEYS)
OLMO3 = Architecture(read_olmo3, build_model, refuse_experts, _KEYS)
