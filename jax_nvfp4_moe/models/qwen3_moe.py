"""Qwen3-MoE: grouped-query attention with normalized queries and keys, softmax-routed experts.

Source: `modeling_qwen3_moe` of transformers.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
from flax import nnx

from jax_nvfp4_moe.models.attention import KeysAndValues, attend, rotate
from jax_nvfp4_moe.models.config import Fields, Rope, read_rope
from jax_nvfp4_moe.models.decoder import (
    Architecture,
    Decoder,
    RMSNorm,
    Settings,
    SideBySide,
    build_decoder,
    linear,
)
from jax_nvfp4_moe.nn import NVFP4MoE
from jax_nvfp4_moe.routing import Router


@dataclasses.dataclass(frozen=True)
class Qwen3MoeConfig:
    """Sizes of a Qwen3-MoE model.

    Attributes:
      dense_layers: indices of layers whose feed-forward is one dense MLP.
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
    dense_intermediate: int
    dense_layers: frozenset[int]
    num_experts: int
    intermediate: int
    router: Router
    tied: bool


def read_config(config: Mapping[str, Any]) -> Qwen3MoeConfig:
    """Read a parsed ``config.json``.

    Raises:
      CheckpointError: lists all values that are missing, wrong or not supported.
    """
    fields = Fields(config)
    hidden, heads = fields.size("hidden_size"), fields.size("num_attention_heads")
    kv_heads = fields.size("num_key_value_heads", default=heads)
    head_dim = fields.size("head_dim", default=max(hidden // heads, 1))
    layers = fields.size("num_hidden_layers")
    positions = fields.size("max_position_embeddings")
    experts = fields.size("num_experts", "num_local_experts")
    top_k = fields.size("num_experts_per_tok")
    fields.only("hidden_act", ("silu",), "silu")
    fields.relate(heads % kv_heads == 0, f"{heads} heads do not divide by {kv_heads} key heads")
    fields.relate(head_dim % 2 == 0, f"head_dim: expected an even number, got {head_dim}")
    fields.relate(top_k <= experts, f"num_experts_per_tok: {top_k} of {experts} experts")
    window = config.get("use_sliding_window", True) and fields.present("sliding_window")
    fields.require(not window, "sliding_window is not supported")
    step = fields.size("decoder_sparse_step", default=1)
    dense = set(fields.indices("mlp_only_layers"))
    dense |= {layer for layer in range(layers) if (layer + 1) % step}
    read = Qwen3MoeConfig(
        vocab_size=fields.size("vocab_size"),
        hidden=hidden,
        num_layers=layers,
        max_positions=positions,
        eps=fields.number("rms_norm_eps", 1e-6),
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        attention_bias=fields.flag("attention_bias", False),
        rope=read_rope(fields, config, head_dim, positions),
        dense_intermediate=fields.size("intermediate_size", default=1) if dense else 1,
        dense_layers=frozenset(dense),
        num_experts=experts,
        intermediate=fields.size("moe_intermediate_size"),
        router=Router(top_k, renormalize=fields.flag("norm_topk_prob", False)),
        tied=fields.flag("tie_word_embeddings", False),
    )
    fields.finish()
    return read


class Attention(nnx.Module):
    """Grouped-query attention; queries and keys are normalized per head, then rotated."""

    def __init__(self, config: Qwen3MoeConfig, weights, prefix: str, settings: Settings):
        """Ask `weights` for the tensors below `prefix`."""
        heads, kv_heads, d = config.num_heads, config.num_kv_heads, config.head_dim
        h, bias = config.hidden, config.attention_bias
        self.config, self.dtype = config, settings.dtype
        self.qkv = SideBySide(
            q=linear(weights, f"{prefix}.q_proj", heads * d, h, settings, bias),
            k=linear(weights, f"{prefix}.k_proj", kv_heads * d, h, settings, bias),
            v=linear(weights, f"{prefix}.v_proj", kv_heads * d, h, settings, bias),
        )
        self.out = linear(weights, f"{prefix}.o_proj", h, heads * d, settings, bias)
        self.kv = KeysAndValues(weights, prefix, settings, k=(kv_heads, d), v=(kv_heads, d))
        norms = ("q_norm", heads), ("k_norm", kv_heads)
        self.qk_norm = RMSNorm(
            jnp.concatenate(
                [
                    jnp.broadcast_to(weights.array(f"{prefix}.{name}.weight", (d,)), (count, d))
                    for name, count in norms
                ]
            ),
            config.eps,
        )

    def init_cache(self, batch: int, max_length: int):
        """Return empty cache entries: keys and values."""
        return self.kv.init_cache(batch, max_length)

    def __call__(self, x, positions, entries):
        """Attend from ``x [b, t, h]``; returns ``[b, t, h]`` and the cache entries."""
        config, (b, t, _) = self.config, x.shape
        heads = self.qkv(x).reshape(b, t, -1, config.head_dim)
        qk, v = jnp.split(heads, [config.num_heads + config.num_kv_heads], axis=2)
        qk = rotate(self.qk_norm(qk), positions, config.rope)
        q, k = jnp.split(qk, [config.num_heads], axis=2)
        seen, entries = self.kv.append(entries, positions, k=k, v=v)
        y = attend(q, seen["k"], seen["v"], positions, config.head_dim**-0.5)
        return self.out(y.reshape(b, t, -1)), entries


def build_attention(config: Qwen3MoeConfig, layer: int, weights, settings: Settings) -> Attention:
    """Make the attention of `layer`."""
    return Attention(config, weights, f"model.layers.{layer}.self_attn", settings)


def moe_prefix(layer: int) -> str:
    """Return the module of the expert block of `layer`."""
    return f"model.layers.{layer}.mlp"


def build_moe(config: Qwen3MoeConfig, layer: int, weights, settings: Settings) -> NVFP4MoE:
    """Make the expert block of `layer`.

    Raises:
      ValueError: that layer has none.
    """
    if not 0 <= layer < config.num_layers or layer in config.dense_layers:
        raise ValueError(
            f"layer: expected one with experts, below {config.num_layers} and not of "
            f"{sorted(config.dense_layers)}; got {layer}"
        )
    prefix, e, h = moe_prefix(layer), config.num_experts, config.hidden
    params, declared = weights.experts(f"{prefix}.experts", e, h, config.intermediate)
    return NVFP4MoE(
        e,
        h,
        config.intermediate,
        router=config.router,
        params=params,
        router_weight=weights.array(f"{prefix}.gate.weight", (e, h), dtype=jnp.float32),
        declared=declared,
        **settings.module_arguments(),
    )


def build_model(config: Qwen3MoeConfig, weights, settings: Settings) -> Decoder:
    """Make the whole model, layer by layer."""
    return build_decoder(config, weights, settings, build_attention, build_moe)


ARCHITECTURE = Architecture(read_config, build_model, build_moe, moe_prefix)
