"""MiMo-V2-Flash.

Most layers attend over a window, with a sink for each head and with twice as many key heads.
Values are narrower than keys, and have a factor.

Source: `modeling_mimo_v2_flash` and `configuration_mimo_v2_flash` of transformers.
"""

from collections.abc import Mapping
from typing import Any

from jax_nvfp4_moe.checkpoint.errors import quoted
from jax_nvfp4_moe.models.config import Fields
from jax_nvfp4_moe.models.decoder import Architecture, Decoder, build_decoder
from jax_nvfp4_moe.models.grouped_query_config import read_grouped_query, with_rope_of
from jax_nvfp4_moe.models.keys import DECODER_KEYS, gated_mlp_keys, gqa_keys, moe_keys
from jax_nvfp4_moe.models.sparse import (
    SparseConfig,
    build_block,
    find_dense_layers,
    read_grouped_router,
    read_sparse,
)
from jax_nvfp4_moe.nn.attention.grouped_query import build_attention
from jax_nvfp4_moe.nn.building.builder import Builder
from jax_nvfp4_moe.nn.experts.moe import NVFP4MoE

_EXPERTS = ("n_routed_experts", "num_local_experts")
_EPS = 1e-5
_SLIDING, _FULL = "sliding_attention", "full_attention"
_PATTERN = 6  # without layer_types, each layer of this number sees all keys, and so does the first
_WINDOW = 129
_SHARE = 0.334
# Options that have this value in all published models. No other is supported.
_ONLY = {
    "n_shared_experts": 0,
    "add_swa_attention_sink_bias": True,
    "add_full_attention_sink_bias": False,
}


def read_config(config: Mapping[str, Any]) -> SparseConfig:
    """Read a parsed ``config.json``.

    Raises:
      CheckpointError: lists all values that are missing, wrong or not supported.
    """
    fields = Fields(config)
    for name, value in _ONLY.items():
        fields.only(name, (value,), value)
    eps = fields.number("rms_norm_eps", _EPS)
    fields.only("layernorm_epsilon", (eps,), eps)
    dense = find_dense_layers(fields)
    if dense is None:
        dense = _listed(fields, config, "moe_layer_freq", 0)
    return read_sparse(
        fields,
        _read_attentions(fields, config),
        read_grouped_router(fields, *_EXPERTS),
        eps=_EPS,
        experts=_EXPERTS,
        intermediate="moe_intermediate_size",
        dense_layers=frozenset({0}) if dense is None else dense,
    )


def _listed(fields, config, name, wanted):
    """Return the layers with the value `wanted` in a list of zeros and ones; None without one."""
    given, count = config.get(name), fields.size("num_hidden_layers")
    if given is None:
        return None
    sound = isinstance(given, list) and len(given) == count
    sound = sound and all(type(one) is int and one in (0, 1) for one in given)
    fields.require(sound, f"{name}: expected a list of {count} zeros and ones, got {quoted(given)}")
    return frozenset(n for n, one in enumerate(given) if one == wanted) if sound else frozenset()


def _read_attentions(fields, config):
    """Return the sizes of the attention of each layer."""
    count = fields.size("num_hidden_layers")
    sliding = _listed(fields, config, "hybrid_layer_pattern", 1)
    if sliding is None:
        sliding = frozenset(n for n in range(1, count) if (n + 1) % _PATTERN)
    default = [_SLIDING if layer in sliding else _FULL for layer in range(count)]
    types = fields.layer_types((_SLIDING, _FULL), default)
    window = fields.size("sliding_window", default=_WINDOW)
    if fields.present("sliding_window_size"):  # which counts the keys before the query alone
        window = fields.size("sliding_window_size") + 1
    key_heads = fields.size("num_key_value_heads", default=4)
    options = {
        _FULL: {"window": None, "sinks": False},
        _SLIDING: {"window": window, "sinks": True},
    }
    _check_sliding_sizes(fields, key_heads)
    ropes = _default_ropes(fields, config)
    scale = fields.number("attention_value_scale", 0.707) if _has_scale(config) else 1.0
    bias = fields.flag("attention_bias", False)
    sizes = {}
    for kind in (_FULL, _SLIDING):
        heads = key_heads * (2 if kind == _SLIDING else 1)
        own = with_rope_of(fields, {**config, "num_key_value_heads": heads}, kind, ropes)
        read = Fields(own)
        sizes[kind] = read_grouped_query(
            read,
            own,
            eps=_EPS,
            head_dim=192,
            share=_SHARE,
            bias=bias,
            out_bias=False,
            value_dim=fields.size("v_head_dim", default=128),
            value_scale=scale,
            **options[kind],
        )
        fields.problems += read.problems if kind in types else []
    return tuple(sizes[kind] for kind in types)


def _has_scale(config):
    """Return whether values have a factor: null is none, and a missing field is the default."""
    return config.get("attention_value_scale", 0.0) is not None


def _check_sliding_sizes(fields, key_heads):
    """Check the sizes of layers with a window that published files name apart."""
    same = {
        "swa_num_attention_heads": fields.size("num_attention_heads"),
        "swa_num_key_value_heads": 2 * key_heads,
        "swa_head_dim": fields.size("head_dim", default=192),
        "swa_v_head_dim": fields.size("v_head_dim", default=128),
    }
    for name, value in same.items():
        fields.only(name, (value,), value)


def _default_ropes(fields, config):
    """Return ``rope_parameters`` of a config that has none, but the fields of published files."""
    if config.get("rope_parameters") is None:
        fields.only("rope_scaling", ({"type": "default"}, {"rope_type": "default"}, {}), {})
    share = fields.number("partial_rotary_factor", _SHARE)
    thetas = {
        _FULL: fields.number("rope_theta", 5e6),
        _SLIDING: fields.number("swa_rope_theta", 1e4),
    }
    return {
        kind: {"rope_type": "default", "rope_theta": theta, "partial_rotary_factor": share}
        for kind, theta in thetas.items()
    }


def build_moe(config: SparseConfig, layer: int, make: Builder) -> NVFP4MoE:
    """Make the expert block of `layer`; raises the errors of `sparse.build_block`."""
    return build_block(config, layer, make, bias=True)


def build_model(config: SparseConfig, make: Builder) -> Decoder:
    """Make the whole model."""
    return build_decoder(config, make, build_attention, build_moe)


_ATTENTION = "model.layers.*.self_attn"
KEYS = {
    **DECODER_KEYS,
    **gqa_keys("layers.*.attention", _ATTENTION),
    # The name in published files, and the name that transformers uses in memory.
    "layers.*.attention.sinks": (f"{_ATTENTION}.attention_sink_bias", f"{_ATTENTION}.sinks"),
    **gated_mlp_keys("layers.*.mlp", "model.layers.*.mlp"),
    **moe_keys("model.layers.*.mlp", bias="gate.e_score_correction_bias"),
}
ARCHITECTURE = Architecture(read_config, build_model, build_moe, KEYS)
