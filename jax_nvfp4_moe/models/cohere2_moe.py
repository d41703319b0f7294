"""Cohere2-MoE.

Attention and feed-forward read the same normalized tokens, and the logits have a factor. Layers
that attend over a window rotate queries and keys; most layers that see all keys do not.

Source: `modeling_cohere2_moe` and `configuration_cohere2_moe` of transformers.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
from flax import nnx

from jax_nvfp4_moe.models.config import Fields
from jax_nvfp4_moe.models.decoder import Architecture, Decoder, DecoderLayer, build_around
from jax_nvfp4_moe.models.grouped_query_config import read_grouped_query, read_window
from jax_nvfp4_moe.models.keys import DECODER_KEYS, gated_mlp_keys, gqa_keys, moe_keys
from jax_nvfp4_moe.models.sparse import (
    SparseConfig,
    build_block,
    find_dense_layers,
    read_first_layers,
    read_sparse,
    read_top_k,
)
from jax_nvfp4_moe.nn.attention.grouped_query import build_attention
from jax_nvfp4_moe.nn.building.builder import Builder
from jax_nvfp4_moe.nn.experts.gated_mlp import build_gated_mlp
from jax_nvfp4_moe.nn.experts.moe import NVFP4MoE
from jax_nvfp4_moe.nn.norm import LayerNorm, Residual, RMSNorm
from jax_nvfp4_moe.numerics.routing import Router

_EXPERTS = "num_experts"
_EPS = 1e-5
_SLIDING, _FULL = "sliding_attention", "full_attention"
_AVERAGE = "average"
# Options that have this value in all published models. No other is supported.
_ONLY = {
    "position_embedding_type": "rope_gptj",
    "use_gated_activation": True,
    "use_parallel_block": True,
    "use_qk_norm": False,
}


@dataclasses.dataclass(frozen=True)
class Cohere2MoeConfig(SparseConfig):
    """The sizes of a Cohere2-MoE model.

    Attributes:
      layer_norm: whether all norms are layer norms, and not RMS norms.
      averages: whether the result of a block with shared experts is the mean of the routed experts
        and the shared experts. Otherwise it is their sum.
      logit_scale: the factor of the logits.
    """

    layer_norm: bool
    averages: bool
    logit_scale: float


def read_config(config: Mapping[str, Any]) -> Cohere2MoeConfig:
    """Read a parsed ``config.json``.

    Raises:
      CheckpointError: lists all values that are missing, wrong or not supported.
    """
    fields = Fields(config)
    for name, value in _ONLY.items():
        fields.only(name, (value,), value)
    eps = fields.number("rms_norm_eps", fields.number("layer_norm_eps", _EPS))
    dense = find_dense_layers(fields)
    first = read_first_layers(fields, "first_k_dense_replace", 0)
    dense = first if dense is None else dense
    shared = fields.count("num_shared_experts")
    strategy = fields.only("shared_expert_combination_strategy", (_AVERAGE, "sum"), _AVERAGE)
    scale = fields.number("logit_scale", 0.0625)
    width = "intermediate_size"
    if fields.present("prefix_dense_intermediate_size"):
        width = "prefix_dense_intermediate_size"
    dense_width = fields.size(width)
    read = read_sparse(
        fields,
        _read_attentions(fields, config, dense, len(first)),
        _read_router(fields),
        eps=_EPS,
        experts=(_EXPERTS,),
        intermediate="intermediate_size",
        dense_layers=dense,
        shared_experts=shared,
        tied=True,
    )
    return Cohere2MoeConfig(
        **vars(read) | {"eps": eps, "dense_intermediate": dense_width},
        layer_norm=not fields.present("rms_norm_eps"),
        averages=bool(shared) and strategy == _AVERAGE,
        logit_scale=scale,
    )


def _read_router(fields):
    """Return the router, which chooses by logits."""
    top_k = read_top_k(fields, _EXPERTS)
    score = fields.only("expert_selection_fn", ("softmax", "sigmoid"), "softmax")
    renormalize = fields.flag("norm_topk_prob", True)
    if score == "softmax" or not renormalize:
        return Router(top_k, score=score, select="logits")
    return Router(top_k, score=score)


def _read_attentions(fields, config, dense, first):
    """Return the sizes of the attention of each layer; `first` counts the leading dense layers."""
    count = fields.size("num_hidden_layers")
    leading = fields.size("prefix_dense_sliding_window_pattern", default=1)
    pattern = fields.size("sliding_window_pattern", default=4)
    places = [(index, leading) for index in range(first)]
    places += [(index, pattern) for index in range(count - first)]
    default = [_SLIDING if (index + 1) % every else _FULL for index, every in places]
    types = fields.layer_types((_SLIDING, _FULL), default)
    window = read_window(fields) if "sliding_window" in config else 4096
    fields.relate(
        window is not None or _SLIDING not in types,
        "sliding_window: null, but layer_types has sliding_attention",
    )
    bias = fields.flag("attention_bias", False)
    plain = read_grouped_query(
        fields, config, eps=_EPS, head_dim=128, bias=bias, out_bias=bias, interleaved=True
    )
    attentions = []
    for layer, kind in enumerate(types):
        rotates = kind == _SLIDING or (layer in dense and leading == 1)
        own = {"window": window if kind == _SLIDING else None}
        own |= {} if rotates else {"rope": None, "interleaved": False}
        attentions.append(dataclasses.replace(plain, **own))
    return tuple(attentions)


class AveragedMoE(NVFP4MoE):
    """An expert block whose result is the mean of its routed experts and its shared experts."""

    def __call__(self, x, token_ids=None):
        """Run the block with the arguments and results of `NVFP4MoE`."""
        return super().__call__(x, token_ids) * 0.5


class Layer(nnx.Module):
    """A layer whose attention and feed-forward read the same tokens.

    ``y = x + attention(norm(x)) + mlp(norm(x))``

    Attributes:
      norm: the norm before both.
      attention: the attention.
      mlp: a dense MLP or an expert block.
    """

    def __init__(self, norm: LayerNorm | RMSNorm, attention: Any, mlp: Any):
        """Make a layer of its parts."""
        self.norm, self.attention, self.mlp = norm, attention, mlp

    init_cache = DecoderLayer.init_cache

    def __call__(self, stream, positions, entries):
        """Run the layer with the arguments and results of `DecoderLayer`."""
        with jax.named_scope("attention"):
            x, normal = self.norm.normalize_sum(stream)
            y, entries = self.attention(normal, positions, entries)
        with jax.named_scope("mlp"):
            return Residual(x, y + self.mlp(normal)), entries


class Cohere2MoeDecoder(Decoder):
    """A decoder whose logits are multiplied by ``config.logit_scale``."""

    def _logits(self, x):
        return super()._logits(x) * self.config.logit_scale


def build_moe(config: Cohere2MoeConfig, layer: int, make: Builder) -> NVFP4MoE:
    """Make the expert block of `layer`; raises the errors of `sparse.build_block`."""
    return build_block(config, layer, make, block=AveragedMoE if config.averages else NVFP4MoE)


def build_model(config: Cohere2MoeConfig, make: Builder) -> Decoder:
    """Make the whole model."""

    def build_norm(path):
        if config.layer_norm:
            return make.layer_norm(path, config.hidden, config.eps, bias=False)
        return make.norm(path, config.hidden, config.eps)

    def build_layer(layer):
        path, h = f"layers.{layer}", config.hidden
        if layer in config.dense_layers:
            mlp = build_gated_mlp(make, f"{path}.mlp", h, config.dense_intermediate)
        else:
            mlp = build_moe(config, layer, make)
        return Layer(build_norm(f"{path}.norm"), build_attention(config, layer, make), mlp)

    return build_around(
        config,
        make,
        build_layer,
        tied=config.tied,
        norm=build_norm("norm"),
        decoder=Cohere2MoeDecoder,
    )


KEYS = {
    **{name: DECODER_KEYS[name] for name in ("embedding", "norm", "head")},
    "layers.*.norm": "model.layers.*.input_layernorm",
    **gqa_keys("layers.*.attention", "model.layers.*.self_attn"),
    **gated_mlp_keys("layers.*.mlp", "model.layers.*.mlp"),
    **moe_keys("model.layers.*.mlp", shared="shared_experts"),
}
ARCHITECTURE = Architecture(read_config, build_model, build_moe, KEYS)
