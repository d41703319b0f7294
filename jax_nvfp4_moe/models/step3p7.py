"""Step-3.7, the language model.

Most layers attend over a window, with further query heads and another rotation. A gate for each
head multiplies the output of every attention. Some layers bound the activations of their experts,
and all norms are stored as ``weight - 1``.

Source: `modeling_step3p7` and `configuration_step3p7` of transformers.
"""

import dataclasses
import functools
import math
from collections.abc import Mapping
from typing import Any

from jax import lax

from jax_nvfp4_moe.checkpoint.errors import quoted
from jax_nvfp4_moe.models.config import Fields, is_finite, is_index
from jax_nvfp4_moe.models.decoder import Architecture, Decoder, DecoderLayer, build_around
from jax_nvfp4_moe.models.grouped_query_config import (
    read_grouped_query,
    read_layer_fields,
    read_window,
)
from jax_nvfp4_moe.models.keys import DECODER_KEYS, gated_mlp_keys, gqa_keys, moe_keys
from jax_nvfp4_moe.models.sparse import (
    SparseConfig,
    build_block,
    find_dense_layers,
    read_sparse,
    read_top_k,
    require_experts,
)
from jax_nvfp4_moe.nn.attention.grouped_query import Attention, GQAConfig, build_heads
from jax_nvfp4_moe.nn.building.builder import Builder
from jax_nvfp4_moe.nn.experts.gated_mlp import GatedMLP, build_gated_mlp
from jax_nvfp4_moe.nn.experts.moe import NVFP4MoE
from jax_nvfp4_moe.numerics.activations import find_activation
from jax_nvfp4_moe.numerics.routing import Router
from jax_nvfp4_moe.ops.gating import gate_heads

_EXPERTS = "n_routed_experts"
_HEADS = "num_attention_heads"
_EPS = 1e-5
_DENSE = 3  # the leading layers without experts, if the file does not say which they are
_SLIDING, _FULL = "sliding_attention", "full_attention"
# The names in published files -> the names that transformers 5 writes.
_NAMES = {
    "num_attention_groups": "num_key_value_heads",
    "moe_num_experts": _EXPERTS,
    "num_local_experts": _EXPERTS,
    "moe_top_k": "num_experts_per_tok",
    "share_expert_dims": "share_expert_dim",
}
# Lists with a value for each layer. In published files, the layers that predict further tokens have
# values at the end.
_LISTS = (
    "layer_types",
    "mlp_layer_types",
    "swiglu_limits",
    "swiglu_limits_shared",
    "rope_theta",
    "partial_rotary_factors",
)


@dataclasses.dataclass(frozen=True)
class Step3p7Config(SparseConfig):
    """The sizes of a Step-3.7 model.

    Attributes:
      expert_limits: the bound of the activations of the routed experts of each layer. Infinity for
        no bound.
      mlp_limits: the same for the shared experts of each layer, or its dense MLP.
    """

    expert_limits: tuple[float, ...]
    mlp_limits: tuple[float, ...]


def read_config(config: Mapping[str, Any]) -> Step3p7Config:
    """Read a parsed ``config.json``, its ``text_config`` at the top level.

    Raises:
      CheckpointError: lists all values that are missing, wrong or not supported.
    """
    config = _with_current_names(config)
    fields = Fields(config)
    fields.only("gating", (True, "per-head"), True)
    fields.only("use_bidirectional_attention", (False,), False)
    fields.only("mlp_bias", (False,), False)
    count = fields.size("num_hidden_layers")
    expert_limits = _read_limits(fields, config, "swiglu_limits", count)
    mlp_limits = _read_limits(fields, config, "swiglu_limits_shared", count)
    scaling = fields.number("moe_router_scaling_factor", 1.0)
    read = read_sparse(
        fields,
        _read_attentions(fields, config, count),
        Router(read_top_k(fields, _EXPERTS), score="sigmoid", scaling=scaling),
        eps=_EPS,
        experts=(_EXPERTS,),
        intermediate="moe_intermediate_size",
        dense_layers=_read_dense_layers(fields, config, count),
        shared_intermediate="share_expert_dim",
    )
    return Step3p7Config(**vars(read), expert_limits=expert_limits, mlp_limits=mlp_limits)


def _with_current_names(config):
    """Return the config with the names of transformers 5, and lists of the decoder layers alone."""
    config = {_NAMES.get(name, name): config[name] for name in config} | {
        name: config[name] for name in _NAMES.values() if name in config
    }
    count, further = config.get("num_hidden_layers"), config.get("num_nextn_predict_layers")
    if type(count) is int and type(further) is int:
        for name in _LISTS:
            if isinstance(config.get(name), list) and len(config[name]) == count + further:
                config[name] = config[name][:count]
    return config


def _read_limits(fields, config, name, count):
    """Return the bound of the activations of each layer. The file has 0 or null for none."""
    given = config.get(name) or [0.0] * count
    sound = isinstance(given, list) and len(given) == count
    sound = sound and all(
        limit is None or (type(limit) in (int, float) and is_finite(limit) and limit >= 0)
        for limit in given
    )
    fields.require(
        sound, f"{name}: expected {count} numbers of 0 or more, or null; got {quoted(given)}"
    )
    return tuple(float(limit or math.inf) for limit in given) if sound else (math.inf,) * count


def _read_dense_layers(fields, config, count):
    """Return the layers without experts, from ``mlp_layer_types`` or ``moe_layers_enum``."""
    dense = find_dense_layers(fields)
    if dense is not None:
        return dense
    given = config.get("moe_layers_enum")
    if given is None:
        return frozenset(range(min(_DENSE, count)))
    listed = given.split(",") if isinstance(given, str) else given
    sound = isinstance(listed, list) and all(is_index(str(layer).strip()) for layer in listed)
    fields.require(
        sound, f"moe_layers_enum: expected indices with commas between them, got {quoted(given)}"
    )
    return frozenset(range(count)) - {int(layer) for layer in listed} if sound else frozenset()


def _read_attentions(fields, config, count):
    """Return the sizes of the attention of each layer."""
    types = fields.layer_types((_SLIDING, _FULL), [_FULL] * count)
    window, bias = read_window(fields), fields.flag("attention_bias", False)
    fields.relate(
        window is not None or _SLIDING not in types,
        "sliding_window: null, but layer_types has sliding_attention",
    )
    head_dim = fields.size("head_dim", default=128)
    scalar = fields.number("query_pre_attn_scalar", head_dim)
    fields.require(scalar > 0, f"query_pre_attn_scalar: expected a positive number, got {scalar}")
    attentions = []
    for layer, kind in enumerate(types):
        own = {"num_key_value_heads": 8, **config, **_read_heads(fields, config, layer, kind)}
        own |= {"rope_parameters": _read_rope_fields(fields, config, types, kind)}
        own |= {"rope_scaling": None}
        read = Fields(own)
        attentions.append(
            read_grouped_query(
                read,
                own,
                eps=_EPS,
                head_dim=128,
                share=1.0,
                bias=bias,
                out_bias=bias,
                normalize="heads",
                centered=True,
                window=window if kind == _SLIDING else None,
                scale=abs(scalar or 1.0) ** -0.5,
            )
        )
        fields.problems += read.problems
    return tuple(attentions)


def _read_heads(fields, config, layer, kind):
    """Return the number of query heads of a layer, if it is another than in the whole config.

    transformers writes ``per_layer_config``, a mapping of layers to fields. Published files have an
    object ``attention_other_setting`` with the sizes of all layers that have a window.
    """
    own = read_layer_fields(fields, config, layer, (_HEADS,))
    if own is not None or kind != _SLIDING:
        return own or {}
    if fields.present("num_sliding_attention_heads"):
        return {_HEADS: fields.size("num_sliding_attention_heads")}
    other = config.get("attention_other_setting") or {}
    if not isinstance(other, dict):
        fields.require(False, f"attention_other_setting: expected an object, got {quoted(other)}")
        return {}
    return {_HEADS: other[_HEADS]} if _HEADS in other else {}


def _read_rope_fields(fields, config, types, kind):
    """Return the fields of the rotary embedding of layers of this kind.

    transformers writes an object for each kind. Published files have a list of bases and a list of
    rotated shares, and ``rope_scaling`` for layers that see all keys.
    """
    given = config.get("rope_parameters")
    if isinstance(given, dict) and all(isinstance(given.get(one), dict) for one in set(types)):
        return given[kind]
    fields.require(
        not given,
        f"rope_parameters: expected an object for each of {', '.join(sorted(set(types)))}, or "
        f"the lists rope_theta and partial_rotary_factors; got {quoted(given)}",
    )
    found = {"rope_type": "default"}
    layer = types.index(kind)
    names = {"rope_theta": "rope_theta", "partial_rotary_factors": "partial_rotary_factor"}
    for name, own in names.items():
        value = config.get(name)
        if isinstance(value, list):
            fields.require(
                len(value) == len(types),
                f"{name}: expected {len(types)} numbers, got {quoted(value)}",
            )
            value = value[layer] if layer < len(value) else None
        if value is not None:
            found[own] = value
    scaling = config.get("rope_scaling")
    return found | scaling if kind == _FULL and isinstance(scaling, dict) else found


class HeadGatedAttention(Attention):
    """Grouped-query attention in which each query head has a gate for its output.

    ``y = out(sigmoid(gate(x)) * attention(x))``, with one gate for all channels of a head.

    Attributes:
      by_channel: static; whether each channel of a head has a gate of its own instead.
    """

    by_channel = False

    def __init__(self, config: GQAConfig, make: Builder, path: str):
        """Build the layer at `path`; the sizes in `config` are those of one shard."""
        super().__init__(config, make, path)
        gates = config.num_heads * (config.head_dim if self.by_channel else 1)
        self.gate = make.linear(f"{path}.gate", gates, config.hidden)

    def mix(self, x, positions, entries):
        """Return the attention of tokens `x`, in the shape of `x`, and the cache entries."""
        y, entries = self.attend(x, positions, entries)
        y = gate_heads(y, self.gate(x), target=self.target)
        return self.out(lax.collapse(y, 2)), entries


def _bounded(limit):
    """Return the activation of MLPs or experts whose activations have this bound."""
    return find_activation("swiglustep", limit=limit)


def build_attention(config: Step3p7Config, layer: int, make: Builder) -> HeadGatedAttention:
    """Make the attention of `layer`, whose heads are sharded along the mesh axis `tensor`."""
    path = f"layers.{layer}.attention"
    return build_heads(config.attention[layer], path, make, HeadGatedAttention)


def build_moe(config: Step3p7Config, layer: int, make: Builder) -> NVFP4MoE:
    """Make the expert block of `layer`; raises the errors of `sparse.build_block`."""
    require_experts(config, layer)
    return build_block(
        config,
        layer,
        make,
        bias=True,
        activation=_bounded(config.expert_limits[layer]),
        shared_activation=_bounded(config.mlp_limits[layer]),
    )


def build_model(config: Step3p7Config, make: Builder) -> Decoder:
    """Make the whole model."""

    def build_layer(layer):
        path, h, eps = f"layers.{layer}", config.hidden, config.eps
        if layer in config.dense_layers:
            build = functools.partial(GatedMLP, activation=_bounded(config.mlp_limits[layer]))
            mlp = build_gated_mlp(make, f"{path}.mlp", h, config.dense_intermediate, build)
        else:
            mlp = build_moe(config, layer, make)
        return DecoderLayer(
            make.norm(f"{path}.attention_norm", h, eps, centered=True),
            build_attention(config, layer, make),
            make.norm(f"{path}.mlp_norm", h, eps, centered=True),
            mlp,
        )

    return build_around(config, make, build_layer, tied=config.tied, centered=True)


_LAYER = "model.layers.*"
# The name of the expert block in transformers 5, and its name in published files.
_BLOCKS = (f"{_LAYER}.mlp", f"{_LAYER}.moe")
KEYS = {
    **DECODER_KEYS,
    **gqa_keys("layers.*.attention", f"{_LAYER}.self_attn"),
    "layers.*.attention.gate": f"{_LAYER}.self_attn.g_proj",
    **gated_mlp_keys("layers.*.mlp", f"{_LAYER}.mlp"),
    **moe_keys(*_BLOCKS),
    **gated_mlp_keys(
        "layers.*.mlp.shared_experts", (f"{_LAYER}.mlp.shared_experts", f"{_LAYER}.share_expert")
    ),
    "layers.*.mlp.token_router.correction_bias": (
        f"{_BLOCKS[0]}.gate.e_score_correction_bias",
        f"{_BLOCKS[1]}.router_bias",
    ),
}
ARCHITECTURE = Architecture(read_config, build_model, build_moe, KEYS)
