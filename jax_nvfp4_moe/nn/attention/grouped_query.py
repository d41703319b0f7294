"""Grouped-query attention with optional biases, norms, rotation, clipping and a window."""

import dataclasses
from typing import Any, Literal

import jax.numpy as jnp
from jax import lax

from jax_nvfp4_moe.nn.attention.kv_cache import KEY_AXES, build_keys_and_values, group_channels
from jax_nvfp4_moe.nn.building.builder import Builder, as_stored
from jax_nvfp4_moe.nn.building.sharding import build_sharded
from jax_nvfp4_moe.nn.packing import pack_like, unpack
from jax_nvfp4_moe.numerics.norms import mean_square, normalize
from jax_nvfp4_moe.numerics.query_growth import grow
from jax_nvfp4_moe.numerics.rope import Rope, rotate
from jax_nvfp4_moe.ops.causal_attention.op import attention
from jax_nvfp4_moe.ops.gating import gate_heads
from jax_nvfp4_moe.ops.heads import HeadOptions, normalize_heads, prepare_heads, split_heads
from jax_nvfp4_moe.parallel.expert_mesh import TENSOR
from jax_nvfp4_moe.parallel.shard_spec import ShardSpec
from jax_nvfp4_moe.parallel.tensor_parallel import HeadParallel


@dataclasses.dataclass(frozen=True)
class GQAConfig:
    """Sizes and options of an attention layer. All fields are static.

    Attributes:
      hidden: width of the tokens.
      num_heads: number of query heads.
      num_kv_heads: number of key heads and of value heads.
      head_dim: width of a head.
      eps: epsilon of the norms of queries and keys.
      rope: rotation of queries and keys; None if the layer has no position embedding.
      bias: whether the projections of queries, keys and values have a bias. None means that they
        have one if the checkpoint contains it. So does False, the default, with a warning.
      out_bias: as `bias`, for the output projection.
      normalize: "heads" normalizes each query head and each key head by itself. "whole" normalizes
        all query heads as one vector and all key heads as another. "rotated" normalizes each head
        like "heads", but after the rotation. None (default) normalizes nothing.
      centered: whether the norms of queries and keys in the file store ``weight - 1``. False by
        default.
      clip: queries, keys and values are clipped to ``[-clip, clip]``; None (default) for no limit.
      window: number of keys that a query sees, the last at its own position; None (default) for all
        keys.
      interleaved: whether the two channels of a rotated pair are adjacent in the checkpoint. If
        not (default), they are half a head apart.
      scale: factor of the scores; None (default) for ``head_dim ** -0.5``.
      values_from_keys: whether the values are the projected keys, before their norm and rotation.
        The layer then has no projection of values. False by default.
      normalize_values: whether each value head is normalized, without a weight. False by default.
      gated: whether the sigmoid of a gate multiplies each channel of the result. The projection of
        queries then has the channels of each query head, followed by those of its gate. False by
        default.
      value_dim: width of a value head; None (default) for `head_dim`.
      value_scale: factor of the values; 1 by default.
      sinks: whether each query head has a sink: a learned score that takes part in the softmax, and
        whose value is zero. False by default.
      temperature: scale s and length f. The query at position p is multiplied by
        ``1 + s log(1 + floor(p / f))``. None (default) for no factor.
      long_rope: number of positions, and the rotation in place of `rope` for more positions. A call
        takes it if the cache has room for more positions, or if a call without a cache reads more.
        None (default) always takes `rope`.
      joined: whether one linear in the file computes queries, keys and values. False by default.
    """

    hidden: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    eps: float
    rope: Rope | None
    bias: bool | None = False
    out_bias: bool | None = False
    normalize: Literal["heads", "whole", "rotated"] | None = None
    centered: bool = False
    clip: float | None = None
    window: int | None = None
    interleaved: bool = False
    scale: float | None = None
    values_from_keys: bool = False
    normalize_values: bool = False
    gated: bool = False
    sinks: bool = False
    temperature: tuple[float, float] | None = None
    long_rope: tuple[int, Rope] | None = None
    joined: bool = False
    value_dim: int | None = None
    value_scale: float = 1.0

    def __post_init__(self):
        """Check that a gated layer has no option that would be ignored.

        Raises:
          ValueError: if it has one.
        """
        if self.gated and (self.values_from_keys or self.joined or not self.plain_heads):
            raise ValueError(
                "gated: expected False, because the layer clips or interleaves heads, normalizes "
                "them as a whole, changes values, or has no projection of queries or values of its "
                "own; got True"
            )

    @property
    def plain_heads(self) -> bool:
        """Whether `ops.prepare_heads` computes the heads of this layer."""
        others = self.clip is not None or self.normalize_values or self.interleaved
        changes_values = self.value_width != self.head_dim or self.value_scale != 1
        return self.normalize != "whole" and not others and not changes_values

    @property
    def value_width(self) -> int:
        """The width of a value head."""
        return self.head_dim if self.value_dim is None else self.value_dim


class Attention(HeadParallel):
    """Grouped-query attention with the sizes and options of a `GQAConfig`."""

    cache_axes = KEY_AXES

    def __init__(self, config: GQAConfig, make: Builder, path: str):
        """Build the layer at `path`; the sizes in `config` are those of one shard."""
        h, d = config.hidden, config.head_dim
        rows, kv_rows = config.num_heads * d, config.num_kv_heads * d
        self.config, self.dtype = config, make.settings.dtype
        self.target = make.settings.target
        k, v = ((config.num_kv_heads, width) for width in (d, config.value_width))
        self.kv = build_keys_and_values(make, f"{path}.kv", k=k, v=v)
        projections = {"q": 2 * rows if config.gated else rows, "k": kv_rows}
        if not config.values_from_keys:
            projections["v"] = config.num_kv_heads * config.value_width
        bias = as_stored(config.bias)
        if config.joined:
            self.qkv = make.linear(f"{path}.qkv", sum(projections.values()), h, bias)
        else:
            self.qkv = make.merged_linear(f"{path}.qkv", h, projections, bias)
        inputs = config.num_heads * config.value_width
        self.out = make.linear(f"{path}.out", h, inputs, as_stored(config.out_bias))
        if config.sinks:
            self.sinks = make.variable(f"{path}.sinks", (config.num_heads,), dtype=jnp.float32)
        if config.normalize is not None:
            widths = (rows, kv_rows) if config.normalize == "whole" else (d, d)
            norms = {"eps": config.eps, "centered": config.centered}
            self.q_norm = make.norm(f"{path}.q_norm", widths[0], **norms)
            self.k_norm = make.norm(f"{path}.k_norm", widths[1], **norms)

    def empty_cache(self, batch: int, max_length: int):
        """Return empty cache entries for the keys and values of one shard."""
        return self.kv.init_cache(batch, max_length)

    def mix(self, x, positions, entries):
        """Return the attention of tokens `x`, in the shape of `x`, and the cache entries."""
        y, entries = self.attend(x, positions, entries)
        return self.out(lax.collapse(y, 2)), entries

    def attend(self, x, positions, entries):
        """Return the results of all heads ``[b, t, n, d]``, packed if `x` is, and the cache."""
        qkv = self._projected(x, positions)
        q, seen, entries = self._prepare(qkv, positions, entries)
        if self.config.temperature is not None:
            q = grow(q, positions, *self.config.temperature)
        y = attention(
            q,
            seen["k"],
            seen["v"],
            positions,
            scale=self.config.scale,
            window=self.config.window,
            sinks=self.sinks.get_value() if self.config.sinks else None,
            target=self.target,
            **self.kv.scale_options,
        )
        if self.config.gated:
            y = gate_heads(y, qkv, target=self.target)
        return pack_like(y, positions, x), entries

    def _prepare(self, qkv, positions, entries):
        """Return the queries, the keys and values that they see, and the cache entries."""
        config = self.config
        room = positions.shape[1] if entries is None else entries["k"].shape[2]
        rope = self._rotation(room)
        if entries is None or not config.plain_heads:
            q, k, v = self._split(qkv, positions, rope)
            seen, entries = self.kv.append(entries, positions, {"k": k, "v": v})
            return q, seen, entries
        q_weight, k_weight = self._head_weights()
        q, k, v = prepare_heads(
            qkv,
            positions,
            entries["k"],
            entries["v"],
            q_weight=q_weight,
            k_weight=k_weight,
            eps=config.eps,
            rope=rope,
            rotates_first=config.normalize == "rotated",
            gated=config.gated,
            target=self.target,
            **self.kv.head_options,
        )
        entries = {"k": k, "v": v}
        return q, entries, entries

    def _head_weights(self):
        """Return the weights of the norms of query heads and of key heads, or None and None."""
        if self.config.normalize is None:
            return None, None
        return self.q_norm.weight.get_value(), self.k_norm.weight.get_value()

    def _rotation(self, room: int) -> Rope | None:
        """Return the rotation of a call whose positions are below `room`."""
        if self.config.long_rope is None:
            return self.config.rope
        length, rope = self.config.long_rope
        return rope if room > length else self.config.rope

    def project(self, x, positions):
        """Return the queries, keys and values ``[b, t, n, d]`` of tokens `x`, as they meet."""
        return self._split(self._projected(x, positions), positions, self.config.rope)

    def _split(self, qkv, positions, rope):
        """Return queries, keys and values ``[b, t, n, d]`` as they meet, from projected tokens."""
        config = self.config
        if config.gated:
            options = HeadOptions(rope, config.eps, config.normalize == "rotated", True)
            weights = None if config.normalize is None else self._head_weights()
            m, d = config.num_kv_heads, config.head_dim
            return split_heads(qkv, positions, weights, m, d, options)
        qkv = self._normalized(qkv)
        if config.clip is not None:
            qkv = jnp.clip(qkv, -config.clip, config.clip)
        rows = (config.num_heads + config.num_kv_heads) * config.head_dim
        qk, v = jnp.split(qkv, [rows], axis=-1)
        qk, v = group_channels(qk, config.head_dim), group_channels(v, config.value_width)
        if config.value_scale != 1:
            v = v * config.value_scale
        if config.normalize_values:
            v = normalize(v, jnp.ones(config.head_dim, v.dtype), config.eps)
        if config.interleaved:
            # Queries and keys change alike, so that scores stay what they are.
            qk = jnp.concatenate([qk[..., 0::2], qk[..., 1::2]], axis=-1)
        if rope is not None:
            qk = rotate(qk, positions, rope)
        if config.normalize == "rotated":
            qk = self._normalized_heads(qk)
        q, k = jnp.split(qk, [config.num_heads], axis=2)
        return q, k, v

    def _projected(self, x, positions):
        """Return the projected queries, keys and values ``[b, t, n d]``, and the gates."""
        qkv = unpack(self.qkv(x), positions)
        if self.config.values_from_keys:
            k = qkv[..., -self.config.num_kv_heads * self.config.head_dim :]
            qkv = jnp.concatenate([qkv, k], axis=-1)
        return qkv

    def _normalized(self, qkv):
        """Return queries, keys and values ``[b, t, n d]``, with the queries and keys normalized."""
        config = self.config
        rows, kv_rows = (n * config.head_dim for n in (config.num_heads, config.num_kv_heads))
        if config.normalize == "whole":
            q, k, v = jnp.split(qkv, [rows, rows + kv_rows], axis=-1)
            q_mean, k_mean = self._means(q, k)
            return jnp.concatenate([self.q_norm(q, q_mean), self.k_norm(k, k_mean), v], axis=-1)
        if config.normalize == "heads":
            qk, v = jnp.split(qkv, [rows + kv_rows], axis=-1)
            normal = self._normalized_heads(group_channels(qk, config.head_dim))
            return jnp.concatenate([normal.reshape(qk.shape), v], axis=-1)
        return qkv

    def _normalized_heads(self, qk):
        """Return query heads and key heads ``[b, t, n, d]``, each normalized by itself."""
        return normalize_heads(qk, self._head_weights(), self.config.num_heads, self.config.eps)

    def _means(self, q, k):
        """Return the mean squares over the query heads and over the key heads of all shards.

        All shards have the same width, and each key head is in the same number of shards.
        Therefore the mean over all heads is the mean of the shards' means. On one device both
        results are None, and the norms compute the means themselves.
        """
        if self.expert_mesh is None:
            return None, None
        means = jnp.concatenate([mean_square(q), mean_square(k)], axis=-1)
        return jnp.split(lax.pmean(means, self.expert_mesh.name(TENSOR)), 2, axis=-1)


def build_attention(config, layer: int, make: Builder):
    """Build the attention of a layer, sharded by heads along the mesh axis `tensor`.

    If there are more shards than key heads, several shards hold the same key head.

    Args:
      config: configuration of the model; its field `attention` is a `GQAConfig`, or a tuple
        with one for each layer.
      layer: index of the layer.
      make: the `Builder` of the model.
    """
    sizes = config.attention
    sizes = sizes[layer] if isinstance(sizes, tuple) else sizes
    return build_heads(sizes, f"layers.{layer}.attention", make)


def build_heads(config: Any, path: str, make: Builder, attention: Any = Attention):
    """Build an attention layer, sharded by heads along the mesh axis `tensor`.

    Args:
      config: sizes of the whole layer: a `GQAConfig`, or another dataclass with the fields
        `num_heads`, `num_kv_heads` and `head_dim`.
      path: path of the layer.
      make: the `Builder` of the model.
      attention: function ``(config, make, path) -> module``. `Attention` by default.
    """
    shards = make.settings.shards
    heads, kv_heads = config.num_heads, config.num_kv_heads
    kv_parts = min(shards, kv_heads)
    reason = None
    if heads % shards or max(shards, kv_heads) % kv_parts:
        reason = (
            f"{heads} query heads and {kv_heads} key heads cannot be divided into {shards} equal "
            "parts"
        )
    elif getattr(config, "joined", False) and kv_heads % shards:
        reason = f"{kv_heads} key heads in one linear cannot be divided into {shards} equal parts"
    own = dataclasses.replace(
        config, num_heads=max(heads // shards, 1), num_kv_heads=kv_heads // kv_parts
    )
    rows, kv_rows = ShardSpec("rows", shards), ShardSpec("rows", kv_parts)
    norms = {}
    if getattr(config, "normalize", None) == "whole":
        norms = {"q_norm": rows, "k_norm": kv_rows}
    return build_sharded(
        make,
        lambda make, sizes: attention(sizes, make, path),
        config,
        own,
        specs={
            "q": rows,
            "k": kv_rows,
            "v": kv_rows,
            "out": ShardSpec("columns", shards),
            "sinks": rows,
            "gate": rows,  # one gate for each query head
            "qkv": ShardSpec("rows", shards, (heads, kv_heads, kv_heads)),
            # The indexer of `nn.attention.block_sparse` has a query for each key head, and one key.
            "index.q": kv_rows,
            "index.k": None,
            **norms,
        },
        last=f"{path}.out",
        width=heads * getattr(config, "value_width", config.head_dim),
        reason=reason,
    )
