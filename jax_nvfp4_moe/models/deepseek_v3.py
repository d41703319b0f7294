"""DeepSeek-V3, R1 and Kimi-K2: latent attention, sigmoid-routed experts in groups, shared experts.

Source: `modeling_deepseek_v3` of transformers; arXiv:2412.19437.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
from flax import nnx

from jax_nvfp4_moe.models.attention import KeysAndValues, append, attend, empty_entries, rotate
from jax_nvfp4_moe.models.config import Fields, Rope, read_rope
from jax_nvfp4_moe.models.decoder import (
    Architecture,
    Decoder,
    GatedMLP,
    Settings,
    SideBySide,
    build_decoder,
    linear,
    norm,
)
from jax_nvfp4_moe.nn import NVFP4MoE
from jax_nvfp4_moe.routing import Router


@dataclasses.dataclass(frozen=True)
class DeepseekV3Config:
    """Sizes of a DeepSeek-V3 model.

    Attributes:
      q_rank: width of the query's latent, None where queries are projected at once.
      kv_rank: width of the latent of keys and values.
      nope, rope_width: channels of a query head without and with rotation.
      value_width: channels of a value head.
      interleaved: whether rotated pairs stand side by side in the file.
      first_dense: number of leading layers whose feed-forward is one dense MLP.
      shared_intermediate: width of the shared experts together, 0 for none.
    """

    vocab_size: int
    hidden: int
    num_layers: int
    max_positions: int
    eps: float
    num_heads: int
    q_rank: int | None
    kv_rank: int
    nope: int
    rope_width: int
    value_width: int
    interleaved: bool
    attention_bias: bool
    rope: Rope
    first_dense: int
    dense_intermediate: int
    num_experts: int
    intermediate: int
    shared_intermediate: int
    router: Router
    tied: bool

    @property
    def dense_layers(self) -> range:
        """Indices of layers whose feed-forward is one dense MLP."""
        return range(self.first_dense)


def read_config(config: Mapping[str, Any]) -> DeepseekV3Config:
    """Read a parsed ``config.json``.

    Raises:
      CheckpointError: lists all values that are missing, wrong or not supported.
    """
    fields = Fields(config)
    positions, rope_width = fields.size("max_position_embeddings"), fields.size("qk_rope_head_dim")
    experts = fields.size("n_routed_experts", "num_local_experts")
    intermediate = fields.size("moe_intermediate_size")
    fields.only("hidden_act", ("silu",), "silu")
    fields.only("moe_layer_freq", (1,), 1)
    fields.relate(rope_width % 2 == 0, f"qk_rope_head_dim: expected even, got {rope_width}")
    q_rank = fields.size("q_lora_rank") if fields.present("q_lora_rank") else None
    read = DeepseekV3Config(
        vocab_size=fields.size("vocab_size"),
        hidden=fields.size("hidden_size"),
        num_layers=fields.size("num_hidden_layers"),
        max_positions=positions,
        eps=fields.number("rms_norm_eps", 1e-6),
        num_heads=fields.size("num_attention_heads"),
        q_rank=q_rank,
        kv_rank=fields.size("kv_lora_rank"),
        nope=fields.size("qk_nope_head_dim"),
        rope_width=rope_width,
        value_width=fields.size("v_head_dim"),
        interleaved=fields.flag("rope_interleave", True),
        attention_bias=fields.flag("attention_bias", False),
        rope=read_rope(fields, config, rope_width, positions),
        first_dense=fields.count("first_k_dense_replace"),
        dense_intermediate=fields.size("intermediate_size"),
        num_experts=experts,
        intermediate=intermediate,
        shared_intermediate=fields.count("n_shared_experts") * intermediate,
        router=_read_router(fields, experts),
        tied=fields.flag("tie_word_embeddings", False),
    )
    fields.finish()
    return read


def _read_router(fields, experts):
    """Read the router: sigmoid scores, a correction bias, and groups of which the best are kept."""
    fields.only("scoring_func", ("sigmoid",), "sigmoid")
    fields.only("topk_method", ("noaux_tc",), "noaux_tc")
    top_k = fields.size("num_experts_per_tok")
    groups = fields.size("n_group", default=1)
    kept = fields.size("topk_group", default=groups)
    fits = experts % groups == 0 and kept <= groups and top_k <= experts // groups * kept
    fields.relate(
        fits,
        f"num_experts_per_tok: {top_k} experts do not fit {kept} of {groups} groups of {experts}",
    )
    return Router(
        top_k,
        score="sigmoid",
        renormalize=fields.flag("norm_topk_prob", True),
        num_groups=groups if fits else 1,
        groups_kept=kept if fits else 1,
        scaling=fields.number("routed_scaling_factor", 1.0),
    )


class LatentAttention(nnx.Module):
    """Multi-head latent attention: the cache keeps one latent and one rotated key a token."""

    def __init__(self, config: DeepseekV3Config, weights, prefix: str, settings: Settings):
        """Ask `weights` for the tensors below `prefix`."""
        heads, h, bias = config.num_heads, config.hidden, config.attention_bias
        width = heads * (config.nope + config.rope_width)
        self.config, self.dtype = config, settings.dtype
        if config.q_rank is None:
            first = linear(weights, f"{prefix}.q_proj", width, h, settings)
        else:
            first = linear(weights, f"{prefix}.q_a_proj", config.q_rank, h, settings, bias)
            self.q_norm = norm(weights, f"{prefix}.q_a_layernorm", config.q_rank, config.eps)
            self.q = linear(weights, f"{prefix}.q_b_proj", width, config.q_rank, settings)
        rank = config.kv_rank
        down = f"{prefix}.kv_a_proj_with_mqa"
        kv = linear(weights, down, rank + config.rope_width, h, settings, bias)
        self.down = SideBySide(q=first, kv=kv)
        self.kv_norm = norm(weights, f"{prefix}.kv_a_layernorm", rank, config.eps)
        width = heads * (config.nope + config.value_width)
        self.kv_up = linear(weights, f"{prefix}.kv_b_proj", width, rank, settings)
        self.kv = KeysAndValues(
            weights, prefix, settings, kept_rounded=False, k=(heads, 1), v=(heads, 1)
        )
        width = heads * config.value_width
        self.out = linear(weights, f"{prefix}.o_proj", h, width, settings, bias)

    def init_cache(self, batch: int, max_length: int):
        """Return empty cache entries: latents and rotated keys, one head of each."""
        latent, rotated = (1, self.config.kv_rank), (1, self.config.rope_width)
        return empty_entries(batch, max_length, self.dtype, latent=latent, rotated=rotated)

    def __call__(self, x, positions, entries):
        """Attend from ``x [b, t, h]``; returns ``[b, t, h]`` and the cache entries."""
        config, (b, t, _) = self.config, x.shape
        down = self.down(x)
        rope = down.shape[-1] - config.rope_width
        q, latent, key = jnp.split(down, [rope - config.kv_rank, rope], axis=-1)
        if config.q_rank is not None:
            q = self.q(self.q_norm(q))
        q = q.reshape(b, t, config.num_heads, config.nope + config.rope_width)
        plain, turning = q[..., : config.nope], q[..., config.nope :]
        q = jnp.concatenate([plain, self._rotate(turning, positions)], axis=-1)
        latent = self.kv_norm(latent)[:, :, None, :]
        key = self._rotate(key[:, :, None, :], positions)
        seen, entries = append(entries, positions, latent=latent, rotated=key)
        k, v = self._expand(seen["latent"], seen["rotated"])
        k, v = self.kv.rounded(k=k, v=v).values()
        scale = (config.nope + config.rope_width) ** -0.5 * config.rope.attention_scale
        return self.out(attend(q, k, v, positions, scale).reshape(b, t, -1)), entries

    def _rotate(self, x, positions):
        """Rotate; pairs that stand side by side are first put half a width apart."""
        if self.config.interleaved:
            x = jnp.concatenate([x[..., 0::2], x[..., 1::2]], axis=-1)
        return rotate(x, positions, self.config.rope)

    def _expand(self, latent, rotated):
        """Return keys and values of all heads ``[b, n, s, d]`` from what the cache keeps."""
        config, (b, _, s, _) = self.config, latent.shape
        both = jnp.moveaxis(self.kv_up(latent).reshape(b, s, config.num_heads, -1), 2, 1)
        plain, v = both[..., : config.nope], both[..., config.nope :]
        shared = jnp.broadcast_to(rotated, (*plain.shape[:-1], config.rope_width))
        return jnp.concatenate([plain, shared], axis=-1), v


def build_attention(
    config: DeepseekV3Config, layer: int, weights, settings: Settings
) -> LatentAttention:
    """Make the attention of `layer`."""
    return LatentAttention(config, weights, f"model.layers.{layer}.self_attn", settings)


def moe_prefix(layer: int) -> str:
    """Return the module of the expert block of `layer`."""
    return f"model.layers.{layer}.mlp"


def build_moe(config: DeepseekV3Config, layer: int, weights, settings: Settings) -> NVFP4MoE:
    """Make the expert block of `layer`, shared experts included.

    Raises:
      ValueError: that layer has none.
    """
    if not config.first_dense <= layer < config.num_layers:
        raise ValueError(
            f"layer: expected one with experts, {config.first_dense} to {config.num_layers - 1}; "
            f"got {layer}"
        )
    prefix, e, h = moe_prefix(layer), config.num_experts, config.hidden
    params, declared = weights.experts(f"{prefix}.experts", e, h, config.intermediate)
    shared = None
    if config.shared_intermediate:
        name = f"{prefix}.shared_experts"
        shared = GatedMLP(weights, name, h, config.shared_intermediate, settings)
    correction = f"{prefix}.gate.e_score_correction_bias"
    return NVFP4MoE(
        e,
        h,
        config.intermediate,
        router=config.router,
        params=params,
        router_weight=weights.array(f"{prefix}.gate.weight", (e, h), dtype=jnp.float32),
        router_bias=weights.array(correction, (e,), dtype=jnp.float32),
        shared_experts=shared,
        declared=declared,
        **settings.module_arguments(),
    )


def build_model(config: DeepseekV3Config, weights, settings: Settings) -> Decoder:
    """Make the whole model, layer by layer."""
    return build_decoder(config, weights, settings, build_attention, build_moe)


ARCHITECTURE = Architecture(read_config, build_model, build_moe, moe_prefix)
