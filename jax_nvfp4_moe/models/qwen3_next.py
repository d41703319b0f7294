"""Qwen3-Next.

Every fourth layer has a gated attention, and the others have a gated delta net. The shared expert
has a gate too.

Source: `modeling_qwen3_next` of transformers.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from jax_nvfp4_moe.checkpoint.errors import quoted
from jax_nvfp4_moe.models.config import Fields, read_rope
from jax_nvfp4_moe.models.decoder import Architecture, Decoder, build_decoder
from jax_nvfp4_moe.models.keys import DECODER_KEYS, delta_keys, gated_mlp_keys, gqa_keys, moe_keys
from jax_nvfp4_moe.models.sparse import read_sparse_step, require_experts
from jax_nvfp4_moe.nn.attention import KEY_AXES, build_keys_and_values
from jax_nvfp4_moe.nn.building import Builder
from jax_nvfp4_moe.nn.gated_delta_net import DeltaSizes, build_delta_net
from jax_nvfp4_moe.nn.gated_mlp import build_gated_mlp
from jax_nvfp4_moe.nn.grouped_query import build_heads
from jax_nvfp4_moe.nn.moe import NVFP4MoE
from jax_nvfp4_moe.nn.packing import pack_like, spread
from jax_nvfp4_moe.numerics.rope import Rope, rotate
from jax_nvfp4_moe.numerics.routing import Router
from jax_nvfp4_moe.ops.causal_attention import attention
from jax_nvfp4_moe.parallel.tensor_parallel import HeadParallel

# Layer type -> whether the layer has an attention. The names after the first of each kind occur in
# older files.
_ATTENDS = {
    "full_attention": True,
    "attention": True,
    "linear_attention": False,
    "mamba": False,
    "conv": False,
}


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
      num_heads: the number of query heads.
      num_kv_heads: the number of key and value heads.
      head_dim: the channels of a head.
      attention_bias: whether the linears of the attention have biases.
      rope: the rotary embedding.
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
    num_heads: int
    num_kv_heads: int
    head_dim: int
    attention_bias: bool
    rope: Rope
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
) -> Qwen3NextConfig:
    """Read the sizes that Qwen3-Next and Qwen3.5-MoE have in common.

    Missing values take the defaults of transformers.

    Args:
      fields: the fields of `config`.
      config: a parsed ``config.json``.
      dense_layers: the indices of layers without experts.
      renormalize: whether the weights of the chosen experts are divided by their sum.

    Raises:
      CheckpointError: as for `read_config`.
    """
    hidden, layers = fields.size("hidden_size"), fields.size("num_hidden_layers")
    heads = fields.size("num_attention_heads")
    kv_heads = fields.size("num_key_value_heads", default=2)
    head_dim = fields.size("head_dim", default=256)
    positions = fields.size("max_position_embeddings", default=32768)
    eps = fields.number("rms_norm_eps", 1e-6)
    experts, top_k = fields.size("num_experts"), fields.size("num_experts_per_tok")
    fields.only("hidden_act", ("silu", "swish"), "silu")
    fields.only("attn_output_gate", (True,), True)
    fields.only("layer_scale", (False,), False)
    fields.relate(
        heads % kv_heads == 0,
        f"num_attention_heads: expected a multiple of {kv_heads} key heads, got {heads}",
    )
    fields.relate(
        top_k <= experts, f"num_experts_per_tok: expected at most {experts} experts, got {top_k}"
    )
    read = Qwen3NextConfig(
        vocab_size=fields.size("vocab_size"),
        hidden=hidden,
        num_layers=layers,
        max_positions=positions,
        eps=eps,
        attention_layers=_read_attention_layers(fields, config, layers),
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        attention_bias=fields.flag("attention_bias", False),
        rope=read_rope(fields, {"partial_rotary_factor": 0.25, **config}, head_dim, positions),
        delta=_read_delta(fields, hidden, eps),
        dense_intermediate=fields.size("intermediate_size", default=1) if dense_layers else 1,
        dense_layers=dense_layers,
        num_experts=experts,
        intermediate=fields.size("moe_intermediate_size", default=512),
        shared_intermediate=fields.size("shared_expert_intermediate_size", default=512),
        router=Router(top_k, renormalize=renormalize),
        tied=fields.flag("tie_word_embeddings", False),
    )
    fields.finish()
    return read


def _read_attention_layers(fields, config, layers):
    """Return the layers with an attention, from ``layer_types`` or ``full_attention_interval``."""
    types = config.get("layer_types")
    if types is None:
        interval = fields.size("full_attention_interval", default=4)
        return frozenset(range(interval - 1, layers, interval))
    known = isinstance(types, list) and all(
        isinstance(kind, str) and kind in _ATTENDS for kind in types
    )
    if known and len(types) == layers:
        return frozenset(layer for layer, kind in enumerate(types) if _ATTENDS[kind])
    found = f"a list of {len(types)}" if known else quoted(types)
    fields.require(
        False,
        f"layer_types: expected a list of {layers} values from {', '.join(_ATTENDS)}; got {found}",
    )
    return frozenset()


def _read_delta(fields, hidden, eps):
    """Return the sizes of the gated delta net."""
    key_heads = fields.size("linear_num_key_heads", default=16)
    value_heads = fields.size("linear_num_value_heads", default=32)
    fields.relate(
        value_heads % key_heads == 0,
        f"linear_num_value_heads: expected a multiple of {key_heads} key heads, got {value_heads}",
    )
    return DeltaSizes(
        hidden=hidden,
        key_heads=key_heads,
        value_heads=value_heads,
        key_head_dim=fields.size("linear_key_head_dim", default=128),
        value_head_dim=fields.size("linear_value_head_dim", default=128),
        conv_size=fields.size("linear_conv_kernel_dim", default=4),
        eps=eps,
    )


class GatedAttention(HeadParallel):
    """Grouped-query attention with normalized queries and keys, and a gate on its output.

    ``y = out(attention * sigmoid(gate))``. One linear makes queries and gates: the channels of each
    head's gate follow those of its query.
    """

    cache_axes = KEY_AXES

    def __init__(self, config: Qwen3NextConfig, make: Builder, path: str):
        """Make an attention with the heads of one shard."""
        heads, kv_heads, d = config.num_heads, config.num_kv_heads, config.head_dim
        h, bias = config.hidden, config.attention_bias
        self.config, self.dtype = config, make.settings.dtype
        self.target = make.settings.target
        shape = (config.num_kv_heads, config.head_dim)
        self.kv = build_keys_and_values(make, f"{path}.kv", k=shape, v=shape)
        rows = {"q": 2 * heads * d, "k": kv_heads * d, "v": kv_heads * d}
        self.qkv = make.merged_linear(f"{path}.qkv", h, rows, bias)
        self.out = make.linear(f"{path}.out", h, heads * d, bias)
        self.q_norm, self.k_norm = (
            make.norm(f"{path}.{name}", d, config.eps, centered=True)
            for name in ("q_norm", "k_norm")
        )

    def empty_cache(self, batch: int, max_length: int):
        """Return the empty cache entries: keys and values."""
        return self.kv.init_cache(batch, max_length)

    def mix(self, x, positions, entries):
        """Attend from tokens `x`; return the shape of `x` and the updated cache entries."""
        config, (b, t) = self.config, positions.shape
        d, ends = config.head_dim, [2 * config.num_heads * config.head_dim]
        queries, kv = jnp.split(spread(self.qkv(x), positions), ends, axis=-1)
        q, gate = jnp.split(queries.reshape(b, t, config.num_heads, 2 * d), 2, axis=-1)
        k, v = jnp.split(kv.reshape(b, t, 2 * config.num_kv_heads, d), 2, axis=2)
        q = rotate(self.q_norm(q), positions, config.rope)
        k = rotate(self.k_norm(k), positions, config.rope)
        seen, entries = self.kv.append(entries, positions, k=k, v=v)
        y = attention(q, seen["k"], seen["v"], positions, target=self.target)
        y = (y.astype(jnp.float32) * jax.nn.sigmoid(gate.astype(jnp.float32))).astype(x.dtype)
        return self.out(pack_like(y.reshape(b, t, -1), positions, x)), entries


def build_mixer(config: Qwen3NextConfig, layer: int, make: Builder):
    """Make the attention or the gated delta net of `layer`.

    Its heads are divided along the mesh axis `tensor`.
    """
    path = f"layers.{layer}.attention"
    if layer in config.attention_layers:
        return build_heads(config, path, make, GatedAttention)
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
        router=config.router,
        params=params,
        router_weight=make.array(f"{path}.router_weight", (e, h), dtype=jnp.float32),
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
ARCHITECTURE = Architecture(read_config, build_model, build_moe, KEYS)
