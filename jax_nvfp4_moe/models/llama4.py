"""Llama 4, text: chunked attention with rotation beside full attention without, sigmoid router.

Source: `modeling_llama4` of transformers.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
from jax import lax

from jax_nvfp4_moe.models.config import Fields, read_rope
from jax_nvfp4_moe.models.decoder import Architecture, Decoder, build_decoder
from jax_nvfp4_moe.models.keys import DECODER_KEYS, gated_mlp_keys, gqa_keys, moe_keys
from jax_nvfp4_moe.models.sparse import require_experts
from jax_nvfp4_moe.nn.attention import KEY_AXES, attend, build_keys_and_values
from jax_nvfp4_moe.nn.building import Builder
from jax_nvfp4_moe.nn.gated_mlp import build_gated_mlp
from jax_nvfp4_moe.nn.grouped_query import build_heads
from jax_nvfp4_moe.nn.moe import NVFP4MoE
from jax_nvfp4_moe.nn.rope import Rope, rotate
from jax_nvfp4_moe.numerics.routing import Router
from jax_nvfp4_moe.parallel.tensor_parallel import HeadParallel

_THETA = 500000.0  # where the config names none
_CHUNKED, _FULL = "chunked_attention", "full_attention"


@dataclasses.dataclass(frozen=True)
class Llama4Config:
    """Sizes of a Llama 4 text model.

    Attributes:
      rotated: for each layer, whether queries and keys are rotated.
      chunks: for each layer, the chunk of positions that a query sees; None for all.
      qk_norm: whether rotated queries and keys are normalized.
      temperature: scale and floor of what unrotated queries grow by; None for nothing.
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
    rotated: tuple[bool, ...]
    chunks: tuple[int | None, ...]
    qk_norm: bool
    temperature: tuple[float, float] | None
    dense_intermediate: int
    dense_layers: frozenset[int]
    num_experts: int
    intermediate: int
    router: Router
    tied: bool


def read_config(config: Mapping[str, Any]) -> Llama4Config:
    """Read a parsed ``config.json``, the fields of ``text_config`` at its top.

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
    top_k = fields.size("num_experts_per_tok", default=1)
    fields.only("hidden_act", ("silu",), "silu")
    fields.relate(heads % kv_heads == 0, f"{heads} heads do not divide by {kv_heads} key heads")
    fields.relate(head_dim % 2 == 0, f"head_dim: expected an even number, got {head_dim}")
    fields.relate(top_k <= experts, f"num_experts_per_tok: {top_k} of {experts} experts")
    rope = read_rope(fields, config, head_dim, positions, theta=_THETA)
    whole = 2 * len(rope.frequencies) == head_dim
    fields.relate(whole, "partial_rotary_factor: Llama 4 rotates whole heads; expected 1")
    rotated = _read_rotated(fields, layers)
    dense = _read_dense(fields, layers)
    read = Llama4Config(
        vocab_size=fields.size("vocab_size"),
        hidden=hidden,
        num_layers=layers,
        max_positions=positions,
        eps=fields.number("rms_norm_eps", 1e-5),
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        attention_bias=fields.flag("attention_bias", False),
        rope=rope,
        rotated=rotated,
        chunks=_read_chunks(fields, config, rotated),
        qk_norm=fields.flag("use_qk_norm", True),
        temperature=_read_temperature(fields, config),
        dense_intermediate=fields.size("intermediate_size_mlp", default=16384) if dense else 1,
        dense_layers=dense,
        num_experts=experts,
        intermediate=fields.size("intermediate_size"),
        router=Router(top_k, score="sigmoid", select="logits", weight_on_input=True),
        tied=fields.flag("tie_word_embeddings", False),
    )
    fields.finish()
    return read


def _read_rotated(fields, layers):
    """Read ``no_rope_layers``: despite its name, 1 stands for a layer with rotation."""
    given = fields.indices("no_rope_layers")
    if not given:
        interval = fields.size("no_rope_layer_interval", default=4)
        return tuple((layer + 1) % interval != 0 for layer in range(layers))
    fields.relate(
        len(given) >= layers, f"no_rope_layers: expected {layers} of them, got {len(given)}"
    )
    return tuple(bool(rotates) for rotates in given[:layers])


def _read_chunks(fields, config, rotated):
    """Read the chunk of each layer: without ``layer_types`` those with rotation have one."""
    default = tuple(_CHUNKED if rotates else _FULL for rotates in rotated)
    types = fields.layer_types(len(rotated), (_CHUNKED, _FULL), default)
    chunk = fields.size("attention_chunk_size", default=8192)
    named = config.get("attention_chunk_size", chunk) is not None or _CHUNKED not in types
    fields.require(named, "attention_chunk_size: null, but layer_types has chunked_attention")
    return tuple(chunk if kind == _CHUNKED else None for kind in types)


def _read_temperature(fields, config):
    """Read how queries without rotation grow with their position, None for not at all."""
    scale, floor = fields.number("attn_scale", 0.1), fields.number("floor_scale", 8192.0)
    fields.relate(floor > 0, f"floor_scale: expected a positive number, got {floor}")
    if type(config.get("attn_temperature_tuning")) is int:  # published configs hold 0 and 4
        return (scale, floor) if config["attn_temperature_tuning"] else None
    return (scale, floor) if fields.flag("attn_temperature_tuning", True) else None


def _read_dense(fields, layers):
    """Read which layers have no experts: those that ``moe_layers`` or the step leaves out."""
    step = fields.size("interleave_moe_layer_step", default=1)
    sparse = set(range(step - 1, layers, step))
    if fields.present("moe_layers"):
        sparse = set(fields.indices("moe_layers"))
    return frozenset(range(layers)) - sparse


class Attention(HeadParallel):
    """Grouped-query attention: rotated and normalized within chunks, or neither over all."""

    cache_axes = KEY_AXES

    def __init__(self, config: Llama4Config, layer: int, make: Builder, path: str):
        """Make one with the heads of one shard."""
        heads, kv_heads, d = config.num_heads, config.num_kv_heads, config.head_dim
        h, bias = config.hidden, config.attention_bias
        self.config, self.dtype = config, make.settings.dtype
        shape = (config.num_kv_heads, config.head_dim)
        self.kv = build_keys_and_values(make, f"{path}.kv", k=shape, v=shape)
        self.rotated, self.chunk = config.rotated[layer], config.chunks[layer]
        rows = {"q": heads * d, "k": kv_heads * d, "v": kv_heads * d}
        self.qkv = make.merged_linear(f"{path}.qkv", h, rows, bias)
        self.out = make.linear(f"{path}.out", h, heads * d, bias)

    def empty_cache(self, batch: int, max_length: int):
        """Return empty cache entries: keys and values."""
        return self.kv.init_cache(batch, max_length)

    def mix(self, x, positions, entries):
        """Attend from ``x [b, t, h]``; returns ``[b, t, h]`` and the cache entries."""
        config, (b, t, _) = self.config, x.shape
        heads = self.qkv(x).reshape(b, t, -1, config.head_dim)
        qk, v = jnp.split(heads, [config.num_heads + config.num_kv_heads], axis=2)
        if self.rotated:
            qk = self._rotate(qk, positions)
        q, k = jnp.split(qk, [config.num_heads], axis=2)
        if not self.rotated and config.temperature is not None:
            q = _grow(q, positions, *config.temperature)
        seen, entries = self.kv.append(entries, positions, k=k, v=v)
        scale = config.head_dim**-0.5
        y = attend(q, seen["k"], seen["v"], positions, scale, chunk=self.chunk)
        return self.out(y.reshape(b, t, -1)), entries

    def _rotate(self, qk, positions):
        """Rotate pairs that stand side by side, and normalize heads.

        Pairs are first put half a width apart, in queries and keys alike: scores do not change.
        """
        apart = jnp.concatenate([qk[..., 0::2], qk[..., 1::2]], axis=-1)
        turned = rotate(apart, positions, self.config.rope)
        if not self.config.qk_norm:
            return turned
        wide = turned.astype(jnp.float32)
        mean = jnp.mean(jnp.square(wide), axis=-1, keepdims=True)
        return (wide * lax.rsqrt(mean + self.config.eps)).astype(turned.dtype)


def _grow(q, positions, scale, floor):
    """Return ``q * (1 + scale * log(1 + floor((position + 1) / floor)))``.

    Source: arXiv:2501.19399.
    """
    steps = jnp.floor((positions.astype(jnp.float32) + 1.0) / floor)
    factors = jnp.log1p(steps) * scale + 1.0
    return (q.astype(jnp.float32) * factors[:, :, None, None]).astype(q.dtype)


def build_attention(config: Llama4Config, layer: int, make: Builder):
    """Make the attention of `layer`, over a mesh divided along `tensor`."""

    def attention(sizes, make, path):
        return Attention(sizes, layer, make, path)

    return build_heads(config, f"layers.{layer}.attention", make, attention)


def build_moe(config: Llama4Config, layer: int, make: Builder) -> NVFP4MoE:
    """Make the expert block of `layer`, shared expert included.

    Raises:
      ValueError: that layer has none.
    """
    require_experts(config, layer)
    path, e, h = f"layers.{layer}.mlp", config.num_experts, config.hidden
    params, checkpoint_scheme = make.experts(
        f"{path}.experts.params", e, h, config.intermediate, inputs_first=True
    )
    shared = build_gated_mlp(make, f"{path}.shared_experts", h, config.intermediate)
    return NVFP4MoE(
        e,
        h,
        config.intermediate,
        router=config.router,
        params=params,
        router_weight=make.array(f"{path}.router_weight", (e, h), dtype=jnp.float32),
        shared_experts=shared,
        checkpoint_scheme=checkpoint_scheme,
        **make.settings.block_arguments(),
    )


def build_model(config: Llama4Config, make: Builder) -> Decoder:
    """Make the whole model, layer by layer."""
    return build_decoder(config, make, build_attention, build_moe)


_BLOCK = "model.layers.*.feed_forward"
KEYS = {
    **DECODER_KEYS,
    **gqa_keys("layers.*.attention", "model.layers.*.self_attn"),
    **gated_mlp_keys("layers.*.mlp", _BLOCK),
    **moe_keys(_BLOCK, router="router", shared="shared_expert"),
}
ARCHITECTURE = Architecture(read_config, build_model, build_moe, KEYS)
