"""gpt-oss: attention with sinks, every other layer in a window; clamped experts with biases.

Source: `modeling_gpt_oss` of transformers.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
from flax import nnx

from jax_nvfp4_moe.models.attention import KEY_AXES, KeysAndValues, attend, rotate
from jax_nvfp4_moe.models.config import Fields, Rope, read_rope
from jax_nvfp4_moe.models.decoder import (
    Architecture,
    Decoder,
    MergedLinear,
    Settings,
    build_decoder,
    linear,
)
from jax_nvfp4_moe.models.grouped_query import build_heads
from jax_nvfp4_moe.models.sparse import require_experts
from jax_nvfp4_moe.nn.moe import NVFP4MoE
from jax_nvfp4_moe.numerics.routing import Router

_THETA = 150000.0  # where the config names none
_YARN = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}
_SLIDING, _FULL = "sliding_attention", "full_attention"
_LIMIT = 7.0  # of gate and up; transformers reads it from no config


@dataclasses.dataclass(frozen=True)
class GptOssConfig:
    """Sizes of a gpt-oss model.

    Attributes:
      windows: for each layer, keys that a query sees; None for all.
      dense_layers, dense_intermediate: no layer is dense.
      tied: whether the head shares the embedding.
    """

    vocab_size: int
    hidden: int
    num_layers: int
    max_positions: int
    eps: float
    num_heads: int
    num_kv_heads: int
    head_dim: int
    attention_bias: bool
    rope: Rope
    windows: tuple[int | None, ...]
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
    hidden, heads = fields.size("hidden_size"), fields.size("num_attention_heads")
    kv_heads = fields.size("num_key_value_heads", default=heads)
    head_dim = fields.size("head_dim", default=max(hidden // heads, 1))
    layers = fields.size("num_hidden_layers")
    positions = fields.size("max_position_embeddings", default=131072)
    experts = fields.size("num_local_experts", "num_experts")
    top_k = fields.size("num_experts_per_tok", "experts_per_token")
    fields.only("hidden_act", ("silu",), "silu")
    fields.only("swiglu_limit", (_LIMIT,), _LIMIT)
    fields.relate(heads % kv_heads == 0, f"{heads} heads do not divide by {kv_heads} key heads")
    fields.relate(head_dim % 2 == 0, f"head_dim: expected an even number, got {head_dim}")
    fields.relate(top_k <= experts, f"num_experts_per_tok: {top_k} of {experts} experts")
    named = config.get("rope_parameters") or config.get("rope_scaling")
    roped = config if named else {**config, "rope_parameters": _YARN}
    rope = read_rope(fields, roped, head_dim, positions, theta=_THETA)
    whole = 2 * len(rope.frequencies) == head_dim
    fields.relate(whole, "partial_rotary_factor: gpt-oss rotates whole heads; expected 1")
    read = GptOssConfig(
        vocab_size=fields.size("vocab_size"),
        hidden=hidden,
        num_layers=layers,
        max_positions=positions,
        eps=fields.number("rms_norm_eps", 1e-5),
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        attention_bias=fields.flag("attention_bias", True),
        rope=rope,
        windows=_read_windows(fields, config, layers),
        num_experts=experts,
        intermediate=fields.size("intermediate_size"),
        router=Router(top_k, select="logits"),
        tied=fields.flag("tie_word_embeddings", False),
    )
    fields.finish()
    return read


def _read_windows(fields, config, layers):
    """Read the window of each layer: without ``layer_types`` the even ones have one."""
    default = tuple(_FULL if layer % 2 else _SLIDING for layer in range(layers))
    types = fields.layer_types(layers, (_SLIDING, _FULL), default)
    window = fields.size("sliding_window", default=128)
    named = config.get("sliding_window", window) is not None or _SLIDING not in types
    fields.require(named, "sliding_window: null, but layer_types has sliding_attention")
    return tuple(window if kind == _SLIDING else None for kind in types)


class Attention(nnx.Module):
    """Grouped-query attention; each head has a sink, a score whose value is zero."""

    cache_axes = KEY_AXES

    def __init__(self, config: GptOssConfig, layer: int, weights, prefix: str, settings: Settings):
        """Ask `weights` for the tensors below `prefix`."""
        heads, kv_heads, d = config.num_heads, config.num_kv_heads, config.head_dim
        h, bias = config.hidden, config.attention_bias
        self.config, self.dtype = config, settings.dtype
        shape = (config.num_kv_heads, config.head_dim)
        self.kv = KeysAndValues(weights, prefix, settings, k=shape, v=shape)
        self.window = config.windows[layer]
        self.qkv = MergedLinear(
            q=linear(weights, f"{prefix}.q_proj", heads * d, h, settings, bias),
            k=linear(weights, f"{prefix}.k_proj", kv_heads * d, h, settings, bias),
            v=linear(weights, f"{prefix}.v_proj", kv_heads * d, h, settings, bias),
        )
        self.out = linear(weights, f"{prefix}.o_proj", h, heads * d, settings, bias)
        self.sinks = nnx.Param(weights.array(f"{prefix}.sinks", (heads,), dtype=jnp.float32))

    def init_cache(self, batch: int, max_length: int):
        """Return empty cache entries: keys and values."""
        return self.kv.init_cache(batch, max_length)

    def __call__(self, x, positions, entries):
        """Attend from ``x [b, t, h]``; returns ``[b, t, h]`` and the cache entries."""
        config, (b, t, _) = self.config, x.shape
        heads = self.qkv(x).reshape(b, t, -1, config.head_dim)
        qk, v = jnp.split(heads, [config.num_heads + config.num_kv_heads], axis=2)
        q, k = jnp.split(rotate(qk, positions, config.rope), [config.num_heads], axis=2)
        seen, entries = self.kv.append(entries, positions, k=k, v=v)
        scale, sinks = config.head_dim**-0.5, self.sinks.get_value()
        y = attend(q, seen["k"], seen["v"], positions, scale, window=self.window, sinks=sinks)
        return self.out(y.reshape(b, t, -1)), entries


def build_attention(config: GptOssConfig, layer: int, weights, settings: Settings):
    """Make the attention of `layer`, over a mesh in parts along `tensor`."""

    def make(sizes, weights, prefix, settings):
        return Attention(sizes, layer, weights, prefix, settings)

    return build_heads(config, f"model.layers.{layer}.self_attn", weights, settings, make)


def moe_prefix(layer: int) -> str:
    """Return the module of the expert block of `layer`."""
    return f"model.layers.{layer}.mlp"


def build_moe(config: GptOssConfig, layer: int, weights, settings: Settings) -> NVFP4MoE:
    """Make the expert block of `layer`.

    Raises:
      ValueError: there is no such layer.
    """
    require_experts(config, layer)
    prefix, e, h = moe_prefix(layer), config.num_experts, config.hidden
    params, checkpoint_scheme = weights.experts(
        f"{prefix}.experts",
        e,
        h,
        config.intermediate,
        bias=True,
        interleaved=True,
        inputs_first=True,
    )
    return NVFP4MoE(
        e,
        h,
        config.intermediate,
        router=config.router,
        activation="swigluoai_uninterleave",  # loading has put gate rows before up rows
        limit=_LIMIT,
        params=params,
        router_weight=weights.array(f"{prefix}.router.weight", (e, h), dtype=jnp.float32),
        router_logit_bias=weights.array(f"{prefix}.router.bias", (e,), dtype=jnp.float32),
        checkpoint_scheme=checkpoint_scheme,
        **settings.block_arguments(),
    )


def build_model(config: GptOssConfig, weights, settings: Settings) -> Decoder:
    """Make the whole model, layer by layer."""
    return build_decoder(config, weights, settings, build_attention, build_moe)


ARCHITECTURE = Architecture(read_config, build_model, build_moe, moe_prefix)
