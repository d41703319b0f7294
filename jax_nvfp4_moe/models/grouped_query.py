"""Grouped-query attention with the options of the models that have no more than that."""

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal

import jax.numpy as jnp
from flax import nnx
from jax import lax

from jax_nvfp4_moe.models.attention import KEY_AXES, KeysAndValues, attend, rotate
from jax_nvfp4_moe.models.config import Fields, Rope, read_rope
from jax_nvfp4_moe.models.cutting import build_cut
from jax_nvfp4_moe.models.decoder import (
    MergedLinear,
    RMSNorm,
    Settings,
    linear,
    mean_square,
    norm,
)
from jax_nvfp4_moe.parallel.expert_mesh import TENSOR
from jax_nvfp4_moe.parallel.parts import HeadParts, Split


@dataclasses.dataclass(frozen=True)
class GQAConfig:
    """Sizes and options of an attention; static.

    Attributes:
      rope: None where heads know no positions.
      bias: whether the projections of queries, keys and values add a bias; None: if the file has
        one.
      out_bias: whether that of the output does.
      normalize: "heads" normalizes each query and key head, "whole" all query heads as one vector
        and all key heads as another; None neither.
      clip: queries, keys and values are cut to this magnitude; None for none.
      window: keys that a query sees, its own the last; None for all.
      mean_axis: where heads are normalized as a whole and these are a part of them: the mesh axis
        along which the others are; else None.
    """

    hidden: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    eps: float
    rope: Rope | None
    bias: bool | None = False
    out_bias: bool | None = False
    normalize: Literal["heads", "whole"] | None = None
    clip: float | None = None
    window: int | None = None
    mean_axis: str | None = None


def read_grouped_query(
    fields: Fields,
    config: Mapping[str, Any],
    *,
    eps: float,
    theta: float = 10000.0,
    head_dim: int | None = None,
    share: float | None = None,
    **options: Any,
) -> GQAConfig:
    """Read the sizes of an attention.

    Args:
      fields: of ``config.json``; takes the problems.
      config: the same, parsed.
      eps, theta: of the norms and of the rotation, where the file names none.
      head_dim: where the file has none; None for ``hidden_size / num_attention_heads``.
      share: of a head's channels that are rotated where the file does not say; None for
        models that rotate all of them.
      options: further fields of `GQAConfig`.
    """
    hidden, heads = fields.size("hidden_size"), fields.size("num_attention_heads")
    kv_heads = fields.size("num_key_value_heads", default=heads)
    head_dim = fields.size("head_dim", default=head_dim or max(hidden // heads, 1))
    fields.relate(heads % kv_heads == 0, f"{heads} heads do not divide by {kv_heads} key heads")
    fields.relate(head_dim % 2 == 0, f"head_dim: expected an even number, got {head_dim}")
    positions = fields.size("max_position_embeddings")
    rope = read_rope(fields, config, head_dim, positions, theta=theta, share=share or 1.0)
    fields.relate(
        share is not None or 2 * len(rope.frequencies) == head_dim,
        "partial_rotary_factor: this architecture rotates all channels of a head",
    )
    return GQAConfig(
        hidden,
        heads,
        kv_heads,
        head_dim,
        fields.number("rms_norm_eps", eps),
        rope,
        **options,
    )


def read_window(fields: Fields) -> int | None:
    """Return ``sliding_window``, None where it is missing or null."""
    return fields.size("sliding_window") if fields.present("sliding_window") else None


class Attention(nnx.Module):
    """Attention of the sizes and options of a `GQAConfig`."""

    cache_axes = KEY_AXES

    def __init__(self, config: GQAConfig, weights, prefix: str, settings: Settings):
        """Ask `weights` for the tensors below `prefix`."""
        h, d, bias = config.hidden, config.head_dim, config.bias
        rows, kv_rows = config.num_heads * d, config.num_kv_heads * d
        self.config, self.dtype = config, settings.dtype
        shape = (config.num_kv_heads, config.head_dim)
        self.kv = KeysAndValues(weights, prefix, settings, k=shape, v=shape)
        self.qkv = MergedLinear(
            q=linear(weights, f"{prefix}.q_proj", rows, h, settings, bias),
            k=linear(weights, f"{prefix}.k_proj", kv_rows, h, settings, bias),
            v=linear(weights, f"{prefix}.v_proj", kv_rows, h, settings, bias),
        )
        self.out = linear(weights, f"{prefix}.o_proj", h, rows, settings, config.out_bias)
        if config.normalize == "whole":
            self.q_norm = norm(weights, f"{prefix}.q_norm", rows, config.eps)
            self.k_norm = norm(weights, f"{prefix}.k_norm", kv_rows, config.eps)
        elif config.normalize == "heads":
            norms = ("q_norm", config.num_heads), ("k_norm", config.num_kv_heads)
            each = [
                jnp.broadcast_to(weights.array(f"{prefix}.{name}.weight", (d,)), (count, d))
                for name, count in norms
            ]
            self.qk_norm = RMSNorm(jnp.concatenate(each), config.eps)

    def init_cache(self, batch: int, max_length: int):
        """Return empty cache entries: keys and values."""
        return self.kv.init_cache(batch, max_length)

    def __call__(self, x, positions, entries):
        """Attend from ``x [b, t, h]``; returns ``[b, t, h]`` and the cache entries."""
        config, (b, t, _) = self.config, x.shape
        heads = self._normalized(self.qkv(x)).reshape(b, t, -1, config.head_dim)
        if config.clip is not None:
            heads = jnp.clip(heads, -config.clip, config.clip)
        qk, v = jnp.split(heads, [config.num_heads + config.num_kv_heads], axis=2)
        if config.rope is not None:
            qk = rotate(qk, positions, config.rope)
        q, k = jnp.split(qk, [config.num_heads], axis=2)
        seen, entries = self.kv.append(entries, positions, k=k, v=v)
        scale = config.head_dim**-0.5
        y = attend(q, seen["k"], seen["v"], positions, scale, window=config.window)
        return self.out(y.reshape(b, t, -1)), entries

    def _normalized(self, qkv):
        """Return queries, keys and values ``[b, t, n d]`` with the first two normalized."""
        config = self.config
        rows, kv_rows = (n * config.head_dim for n in (config.num_heads, config.num_kv_heads))
        if config.normalize == "whole":
            q, k, v = jnp.split(qkv, [rows, rows + kv_rows], axis=-1)
            q_mean, k_mean = self._means(q, k)
            return jnp.concatenate([self.q_norm(q, q_mean), self.k_norm(k, k_mean), v], axis=-1)
        if config.normalize == "heads":
            qk, v = jnp.split(qkv, [rows + kv_rows], axis=-1)
            each = qk.reshape(*qk.shape[:-1], -1, config.head_dim)
            return jnp.concatenate([self.qk_norm(each).reshape(qk.shape), v], axis=-1)
        return qkv

    def _means(self, q, k):
        """Return the mean squares of all query and of all key heads, None where `q`, `k` are all.

        Parts are equally wide, and each key head is in equally many: the mean of all is that of
        the parts' means.
        """
        if self.config.mean_axis is None:
            return None, None
        means = jnp.concatenate([mean_square(q), mean_square(k)], axis=-1)
        return jnp.split(lax.pmean(means, self.config.mean_axis), 2, axis=-1)


def build_attention(config, layer: int, weights, settings: Settings):
    """Make the attention of `layer` of a model whose ``config.attention`` is a `GQAConfig`.

    Over a mesh it is cut by heads along `tensor`; where there are more shards than key heads, some
    shards have the same one. Heads that are normalized as a whole share their means.
    """
    return build_heads(config.attention, f"model.layers.{layer}.self_attn", weights, settings)


def build_heads(config: Any, prefix: str, weights, settings: Settings, make: Any = Attention):
    """Make an attention, over a mesh in parts along `tensor`.

    Args:
      config: sizes of the whole, a `GQAConfig` or one with num_heads, num_kv_heads and head_dim.
      prefix: module of the attention.
      weights: the source of `checkpoint.resolve`.
      settings: how modules are made.
      make: ``(config, weights, prefix, settings)`` makes the module.
    """
    shards = settings.shards
    heads, kv_heads = config.num_heads, config.num_kv_heads
    kv_parts = min(shards, kv_heads)
    why = None
    if heads % shards or max(shards, kv_heads) % kv_parts:
        why = f"{heads} query and {kv_heads} key heads do not make {shards} parts"
    own = dataclasses.replace(
        config, num_heads=max(heads // shards, 1), num_kv_heads=kv_heads // kv_parts
    )
    rows, kv_rows = Split("rows", shards), Split("rows", kv_parts)
    norms = {}
    if getattr(config, "normalize", None) == "whole":
        own = dataclasses.replace(own, mean_axis=TENSOR)
        norms = {"q_norm": rows, "k_norm": kv_rows}
    return build_cut(
        lambda weights, sizes: make(sizes, weights, prefix, settings),
        config,
        own,
        weights,
        settings,
        splits={
            "q_proj": rows,
            "k_proj": kv_rows,
            "v_proj": kv_rows,
            "o_proj": Split("columns", shards),
            "sinks": rows,
            **norms,
        },
        last=f"{prefix}.o_proj",
        width=heads * config.head_dim,
        why_whole=why,
        kind=HeadParts,
    )
