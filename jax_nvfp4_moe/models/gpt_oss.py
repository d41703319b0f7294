"""gpt-oss.

It has attention with sinks, a sliding window in every other layer, and experts with biases and a
clamped activation.

Source: `modeling_gpt_oss` of transformers.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

from jax_nvfp4_moe.models.config import Fields, find_rope_fields, read_positions, read_rope
from jax_nvfp4_moe.models.decoder import Architecture, Decoder, build_decoder
from jax_nvfp4_moe.models.keys import DECODER_KEYS, gqa_keys, moe_keys
from jax_nvfp4_moe.models.sparse import require_experts
from jax_nvfp4_moe.nn.attention.grouped_query import GQAConfig, build_attention
from jax_nvfp4_moe.nn.building.builder import Builder
from jax_nvfp4_moe.nn.experts.moe import NVFP4MoE
from jax_nvfp4_moe.numerics.activations import find_activation
from jax_nvfp4_moe.numerics.routing import Router

_THETA = 150000.0  # the default of rope_theta
_YARN = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}
_SLIDING, _FULL = "sliding_attention", "full_attention"
_ALPHA = 1.702  # the factor inside of the activation's sigmoid, in the code as well
_LIMIT = 7.0  # the clamp of gate and up; transformers has it in the code, not in the config


@dataclasses.dataclass(frozen=True)
class GptOssConfig:
    """The sizes of a gpt-oss model.

    Attributes:
      vocab_size: the number of token ids.
      hidden: the size of the residual stream.
      num_layers: the number of layers.
      max_positions: the number of positions that the model was trained for.
      eps: the epsilon of the norms.
      attention: the sizes of the attention of each layer. They differ in their windows.
      num_experts: the number of experts in a layer.
      intermediate: the intermediate size of one expert.
      router: how tokens choose experts.
      tied: whether the head shares the weights of the embedding.
      dense_layers: empty, because every layer has experts.
      dense_intermediate: not used.
    """

    vocab_size: int
    hidden: int
    num_layers: int
    max_positions: int
    eps: float
    attention: tuple[GQAConfig, ...]
    num_experts: int
    intermediate: int
    router: Router
    tied: bool
    dense_layers: tuple[int, ...] = ()
    dense_intermediate: int = 1


def read_config(config: Mapping[str, Any]) -> GptOssConfig:
    """Read a parsed ``config.json``.

    Raises:
      CheckpointError: lists all values that are missing, wrong or not supported.
    """
    fields = Fields(config)
    hidden, layers = fields.size("hidden_size"), fields.size("num_hidden_layers")
    positions = fields.size("max_position_embeddings", default=131072)
    experts = fields.size("num_local_experts", "num_experts")
    top_k = fields.size("num_experts_per_tok", "experts_per_token")
    fields.only("hidden_act", ("silu",), "silu")
    fields.only("swiglu_limit", (_LIMIT,), _LIMIT)
    fields.only("swiglu_alpha", (_ALPHA,), _ALPHA)
    fields.relate(
        top_k <= experts, f"num_experts_per_tok: expected at most {experts} experts, got {top_k}"
    )
    attention = _read_attention(fields, _with_rope(config), hidden, positions)
    read = GptOssConfig(
        vocab_size=fields.size("vocab_size"),
        hidden=hidden,
        num_layers=layers,
        max_positions=read_positions(fields, _with_rope(config), positions),
        eps=attention.eps,
        attention=tuple(
            dataclasses.replace(attention, window=window)
            for window in _read_windows(fields, config, layers)
        ),
        num_experts=experts,
        intermediate=fields.size("intermediate_size"),
        router=Router(top_k, select="logits"),
        tied=fields.flag("tie_word_embeddings", False),
    )
    fields.finish()
    return read


def _with_rope(config):
    """Return the config with a rotary embedding, the default one if it has none."""
    return config if find_rope_fields(config) else {**config, "rope_parameters": _YARN}


def _read_attention(fields, config, hidden, positions):
    """Return the sizes of an attention without a window."""
    heads, kv_heads = fields.heads()
    head_dim = fields.size("head_dim", default=max(hidden // heads, 1))
    fields.relate(head_dim % 2 == 0, f"head_dim: expected an even number, got {head_dim}")
    rope = read_rope(fields, config, head_dim, positions, theta=_THETA)
    whole = 2 * len(rope.frequencies) == head_dim
    fields.relate(whole, "partial_rotary_factor: expected 1, because gpt-oss rotates whole heads")
    bias, eps = fields.flag("attention_bias", True), fields.number("rms_norm_eps", 1e-5)
    options = {"bias": bias, "out_bias": bias, "sinks": True}
    return GQAConfig(hidden, heads, kv_heads, head_dim, eps, rope, **options)


def _read_windows(fields, config, layers):
    """Return the window of each layer. Without ``layer_types``, even layers have a window."""
    default = tuple(_FULL if layer % 2 else _SLIDING for layer in range(layers))
    types = fields.layer_types((_SLIDING, _FULL), default)
    window = fields.size("sliding_window", default=128)
    named = config.get("sliding_window", window) is not None or _SLIDING not in types
    fields.require(
        named, "sliding_window: expected a number, because layer_types has sliding_attention"
    )
    return tuple(window if kind == _SLIDING else None for kind in types)


def build_moe(config: GptOssConfig, layer: int, make: Builder) -> NVFP4MoE:
    """Make the expert block of `layer`.

    Raises:
      ValueError: the model has no such layer.
    """
    require_experts(config, layer)
    path, e, h = f"layers.{layer}.mlp", config.num_experts, config.hidden
    stored = {"bias": True, "interleaved": True, "inputs_first": True}
    params, checkpoint_scheme = make.experts(
        f"{path}.experts.params", e, h, config.intermediate, **stored
    )
    return NVFP4MoE(
        e,
        h,
        config.intermediate,
        # The file alternates gate and up rows. Loading has put the gate rows before the up rows.
        activation=find_activation("swigluoai_uninterleave", limit=_LIMIT),
        params=params,
        token_router=make.token_router(path, e, h, config.router, logit_bias=True),
        checkpoint_scheme=checkpoint_scheme,
        **make.settings.block_arguments(),
    )


def build_model(config: GptOssConfig, make: Builder) -> Decoder:
    """Make the whole model."""
    return build_decoder(config, make, build_attention, build_moe)


KEYS = {
    **DECODER_KEYS,
    **gqa_keys("layers.*.attention", "model.layers.*.self_attn"),
    **moe_keys("model.layers.*.mlp", router="router"),
    "layers.*.mlp.token_router.logit_bias": "model.layers.*.mlp.router.bias",
}
ARCHITECTURE = Architecture(read_config, build_model, build_moe, KEYS)
