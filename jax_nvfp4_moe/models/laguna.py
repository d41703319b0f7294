"""Laguna.

A gate multiplies the result of every attention. Layers differ in their window, their rotation and
their number of query heads.

Source: `modeling_laguna` and `configuration_laguna` of transformers.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jax_nvfp4_moe.checkpoint.errors import quoted
from jax_nvfp4_moe.models.config import Fields
from jax_nvfp4_moe.models.decoder import Architecture, Decoder, build_decoder
from jax_nvfp4_moe.models.grouped_query_config import read_grouped_query, with_rope_of
from jax_nvfp4_moe.models.keys import DECODER_KEYS, gated_mlp_keys, gqa_keys, moe_keys
from jax_nvfp4_moe.models.sparse import (
    SparseConfig,
    build_block,
    find_dense_layers,
    read_sparse,
    read_top_k,
)
from jax_nvfp4_moe.nn.attention.grouped_query import Attention, GQAConfig, build_heads
from jax_nvfp4_moe.nn.building.builder import Builder
from jax_nvfp4_moe.nn.experts.moe import NVFP4MoE
from jax_nvfp4_moe.numerics.routing import Router

_EXPERTS = "num_experts"
_EPS = 1e-6
_SLIDING, _FULL = "sliding_attention", "full_attention"
_PER_HEAD, _PER_CHANNEL = (True, "per-head"), "per-element"
_ROPES = {
    _FULL: {"rope_type": "default", "rope_theta": 5e5, "partial_rotary_factor": 0.5},
    _SLIDING: {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 1.0},
}
# Options that have this value in all published models. No other is supported.
_ONLY = {
    "norm_topk_prob": True,
    "moe_router_use_sigmoid": True,
    "moe_apply_router_weight_on_input": False,
    "swa_attention_sink_enabled": False,
    "decoder_sparse_step": 1,
}


@dataclasses.dataclass(frozen=True)
class LagunaConfig(SparseConfig):
    """The sizes of a Laguna model.

    Attributes:
      logit_cap: the bound c of the router's logits, ``c * tanh(logits / c)``. None for no bound.
      gate_per_channel: whether each channel of a head has its own gate. Otherwise a head has one.
    """

    logit_cap: float | None
    gate_per_channel: bool


def read_config(config: Mapping[str, Any]) -> LagunaConfig:
    """Read a parsed ``config.json``.

    Raises:
      CheckpointError: lists all values that are missing, wrong or not supported.
    """
    fields = Fields(config)
    for name, value in _ONLY.items():
        fields.only(name, (value,), value)
    cap = fields.number("moe_router_logit_softcapping", 0.0)
    router = Router(
        read_top_k(fields, _EXPERTS),
        score="sigmoid",
        scaling=fields.number("moe_routed_scaling_factor", 1.0),
    )
    gating = fields.only("gating", (*_PER_HEAD, _PER_CHANNEL), True)
    _check_gating_types(fields, config, gating)
    read = read_sparse(
        fields,
        _read_attentions(fields, config),
        router,
        eps=_EPS,
        experts=(_EXPERTS,),
        intermediate="moe_intermediate_size",
        dense_layers=_read_dense_layers(fields),
        shared_intermediate="shared_expert_intermediate_size",
    )
    return LagunaConfig(
        **vars(read),
        logit_cap=cap if cap > 0 else None,
        gate_per_channel=gating == _PER_CHANNEL,
    )


def _check_gating_types(fields, config, gating):
    """Check the list ``gating_types`` of newer files, which transformers does not read."""
    wanted = "per_element" if gating == _PER_CHANNEL else "per_head"
    given = config.get("gating_types") or []
    fields.require(
        isinstance(given, list) and all(one == wanted for one in given),
        f"gating_types: expected {wanted} for every layer, as gating says; got {quoted(given)}",
    )


def _read_dense_layers(fields):
    """Return the layers without experts, by default the first one."""
    dense = find_dense_layers(fields)
    dense = frozenset({0}) if dense is None else dense
    listed = fields.indices("mlp_only_layers")
    fields.relate(
        not listed or dense == set(listed),
        f"mlp_only_layers: expected {sorted(dense)}, the dense layers of mlp_layer_types; got "
        f"{list(listed)}",
    )
    return dense


def _read_attentions(fields, config):
    """Return the sizes of the attention of each layer."""
    count = fields.size("num_hidden_layers")
    types = fields.layer_types((_SLIDING, _FULL), [_FULL] * count)
    same = (fields.size("num_attention_heads"),) * count
    heads = fields.indices("num_attention_heads_per_layer") or same
    fields.relate(
        len(heads) == count and all(number > 0 for number in heads),
        f"num_attention_heads_per_layer: expected {count} positive numbers, got {list(heads)}",
    )
    window = fields.count("sliding_window", 512)
    fields.relate(
        window > 0 or _SLIDING not in types,
        f"sliding_window: expected a positive integer for sliding_attention, got {window}",
    )
    bias = fields.flag("attention_bias", False)
    attentions = []
    for number, kind in zip(heads, types, strict=False):
        own = with_rope_of(fields, {"num_key_value_heads": 8, **config}, kind, _ROPES)
        own["num_attention_heads"] = number
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
                window=window if kind == _SLIDING else None,
            )
        )
        fields.problems += read.problems
    return tuple(attentions)


class GatedAttention(Attention):
    """Grouped-query attention whose result is multiplied by a gate.

    ``y = out(softplus(gate(x)) * attention(x))``, with a gate for each head or for each channel.
    """

    def __init__(self, config: GQAConfig, make: Builder, path: str, *, per_channel: bool):
        """Build the layer at `path`; the sizes in `config` are those of one shard."""
        super().__init__(config, make, path)
        gates = config.num_heads * (config.head_dim if per_channel else 1)
        self.gate = make.linear(f"{path}.gate", gates, config.hidden)

    def mix(self, x, positions, entries):
        """Return the attention of tokens `x`, in the shape of `x`, and the cache entries."""
        y, entries = self.attend(x, positions, entries)
        gate = jax.nn.softplus(self.gate(x).astype(jnp.float32))
        gated = y.astype(jnp.float32) * gate.reshape(*y.shape[:3], -1)
        return self.out(lax.collapse(gated.astype(y.dtype), 2)), entries


def build_attention(config: LagunaConfig, layer: int, make: Builder) -> GatedAttention:
    """Make the attention of `layer`, whose heads are sharded along the mesh axis `tensor`."""

    def build(sizes, make, path):
        return GatedAttention(sizes, make, path, per_channel=config.gate_per_channel)

    return build_heads(config.attention[layer], f"layers.{layer}.attention", make, build)


def build_moe(config: LagunaConfig, layer: int, make: Builder) -> NVFP4MoE:
    """Make the expert block of `layer`; raises the errors of `sparse.build_block`."""
    return build_block(config, layer, make, bias=True, logit_cap=config.logit_cap)


def build_model(config: LagunaConfig, make: Builder) -> Decoder:
    """Make the whole model."""
    return build_decoder(config, make, build_attention, build_moe)


_ATTENTION, _BLOCK = "model.layers.*.self_attn", "model.layers.*.mlp"
KEYS = {
    **DECODER_KEYS,
    **gqa_keys("layers.*.attention", _ATTENTION),
    "layers.*.attention.gate": f"{_ATTENTION}.g_proj",
    **gated_mlp_keys("layers.*.mlp", _BLOCK),
    **moe_keys(_BLOCK),
    # The names in published files, and the names of transformers in memory.
    **gated_mlp_keys(
        "layers.*.mlp.shared_experts", (f"{_BLOCK}.shared_expert", f"{_BLOCK}.shared_experts")
    ),
    "layers.*.mlp.token_router.correction_bias": (
        f"{_BLOCK}.experts.e_score_correction_bias",
        f"{_BLOCK}.gate.e_score_correction_bias",
    ),
}
ARCHITECTURE = Architecture(
    read_config, build_model, build_moe, KEYS, renamed={".shared_expert.": ".shared_experts."}
)
