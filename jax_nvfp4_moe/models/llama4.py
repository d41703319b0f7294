"""Llama 4, the language model.

Most layers have attention within chunks of positions and a rotary embedding. The others attend to
all positions, without a rotary embedding. The router has sigmoid scores.

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
from jax_nvfp4_moe.nn.attention.grouped_query import build_heads
from jax_nvfp4_moe.nn.attention.kv_cache import KEY_AXES, build_keys_and_values, group_channels
from jax_nvfp4_moe.nn.building.builder import Builder, as_stored
from jax_nvfp4_moe.nn.experts.gated_mlp import build_gated_mlp
from jax_nvfp4_moe.nn.experts.moe import NVFP4MoE
from jax_nvfp4_moe.nn.packing import pack_like, unpack
from jax_nvfp4_moe.numerics.query_growth import grow
from jax_nvfp4_moe.numerics.rope import Rope, rotate
from jax_nvfp4_moe.numerics.routing import Router
from jax_nvfp4_moe.ops.causal_attention.op import attention
from jax_nvfp4_moe.parallel.tensor_parallel import HeadParallel

_THETA = 500000.0  # the default of rope_theta
_CHUNKED, _FULL = "chunked_attention", "full_attention"


@dataclasses.dataclass(frozen=True)
class Llama4Config:
    """The sizes of a Llama 4 language model.

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
      rotated: for each layer, whether queries and keys are rotated.
      chunks: for each layer, the size of the chunk of positions within which a query sees keys.
        None means all positions.
      qk_norm: whether rotated queries and keys are normalized.
      temperature: scale and floor of the factor on queries that are not rotated; see `grow`. None
        means no such factor.
      dense_intermediate: the intermediate size of dense MLPs.
      dense_layers: the indices of layers with one dense MLP in place of experts.
      num_experts: the number of routed experts in a layer.
      intermediate: the intermediate size of one expert.
      router: how tokens choose experts.
      tied: whether the head shares the weights of the embedding.
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
    """Read a parsed ``config.json`` in which the fields of ``text_config`` are at the top level.

    Raises:
      CheckpointError: lists all values that are missing, wrong or not supported.
    """
    fields = Fields(config)
    hidden, (heads, kv_heads) = fields.size("hidden_size"), fields.heads()
    head_dim = fields.size("head_dim", default=max(hidden // heads, 1))
    layers = fields.size("num_hidden_layers")
    positions = fields.size("max_position_embeddings", default=131072)
    experts = fields.size("num_local_experts", "num_experts")
    top_k = fields.size("num_experts_per_tok", default=1)
    fields.only("hidden_act", ("silu",), "silu")
    fields.relate(head_dim % 2 == 0, f"head_dim: expected an even number, got {head_dim}")
    fields.relate(
        top_k <= experts, f"num_experts_per_tok: expected at most {experts} experts, got {top_k}"
    )
    rope = read_rope(fields, config, head_dim, positions, theta=_THETA)
    whole = 2 * len(rope.frequencies) == head_dim
    fields.relate(whole, "partial_rotary_factor: expected 1, because Llama 4 rotates whole heads")
    rotated = _read_rotated(fields, layers)
    dense = _read_dense(fields, layers)
    read = Llama4Config(
        vocab_size=fields.size("vocab_size"),
        hidden=hidden,
        num_layers=layers,
        max_positions=fields.positions(positions),
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
    """Return whether each layer has a rotary embedding.

    Despite its name, ``no_rope_layers`` stores 1 for a layer that has one.
    """
    given = fields.indices("no_rope_layers")
    if not given:
        interval = fields.size("no_rope_layer_interval", default=4)
        return tuple((layer + 1) % interval != 0 for layer in range(layers))
    fields.relate(
        len(given) >= layers, f"no_rope_layers: expected {layers} integers, got {len(given)}"
    )
    return tuple(bool(rotates) for rotates in given[:layers])


def _read_chunks(fields, config, rotated):
    """Return the chunk of each layer. Without ``layer_types``, rotated layers have a chunk."""
    default = tuple(_CHUNKED if rotates else _FULL for rotates in rotated)
    types = fields.layer_types((_CHUNKED, _FULL), default)
    chunk = fields.size("attention_chunk_size", default=8192)
    named = config.get("attention_chunk_size", chunk) is not None or _CHUNKED not in types
    fields.require(
        named, "attention_chunk_size: expected a number, because layer_types has chunked_attention"
    )
    return tuple(chunk if kind == _CHUNKED else None for kind in types)


def _read_temperature(fields, config):
    """Return scale and floor of the factor on queries that are not rotated; None for no factor."""
    scale, floor = fields.number("attn_scale", 0.1), fields.number("floor_scale", 8192.0)
    fields.relate(floor > 0, f"floor_scale: expected a positive number, got {floor}")
    # The flag is an integer in published configs, which have 0 or 4.
    if type(config.get("attn_temperature_tuning")) is int:
        return (scale, floor) if config["attn_temperature_tuning"] else None
    return (scale, floor) if fields.flag("attn_temperature_tuning", True) else None


def _read_dense(fields, layers):
    """Return the layers without experts: those that ``moe_layers``, or else the step, leave out."""
    step = fields.size("interleave_moe_layer_step", default=1)
    sparse = set(range(step - 1, layers, step))
    if fields.present("moe_layers"):
        sparse = set(fields.indices("moe_layers"))
    return frozenset(range(layers)) - sparse


class Attention(HeadParallel):
    """Grouped-query attention, in one of two forms.

    A rotated layer rotates queries and keys, normalizes them, and attends within chunks of
    positions. Any other layer does neither, and attends to all positions.
    """

    cache_axes = KEY_AXES

    def __init__(self, config: Llama4Config, layer: int, make: Builder, path: str):
        """Make the attention of `layer` with the heads of one shard."""
        heads, kv_heads, d = config.num_heads, config.num_kv_heads, config.head_dim
        h, bias = config.hidden, as_stored(config.attention_bias)
        self.config, self.dtype = config, make.settings.dtype
        self.target = make.settings.target
        shape = (config.num_kv_heads, config.head_dim)
        self.kv = build_keys_and_values(make, f"{path}.kv", k=shape, v=shape)
        self.rotated, self.chunk = config.rotated[layer], config.chunks[layer]
        rows = {"q": heads * d, "k": kv_heads * d, "v": kv_heads * d}
        self.qkv = make.merged_linear(f"{path}.qkv", h, rows, bias)
        self.out = make.linear(f"{path}.out", h, heads * d, bias)

    def empty_cache(self, batch: int, max_length: int):
        """Return the empty cache entries: keys and values."""
        return self.kv.init_cache(batch, max_length)

    def mix(self, x, positions, entries):
        """Attend from tokens `x`; return the shape of `x` and the updated cache entries."""
        config = self.config
        heads = group_channels(unpack(self.qkv(x), positions), config.head_dim)
        qk, v = jnp.split(heads, [config.num_heads + config.num_kv_heads], axis=2)
        if self.rotated:
            qk = self._rotate(qk, positions)
        q, k = jnp.split(qk, [config.num_heads], axis=2)
        if not self.rotated and config.temperature is not None:
            q = grow(q, positions + 1, *config.temperature)
        seen, entries = self.kv.append(entries, positions, {"k": k, "v": v})
        how = {"chunk": self.chunk, "target": self.target, **self.kv.scale_options}
        y = attention(q, seen["k"], seen["v"], positions, **how)
        return self.out(pack_like(lax.collapse(y, 2), positions, x)), entries

    def _rotate(self, qk, positions):
        """Rotate and normalize queries and keys.

        The file's rotation pairs neighboring channels, and `rotate` pairs channels that are half a
        head apart. Moving the channels of queries and keys in the same way does not change their
        products.
        """
        apart = jnp.concatenate([qk[..., 0::2], qk[..., 1::2]], axis=-1)
        turned = rotate(apart, positions, self.config.rope)
        if not self.config.qk_norm:
            return turned
        wide = turned.astype(jnp.float32)
        mean = jnp.mean(jnp.square(wide), axis=-1, keepdims=True)
        return (wide * lax.rsqrt(mean + self.config.eps)).astype(turned.dtype)


def build_attention(config: Llama4Config, layer: int, make: Builder):
    """Make the attention of `layer`, whose heads are sharded along the mesh axis `tensor`."""

    def attention(sizes, make, path):
        return Attention(sizes, layer, make, path)

    return build_heads(config, f"layers.{layer}.attention", make, attention)


def build_moe(config: Llama4Config, layer: int, make: Builder) -> NVFP4MoE:
    """Make the expert block of `layer` with its shared expert.

    Raises:
      ValueError: the layer has no experts.
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
        params=params,
        token_router=make.token_router(path, e, h, config.router),
        shared_experts=shared,
        checkpoint_scheme=checkpoint_scheme,
        **make.settings.block_arguments(),
    )


def build_model(config: Llama4Config, make: Builder) -> Decoder:
    """Make the whole model."""
    return build_decoder(config, make, build_attention, build_moe)


_BLOCK = "model.layers.*.feed_forward"
KEYS = {
    **DECODER_KEYS,
    **gqa_keys("layers.*.attention", "model.layers.*.self_attn"),
    **gated_mlp_keys("layers.*.mlp", _BLOCK),
    **moe_keys(_BLOCK, router="router", shared="shared_expert"),
}
ARCHITECTURE = Architecture(
    read_config,
    build_model,
    build_moe,
    KEYS,
    renamed={"model.language_model.": "language_model.model."},
    swaps_experts=True,
)
