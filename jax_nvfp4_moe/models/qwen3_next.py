"""Qwen3-Next.

Every fourth layer has a gated attention, and the others have a gated delta net. The shared expert
has a gate too.

Source: `modeling_qwen3_next` of transformers.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from jax_nvfp4_moe.models.config import Fields, read_rope
from jax_nvfp4_moe.models.decoder import Architecture, Decoder, build_decoder
from jax_nvfp4_moe.models.drafting_layers import MTP, one_layer
from jax_nvfp4_moe.models.keys import DECODER_KEYS, delta_keys, gated_mlp_keys, gqa_keys, moe_keys
from jax_nvfp4_moe.models.sparse import read_sparse_step, require_experts
from jax_nvfp4_moe.nn.attention.grouped_query import GQAConfig, build_heads
from jax_nvfp4_moe.nn.building.builder import Builder
from jax_nvfp4_moe.nn.experts.gated_mlp import build_gated_mlp
from jax_nvfp4_moe.nn.experts.moe import NVFP4MoE
from jax_nvfp4_moe.nn.recurrent.gated_delta_net import DeltaSizes, build_delta_net
from jax_nvfp4_moe.numerics.routing import Router

# Layer type -> whether the layer has an attention. The names after the first of each kind occur in
# older files.
_ATTENDS = {
    "full_attention": True,
    "attention": True,
    "linear_attention": False,
    "mamba": False,
    "conv": False,
}


GATES = ("silu", "swish")  # the gate of the gated delta net, by its two names


@dataclasses.dataclass(frozen=True)
class Qwen3NextConfig:
    """The sizes of a Qwen3-Next or Qwen3.5-MoE model.

    Attributes:
      vocab_size: the number of token ids.
      hidden: the size of the residual stream.
      num_layers: the number of layers.
      max_positions: the number of positions that the model was trained for.
      eps: the epsilon of the norms.
      attention_layers: the indices of layers with an attention. The others have a gated delta net.
      attention: the sizes of the attention, whose heads are normalized and have gates.
      delta: the sizes of the gated delta net.
      dense_intermediate: the intermediate size of dense MLPs.
      dense_layers: the indices of layers with one dense MLP in place of experts.
      num_experts: the number of routed experts in a layer.
      intermediate: the intermediate size of one expert.
      shared_intermediate: the intermediate size of the shared expert.
      router: how tokens choose experts.
      tied: whether the head shares the weights of the embedding.
    """

    vocab_size: int
    hidden: int
    num_layers: int
    max_positions: int
    eps: float
    attention_layers: frozenset[int]
    attention: GQAConfig
    delta: DeltaSizes
    dense_intermediate: int
    dense_layers: frozenset[int]
    num_experts: int
    intermediate: int
    shared_intermediate: int
    router: Router
    tied: bool


def read_config(config: Mapping[str, Any]) -> Qwen3NextConfig:
    """Read a parsed ``config.json``.

    Raises:
      CheckpointError: lists all values that are missing, wrong or not supported.
    """
    fields = Fields(config)
    renormalize = fields.flag("norm_topk_prob", True)
    return read_sizes(
        fields, config, dense_layers=read_sparse_step(fields), renormalize=renormalize
    )


def read_sizes(
    fields: Fields,
    config: Mapping[str, Any],
    *,
    dense_layers: frozenset[int],
    renormalize: bool,
    gates: Sequence[str] = GATES,
) -> Qwen3NextConfig:
    """Read the sizes that Qwen3-Next and Qwen3.5-MoE have in common.

    Missing values take the defaults of transformers.

    Args:
      fields: the fields of `config`.
      config: a parsed ``config.json``.
      dense_layers: the indices of layers without experts.
      renormalize: whether the weights of the chosen experts are divided by their sum.
      gates: as for `read_mixers`.

    Raises:
      CheckpointError: as for `read_config`.
    """
    experts, top_k = fields.size("num_experts"), fields.size("num_experts_per_tok")
    fields.relate(
        top_k <= experts, f"num_experts_per_tok: expected at most {experts} experts, got {top_k}"
    )
    read = Qwen3NextConfig(
        **read_mixers(fields, config, gates),
        dense_intermediate=fields.size("intermediate_size", default=1) if dense_layers else 1,
        dense_layers=dense_layers,
        num_experts=experts,
        intermediate=fields.size("moe_intermediate_size", default=512),
        shared_intermediate=fields.size("shared_expert_intermediate_size", default=512),
        router=Router(top_k, renormalize=renormalize),
    )
    fields.finish()
    return read


def read_mixers(
    fields: Fields, config: Mapping[str, Any], gates: Sequence[str] = GATES
) -> dict[str, Any]:
    """Return all sizes but those of MLPs and experts, by their names in `Qwen3NextConfig`.

    Args:
      fields: the fields of `config`, which receive the problems.
      config: a parsed ``config.json``.
      gates: the functions that the gate of the gated delta net may have.
    """
    hidden, layers = fields.size("hidden_size"), fields.size("num_hidden_layers")
    positions = fields.size("max_position_embeddings", default=32768)
    eps = fields.number("rms_norm_eps", 1e-6)
    fields.only("hidden_act", ("silu", "swish"), "silu")
    fields.only("attn_output_gate", (True,), True)
    fields.only("output_gate_type", gates, GATES[0])
    fields.only("layer_scale", (False,), False)
    return {
        "vocab_size": fields.size("vocab_size"),
        "hidden": hidden,
        "num_layers": layers,
        "max_positions": fields.positions(positions),
        "eps": eps,
        "attention_layers": _read_attention_layers(fields, layers),
        "attention": _read_attention(fields, config, hidden, positions, eps),
        "delta": _read_delta(fields, hidden, eps),
        "tied": fields.flag("tie_word_embeddings", False),
    }


def _read_attention_layers(fields, layers):
    """Return the layers with an attention, from ``layer_types`` or ``full_attention_interval``."""
    if not fields.present("layer_types"):
        interval = fields.size("full_attention_interval", default=4)
        return frozenset(range(interval - 1, layers, interval))
    types = fields.layer_types(_ATTENDS, ())
    return frozenset(layer for layer, kind in enumerate(types) if _ATTENDS[kind])


def _read_attention(fields, config, hidden, positions, eps):
    """Return the sizes of the attention."""
    heads, kv_heads = fields.heads(2)
    head_dim = fields.size("head_dim", default=256)
    bias = fields.flag("attention_bias", False)
    return GQAConfig(
        hidden,
        heads,
        kv_heads,
        head_dim,
        eps,
        read_rope(fields, {"partial_rotary_factor": 0.25, **config}, head_dim, positions),
        bias=bias,
        out_bias=bias,
        normalize="heads",
        centered=True,
        gated=True,
    )


def _read_delta(fields, hidden, eps):
    """Return the sizes of the gated delta net."""
    key_heads = fields.size("linear_num_key_heads", default=16)
    value_heads = fields.size("linear_num_value_heads", default=32)
    fields.multiple("linear_num_value_heads", value_heads, key_heads, "key heads")
    return DeltaSizes(
        hidden=hidden,
        key_heads=key_heads,
        value_heads=value_heads,
        key_head_dim=fields.size("linear_key_head_dim", default=128),
        value_head_dim=fields.size("linear_value_head_dim", default=128),
        conv_size=fields.size("linear_conv_kernel_dim", default=4),
        eps=eps,
    )


def build_mixer(config: Any, layer: int, make: Builder):
    """Make the attention or the gated delta net of `layer`.

    Its heads are sharded along the mesh axis `tensor`.

    Args:
      config: has `attention_layers`, `attention` and `delta`.
      layer: the index of the layer.
      make: builds the parts.
    """
    path = f"layers.{layer}.attention"
    if layer in config.attention_layers:
        return build_heads(config.attention, path, make)
    return build_delta_net(config.delta, path, make)


def build_moe(config: Qwen3NextConfig, layer: int, make: Builder) -> NVFP4MoE:
    """Make the expert block of `layer` with its shared expert.

    Raises:
      ValueError: the layer has no experts.
    """
    require_experts(config, layer)
    path, e, h = f"layers.{layer}.mlp", config.num_experts, config.hidden
    params, checkpoint_scheme = make.experts(f"{path}.experts.params", e, h, config.intermediate)
    shared = build_gated_mlp(make, f"{path}.shared_experts", h, config.shared_intermediate)
    return NVFP4MoE(
        e,
        h,
        config.intermediate,
        params=params,
        token_router=make.token_router(path, e, h, config.router),
        shared_experts=shared,
        shared_gate=make.linear(f"{path}.shared_gate", 1, h),
        checkpoint_scheme=checkpoint_scheme,
        **make.settings.block_arguments(),
    )


def build_model(config: Qwen3NextConfig, make: Builder) -> Decoder:
    """Make the whole model."""
    return build_decoder(config, make, build_mixer, build_moe, centered=True)


_BLOCK = "model.layers.*.mlp"
KEYS = {
    **DECODER_KEYS,
    **gqa_keys("layers.*.attention", "model.layers.*.self_attn"),
    **delta_keys("layers.*.attention", "model.layers.*.linear_attn"),
    **gated_mlp_keys("layers.*.mlp", _BLOCK),
    **moe_keys(_BLOCK, shared="shared_expert"),
    "layers.*.mlp.shared_gate": f"{_BLOCK}.shared_expert_gate",
}
DRAFTING = one_layer(
    MTP,
    build_mixer,
    build_moe,
    centered=True,
    attention_layers=lambda config: frozenset({0}),  # whatever the layers of the model have
)
ARCHITECTURE = Architecture(read_config, build_model, build_moe, KEYS, drafting=DRAFTING)
