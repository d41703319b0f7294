"""gpt-oss.

It has attention with sinks, a sliding window in every other layer, and experts with biases and a
clamped activation.

Source: `modeling_gpt_oss` of transformers.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp

from jax_nvfp4_moe.models.config import Fields, read_rope
from jax_nvfp4_moe.models.decoder import Architecture, Decoder, build_decoder
from jax_nvfp4_moe.models.keys import DECODER_KEYS, gqa_keys, moe_keys
from jax_nvfp4_moe.models.sparse import require_experts
from jax_nvfp4_moe.nn.attention import KEY_AXES, build_keys_and_values
from jax_nvfp4_moe.nn.building import Builder
from jax_nvfp4_moe.nn.grouped_query import build_heads
from jax_nvfp4_moe.nn.moe import NVFP4MoE
from jax_nvfp4_moe.nn.packing import pack_like, spread
from jax_nvfp4_moe.numerics.activations import find_activation
from jax_nvfp4_moe.numerics.rope import Rope, rotate
from jax_nvfp4_moe.numerics.routing import Router
from jax_nvfp4_moe.ops.causal_attention import attention
from jax_nvfp4_moe.parallel.tensor_parallel import HeadParallel

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
      num_heads: the number of query heads.
      num_kv_heads: the number of key and value heads.
      head_dim: the channels of a head.
      attention_bias: whether the linears of the attention have biases.
      rope: the rotary embedding.
      windows: for each layer, the number of keys that a query sees. None means all keys.
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
    fields.relate(
        heads % kv_heads == 0,
        f"num_attention_heads: expected a multiple of {kv_heads} key heads, got {heads}",
    )
    fields.relate(head_dim % 2 == 0, f"head_dim: expected an even number, got {head_dim}")
    fields.relate(
        top_k <= experts, f"num_experts_per_tok: expected at most {experts} experts, got {top_k}"
    )
    named = config.get("rope_parameters") or config.get("rope_scaling")
    roped = config if named else {**config, "rope_parameters": _YARN}
    rope = read_rope(fields, roped, head_dim, positions, theta=_THETA)
    whole = 2 * len(rope.frequencies) == head_dim
    fields.relate(whole, "partial_rotary_factor: expected 1, because gpt-oss rotates whole heads")
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
    """Return the window of each layer. Without ``layer_types``, even layers have a window."""
    default = tuple(_FULL if layer % 2 else _SLIDING for layer in range(layers))
    types = fields.layer_types(layers, (_SLIDING, _FULL), default)
    window = fields.size("sliding_window", default=128)
    named = config.get("sliding_window", window) is not None or _SLIDING not in types
    fields.require(
        named, "sliding_window: expected a number, because layer_types has sliding_attention"
    )
    return tuple(window if kind == _SLIDING else None for kind in types)


class Attention(HeadParallel):
    """Grouped-query attention with a sink in each head.

    A sink is a learned score that takes part in the softmax, and whose value is zero.
    """

    cache_axes = KEY_AXES

    def __init__(self, config: GptOssConfig, layer: int, make: Builder, path: str):
        """Make the attention of `layer` with the heads of one shard."""
        heads, kv_heads, d = config.num_heads, config.num_kv_heads, config.head_dim
        h, bias = config.hidden, config.attention_bias
        self.config, self.dtype = config, make.settings.dtype
        self.target = make.settings.target
        shape = (config.num_kv_heads, config.head_dim)
        self.kv = build_keys_and_values(make, f"{path}.kv", k=shape, v=shape)
        self.window = config.windows[layer]
        rows = {"q": heads * d, "k": kv_heads * d, "v": kv_heads * d}
        self.qkv = make.merged_linear(f"{path}.qkv", h, rows, bias)
        self.out = make.linear(f"{path}.out", h, heads * d, bias)
        self.sinks = make.variable(f"{path}.sinks", (heads,), dtype=jnp.float32)

    def empty_cache(self, batch: int, max_length: int):
        """Return the empty cache entries: keys and values."""
        return self.kv.init_cache(batch, max_length)

    def mix(self, x, positions, entries):
        """Attend from tokens `x`; return the shape of `x` and the updated cache entries."""
        config, (b, t) = self.config, positions.shape
        heads = spread(self.qkv(x), positions).reshape(b, t, -1, config.head_dim)
        qk, v = jnp.split(heads, [config.num_heads + config.num_kv_heads], axis=2)
        q, k = jnp.split(rotate(qk, positions, config.rope), [config.num_heads], axis=2)
        seen, entries = self.kv.append(entries, positions, k=k, v=v)
        how = {"window": self.window, "sinks": self.sinks.get_value(), "target": self.target}
        y = attention(q, seen["k"], seen["v"], positions, **how)
        return self.out(pack_like(y.reshape(b, t, -1), positions, x)), entries


def build_attention(config: GptOssConfig, layer: int, make: Builder):
    """Make the attention of `layer`, whose heads are divided along the mesh axis `tensor`."""

    def attention(sizes, make, path):
        return Attention(sizes, layer, make, path)

    return build_heads(config, f"layers.{layer}.attention", make, attention)


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
        router=config.router,
        # The file alternates gate and up rows. Loading has put the gate rows before the up rows.
        activation=find_activation("swigluoai_uninterleave", limit=_LIMIT),
        params=params,
        router_weight=make.array(f"{path}.router_weight", (e, h), dtype=jnp.float32),
        router_logit_bias=make.array(f"{path}.router_logit_bias", (e,), dtype=jnp.float32),
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
    "layers.*.mlp.router_logit_bias": "model.layers.*.mlp.router.bias",
}
ARCHITECTURE = Architecture(read_config, build_model, build_moe, KEYS)
