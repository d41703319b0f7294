"""Gemma 4 with experts (26B-A4B) or without (E2B, E4B, 12B, 31B), the language model.

Most layers attend over a window. The other layers see all keys: their heads are wider, their values
may be their keys, and they rotate a part of the channels. Each layer has a dense MLP, which stands
beside the experts if there are any, and norms before and after all of them.

Source: `modeling_gemma4` and `modeling_gemma4_unified` of transformers.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
from flax import nnx

from jax_nvfp4_moe.checkpoint.errors import quoted
from jax_nvfp4_moe.models.config import Fields, find_rope_fields
from jax_nvfp4_moe.models.decoder import Architecture, Decoder, build_around
from jax_nvfp4_moe.models.dense import read_dense, refuse_experts
from jax_nvfp4_moe.models.gemma3 import (
    ACTIVATION,
    FULL,
    PATTERN,
    SLIDING,
    GemmaConfig,
    GemmaDecoder,
    read_activation,
    read_logit_cap,
)
from jax_nvfp4_moe.models.gemma4_edge import EDGE_KEYS, EdgeConfig, build_edge_model
from jax_nvfp4_moe.models.grouped_query_config import read_grouped_query, read_layer_fields
from jax_nvfp4_moe.models.keys import DECODER_KEYS, gated_mlp_keys, gqa_keys
from jax_nvfp4_moe.models.post_norms import NORM_KEYS, PostNormLayer, add, build_dense_parts
from jax_nvfp4_moe.models.sparse import SparseConfig, read_sparse, require_experts
from jax_nvfp4_moe.nn.attention.grouped_query import build_attention
from jax_nvfp4_moe.nn.building.builder import Builder
from jax_nvfp4_moe.nn.experts.gated_mlp import GatedMLP, build_gated_mlp
from jax_nvfp4_moe.nn.experts.moe import LatentProjections, NVFP4MoE
from jax_nvfp4_moe.nn.norm import Residual
from jax_nvfp4_moe.numerics.norms import normalize
from jax_nvfp4_moe.numerics.routing import Router

_EXPERTS = ("num_experts",)
_EPS = 1e-6
_ROPES = {
    SLIDING: {"rope_type": "default", "rope_theta": 1e4},
    FULL: {"rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": 0.25},
}
# Sizes that layers of one model may have of their own.
_OF_LAYERS = ("head_dim", "num_key_value_heads")


@dataclasses.dataclass(frozen=True)
class Gemma4Config(SparseConfig):
    """The sizes of a Gemma 4 model with experts.

    Attributes:
      logit_cap: the bound c of the logits, ``c * tanh(logits / c)``. None for no bound.
    """

    logit_cap: float | None


def read_config(config: Mapping[str, Any]) -> Gemma4Config | GemmaConfig:
    """Read a parsed ``config.json``, its ``text_config`` at the top level.

    Raises:
      CheckpointError: lists all values that are missing, wrong or not supported.
    """
    fields = Fields(config)
    # "vision" concerns the tokens of images alone.
    fields.only("use_bidirectional_attention", (None, "vision"), None)
    read_activation(fields)
    attentions, cap = _read_attentions(fields, config), read_logit_cap(fields)
    if not fields.flag("enable_moe_block", False):
        return _read_dense_model(fields, attentions, cap)
    # None of the published models with experts has embeddings of layers, or shares keys.
    fields.require(
        not _read_layer_hidden(fields),
        "hidden_size_per_layer_input: expected 0, because embeddings of single layers are not "
        "supported beside experts",
    )
    fields.require(
        fields.count("num_kv_shared_layers") == 0,
        "num_kv_shared_layers: expected 0, because keys shared between layers are not supported "
        "beside experts",
    )
    top_k, total = fields.size("top_k_experts"), fields.size(*_EXPERTS)
    fields.relate(top_k <= total, f"top_k_experts: expected at most {total} experts, got {top_k}")
    read = read_sparse(
        fields,
        attentions,
        Router(top_k),
        eps=_EPS,
        experts=_EXPERTS,
        intermediate="moe_intermediate_size",
        shared_intermediate="intermediate_size",
        tied=True,
        activation=ACTIVATION,
    )
    return Gemma4Config(**vars(read), logit_cap=cap)


def read_unified_config(config: Mapping[str, Any]) -> Gemma4Config | GemmaConfig:
    """Read a parsed ``config.json`` of Gemma 4 12B; raises the errors of `read_config`."""
    return read_config({"hidden_size_per_layer_input": 0, "sliding_window": 1024, **config})


def _read_dense_model(fields, attentions, cap) -> GemmaConfig:
    """Return the sizes of a model without experts."""
    hidden, sharing = _read_layer_hidden(fields), fields.count("num_kv_shared_layers")
    kinds = _read_kinds(fields)
    fields.require(
        bool(hidden) or not sharing,
        "num_kv_shared_layers: expected 0, because keys shared between layers are not supported "
        "without embeddings of single layers (hidden_size_per_layer_input)",
    )
    fields.relate(
        set(kinds[: max(len(kinds) - sharing, 0)]) == set(kinds),
        "num_kv_shared_layers: expected fewer layers, so that one of each type has keys before "
        f"them; got {sharing}",
    )
    vocabulary = fields.size("vocab_size")
    own = fields.size("vocab_size_per_layer_input", default=262144)
    fields.relate(
        not hidden or own == vocabulary,
        f"vocab_size_per_layer_input: expected {vocabulary}, the vocab_size; got {own}",
    )
    wide = fields.flag("use_double_wide_mlp", False)
    dense = read_dense(fields, attentions, eps=_EPS, tied=True, activation=ACTIVATION)
    sizes = {**vars(dense), "logit_cap": cap}
    if not hidden:
        return GemmaConfig(**sizes)
    return EdgeConfig(**sizes, kinds=kinds, layer_hidden=hidden, sharing=sharing, wide=wide)


def _read_layer_hidden(fields) -> int:
    """Return the size of the embeddings of single layers, 0 for none."""
    name = "hidden_size_per_layer_input"
    return fields.count(name, 256) if fields.present(name) or not fields.given(name) else 0


def _read_attentions(fields, config):
    """Return the sizes of the attention of each layer."""
    shared, bias = fields.flag("attention_k_eq_v", False), fields.flag("attention_bias", False)
    window = fields.size("sliding_window", default=512)
    attentions = []
    for layer, kind in enumerate(_read_kinds(fields)):
        own = {**config, **_read_own_sizes(fields, config, layer, kind, shared)}
        own |= {"rope_parameters": _read_rope_fields(fields, config, kind), "rope_scaling": None}
        read = Fields(own)
        attentions.append(
            read_grouped_query(
                read,
                own,
                eps=_EPS,
                share=1.0,
                bias=bias,
                out_bias=bias,
                normalize="heads",
                window=window if kind == SLIDING else None,
                scale=1.0,
                values_from_keys=shared and kind == FULL,
                normalize_values=True,
            )
        )
        fields.problems += read.problems
    return tuple(attentions)


def _read_kinds(fields) -> tuple[str, ...]:
    """Return the kind of attention of each layer."""
    count = fields.size("num_hidden_layers")
    default = [SLIDING if (layer + 1) % PATTERN else FULL for layer in range(count)]
    types = fields.layer_types((SLIDING, FULL), default)
    return (*types[:-1], FULL)  # as transformers does, whatever the file says


def _read_own_sizes(fields, config, layer, kind, shared):
    """Return the fields of the config that have other values in `layer`.

    Published files give the sizes of all layers without a window. transformers 5.23 writes
    ``per_layer_config``, a mapping of layers to fields.
    """
    own = read_layer_fields(fields, config, layer, _OF_LAYERS)
    if own is not None or kind == SLIDING:
        return own or {}
    heads = config.get("num_global_key_value_heads") if shared else None
    heads = {} if heads is None else {"num_key_value_heads": heads}
    return {"head_dim": fields.size("global_head_dim", default=512), **heads}


def _read_rope_fields(fields, config, kind):
    """Return the fields of the rotary embedding of layers of this kind.

    Files have an object for each kind. One flat object applies to layers that see all keys. Those
    with a window have the same one, except for its base. vLLM reads such files so, and transformers
    cannot run them.
    """
    given = find_rope_fields(config) or _ROPES
    own = given.get(kind) if isinstance(given, dict) else None
    if isinstance(given, dict) and not any(isinstance(one, dict) for one in given.values()):
        base = fields.number("rope_local_base_freq", _ROPES[SLIDING]["rope_theta"])
        flat = {"rope_theta": config.get("rope_theta"), **given}
        own = {**flat, "rope_theta": base} if kind == SLIDING else flat
    fields.require(
        isinstance(own, dict), f"rope_parameters: expected an object {kind}, got {quoted(given)}"
    )
    return own if isinstance(own, dict) else _ROPES[kind]


class RouterNorm(nnx.Module):
    """The norm before the router: ``scale * x / sqrt(sum(x^2) + h * eps)`` for x of h channels.

    Attributes:
      scale: `nnx.Param` ``[h]``.
      eps: static float.
    """

    def __init__(self, scale: nnx.Param, eps: float):
        """Make a norm from its `scale` ``[h]`` and `eps`."""
        self.scale, self.eps = scale, eps

    def __call__(self, x):
        """Normalize ``x [..., h]``."""
        return normalize(x, self.scale.get_value() * x.shape[-1] ** -0.5, self.eps)


class DenseMLP(GatedMLP):
    """The dense MLP beside the experts, with a norm before and after it.

    Attributes:
      norm: the norm before the MLP.
      post_norm: the norm after the MLP.
    """

    def __init__(self, make: Builder, path: str, hidden: int, intermediate: int, eps: float):
        """Make the module with the `intermediate` columns of one shard."""
        super().__init__(make, path, hidden, intermediate, ACTIVATION)
        self.norm = make.norm(f"{path}.norm", hidden, eps)
        self.post_norm = make.norm(f"{path}.post_norm", hidden, eps)

    def run(self, x):
        """Run the part of one shard on tokens ``x [..., h]`` that are not normalized."""
        return super().run(self.norm(x))

    def finish(self, y):
        """Normalize the sum of all shards."""
        return self.post_norm(y)


class Layer(PostNormLayer):
    """A `PostNormLayer` whose result is multiplied by a number.

    An expert block has the norms before its parts itself, so that such a layer has no `mlp_norm`.

    Attributes:
      scale: `nnx.Param` ``[1]``.
    """

    def __init__(self, scale: nnx.Param, *parts: Any):
        """Make a layer of its `scale` and the arguments of `PostNormLayer`."""
        super().__init__(*parts)
        self.scale = scale

    def __call__(self, stream, positions, entries):
        """Run the layer with the arguments and results of `DecoderLayer`."""
        stream, entries = super().__call__(stream, positions, entries)
        return Residual(add(stream) * self.scale.get_value()[None, None]), entries


def build_moe(config: Gemma4Config | GemmaConfig, layer: int, make: Builder) -> NVFP4MoE:
    """Make the expert block of `layer` with the dense MLP beside it.

    The block reads tokens that are not normalized. The router, the experts and the dense MLP each
    have a norm of their own.

    Raises:
      ValueError: there is no such layer, or the model is dense.
    """
    if isinstance(config, GemmaConfig):
        refuse_experts(config, layer, make)
    require_experts(config, layer)
    path, e, h = f"layers.{layer}.mlp", config.num_experts, config.hidden
    params, checkpoint_scheme = make.experts(f"{path}.experts.params", e, h, config.intermediate)
    scale = make.variable(f"{path}.token_router.norm.scale", (h,), dtype=jnp.float32)

    def build_dense(make, path, hidden, width):
        return DenseMLP(make, path, hidden, width, config.eps)

    return NVFP4MoE(
        e,
        h,
        config.intermediate,
        activation=ACTIVATION,
        params=params,
        token_router=make.token_router(
            path, e, h, config.router, scale=True, norm=RouterNorm(scale, config.eps)
        ),
        shared_experts=build_gated_mlp(
            make, f"{path}.shared_experts", h, config.shared_intermediate, build_dense
        ),
        latent=LatentProjections(
            h,
            make.norm(f"{path}.latent.down", h, config.eps),
            make.norm(f"{path}.latent.up", h, config.eps),
        ),
        checkpoint_scheme=checkpoint_scheme,
        **make.settings.block_arguments(),
    )


def build_model(config: Gemma4Config | GemmaConfig, make: Builder) -> Decoder:
    """Make the whole model."""
    if isinstance(config, EdgeConfig):
        return build_edge_model(config, make)

    def build_layer(layer):
        scale = make.variable(f"layers.{layer}.scale", (1,))
        return Layer(scale, *_build_parts(config, layer, make))

    return build_around(config, make, build_layer, tied=config.tied, decoder=GemmaDecoder)


def _build_parts(config, layer, make):
    """Make the parts of a `PostNormLayer`."""
    if layer in config.dense_layers:
        return build_dense_parts(config, layer, make, before=True, activation=ACTIVATION)
    path, h, eps = f"layers.{layer}", config.hidden, config.eps
    return (
        make.norm(f"{path}.attention_norm", h, eps),
        build_attention(config, layer, make),
        make.norm(f"{path}.attention_post_norm", h, eps),
        None,
        build_moe(config, layer, make),
        make.norm(f"{path}.mlp_post_norm", h, eps),
    )


_LAYER = "model.layers.*"
KEYS = {
    **DECODER_KEYS,
    **gqa_keys("layers.*.attention", f"{_LAYER}.self_attn"),
    **gated_mlp_keys("layers.*.mlp", f"{_LAYER}.mlp"),
    **gated_mlp_keys("layers.*.mlp.shared_experts", f"{_LAYER}.mlp"),
    **NORM_KEYS,
    **EDGE_KEYS,
    "layers.*.scale": f"{_LAYER}.layer_scalar",
    "layers.*.mlp.shared_experts.norm": f"{_LAYER}.pre_feedforward_layernorm",
    "layers.*.mlp.shared_experts.post_norm": f"{_LAYER}.post_feedforward_layernorm_1",
    "layers.*.mlp.latent.down": f"{_LAYER}.pre_feedforward_layernorm_2",
    "layers.*.mlp.latent.up": f"{_LAYER}.post_feedforward_layernorm_2",
    # The name that transformers and ModelOpt write, and the name in some published files.
    "layers.*.mlp.experts.params": (f"{_LAYER}.experts", f"{_LAYER}.moe.experts"),
    "layers.*.mlp.token_router.weight": f"{_LAYER}.router.proj.weight",
    "layers.*.mlp.token_router.norm.scale": f"{_LAYER}.router.scale",
    "layers.*.mlp.token_router.scale": f"{_LAYER}.router.per_expert_scale",
}
ARCHITECTURE = Architecture(read_config, build_model, build_moe, KEYS)
UNIFIED = Architecture(read_unified_config, build_model, build_moe, KEYS)
