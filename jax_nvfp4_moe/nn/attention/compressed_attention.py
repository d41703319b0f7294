"""Attention to a window of tokens, and to compressed keys of the text before: DeepSeek-V4.

Keys serve as the values too, and all heads share them. A key is rotated, so the result is rotated
back at the position of the query. There are three kinds of layers:

* A sliding layer sees the last tokens alone.
* A heavily compressed layer also sees one key for each window of many tokens.
* A compressed sparse layer also sees keys of short windows, of which an indexer chooses a few.

Groups of heads are projected to a latent each, and one matrix projects all latents.

The cache holds the last tokens, the compressed keys, and what the next compressed key needs. It
grows by one key for each window.

Source: `modeling_deepseek_v4` of transformers.
"""

import dataclasses
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float, Int32

from jax_nvfp4_moe.nn.attention.indexer import Indexer, IndexerSizes
from jax_nvfp4_moe.nn.attention.key_pool import KeyPool, PoolSizes, Recent, Span
from jax_nvfp4_moe.nn.attention.kv_cache import group_channels
from jax_nvfp4_moe.nn.building.builder import Builder
from jax_nvfp4_moe.nn.building.sharding import build_sharded
from jax_nvfp4_moe.nn.packing import pack_like, unpack
from jax_nvfp4_moe.numerics.norms import normalize_plainly
from jax_nvfp4_moe.numerics.rope import Rope, rotate_last
from jax_nvfp4_moe.ops.causal_attention.op import attention
from jax_nvfp4_moe.ops.chosen_keys import multiply
from jax_nvfp4_moe.ops.compressed_keys import attend_to_compressed
from jax_nvfp4_moe.ops.state_window import StateWindow, run_tokens
from jax_nvfp4_moe.parallel.shard_spec import ShardSpec
from jax_nvfp4_moe.parallel.tensor_parallel import HeadParallel


@dataclasses.dataclass(frozen=True)
class CompressedConfig:
    """Sizes of the attention of one layer. All fields are static.

    Attributes:
      hidden: width of the tokens.
      num_heads: number of query heads.
      head_dim: width of a head.
      q_lora_rank: width of the latent of the queries.
      groups: number of groups of heads that are projected together.
      group_rank: width of the latent of a group.
      window: number of tokens that a query sees, of which its own is the last.
      rope: rotation of the last channels of a head.
      eps: epsilon of the norms.
      pool: sizes of the compressed keys; None if the layer has none.
      indexer: sizes of the indexer that chooses compressed keys; None if queries see all of them.
    """

    hidden: int
    num_heads: int
    head_dim: int
    q_lora_rank: int
    groups: int
    group_rank: int
    window: int
    rope: Rope
    eps: float
    pool: PoolSizes | None = None
    indexer: IndexerSizes | None = None


class PooledIndexer(Indexer):
    """An indexer whose keys stand for the windows of the compressed keys.

    Attributes:
      pool: `KeyPool` of the indexer's own keys.
    """

    def __init__(self, sizes: IndexerSizes, config: CompressedConfig, make: Builder, path: str):
        """Build the indexer of a layer with compressed keys at `path`."""
        assert config.pool is not None
        self.sizes, self.rope = sizes, config.rope
        width = sizes.heads * sizes.head_dim
        self.queries = make.linear(f"{path}.queries", width, config.q_lora_rank)
        self.head_weights = make.linear(f"{path}.head_weights", sizes.heads, config.hidden)
        pool = dataclasses.replace(config.pool, head_dim=sizes.head_dim)
        self.pool = KeyPool(pool, config.hidden, "index", make, f"{path}.pool")

    def __call__(self, x: Float[Array, "... h"], latent: Float[Array, "... r"], positions) -> Any:
        """Return queries ``[b, t, heads, head_dim]`` and the float32 weights of the heads."""
        q = unpack(self.queries(latent), positions)
        q = group_channels(q, self.sizes.head_dim)
        return rotate_last(q, positions, self.rope), unpack(self._weigh(x), positions)


class CompressedAttention(HeadParallel):
    """Attention of one layer; see the head of the module.

    Attributes:
      config: sizes with the heads and the groups of one shard, static.
      pool: `KeyPool`, or None.
      indexer: `PooledIndexer`, or None.
    """

    def __init__(self, config: CompressedConfig, make: Builder, path: str):
        """Build the layer at `path`; the numbers of heads and groups are those of one shard."""
        h, d, rank = config.hidden, config.head_dim, config.q_lora_rank
        heads, groups = config.num_heads, config.groups
        self.config, self.dtype = config, make.settings.dtype
        self.target = make.settings.target
        self.down = make.merged_linear(f"{path}.down", h, {"q_a": rank, "kv": d})
        self.q_norm = make.norm(f"{path}.q_norm", rank, config.eps)
        self.kv_norm = make.norm(f"{path}.kv_norm", d, config.eps)
        self.q = make.linear(f"{path}.q", heads * d, rank)
        self.sinks = make.variable(f"{path}.sinks", (heads,), dtype=jnp.float32)
        shape = (groups * config.group_rank, heads * d // groups)
        self.out_a = make.variable(f"{path}.out_a", shape)
        self.out_b = make.linear(f"{path}.out_b", h, groups * config.group_rank)
        pool, indexer = config.pool, config.indexer
        self.pool = pool and KeyPool(pool, h, "compressed", make, f"{path}.pool")
        self.indexer = indexer and PooledIndexer(indexer, config, make, f"{path}.indexer")

    def empty_cache(self, batch: int, max_length: int):
        """Return empty cache entries: the last tokens, and those of the compressed keys."""
        shape = (batch, min(self.config.window, max_length), self.config.head_dim)
        entries = {"tokens": jnp.zeros(shape, self.dtype)}
        for pool in self._pools():
            entries |= pool.empty_cache(batch, max_length)
        return entries

    @property
    def states(self) -> frozenset[str]:
        """The names of cache entries that hold the last tokens, and not all by position."""
        return frozenset(("tokens", *(pool.entries[1] for pool in self._pools())))

    def mix(self, x: Float[Array, "... h"], positions: Int32[Array, "b t"], entries):
        """Attend from tokens, ``[b, t, h]`` or packed; return the same and the cache entries.

        Tokens whose states are kept are read one by one.
        """
        if isinstance(entries, StateWindow):
            return run_tokens(self._mix, entries, dict, x, positions)
        return self._mix(x, positions, entries)

    def _mix(self, x, positions, entries):
        """Compute `mix` with plain entries, or without."""
        config = self.config
        latent, key = jnp.split(self.down(x), [config.q_lora_rank], axis=-1)
        latent = self.q_norm(latent)
        q = group_channels(unpack(self.q(latent), positions), config.head_dim)
        q = rotate_last(normalize_plainly(q, config.eps), positions, config.rope)
        key = unpack(self.kv_norm(key), positions)[:, :, None, :]
        key = rotate_last(key, positions, config.rope)[:, :, 0]
        near, places, kept = self._append(entries, key, positions)
        sinks, d = self.sinks.get_value(), config.head_dim
        if self.pool is None:
            how = {"window": config.window, "sinks": sinks, "target": self.target}
            y = attention(q, near[:, None], None, places, value_width=d, **how)
        else:
            far, own = self.pool(x, positions, entries)
            visible = (positions + 1) // self.pool.sizes.rate
            chosen, others = self._choose(x, latent, positions, visible, entries)
            y = attend_to_compressed(
                q, near, places, far, visible, chosen, sinks, window=config.window, scale=d**-0.5
            )
            if kept is not None:
                kept = {**kept, **(own or {}), **(others or {})}
        y = rotate_last(y, positions, config.rope, back=True)
        return self._project(pack_like(y, positions, x)), kept

    def _cache_specs(self, rows):
        """All shards hold all cache entries, because all heads read the same keys."""
        assert self.expert_mesh is not None
        names = [name for pool in self._pools() for name in pool.entries]
        return dict.fromkeys(["tokens", *names], self.expert_mesh.spec(rows))

    def _pools(self):
        """Return the pools whose entries the cache holds."""
        indexed = None if self.indexer is None else self.indexer.pool
        return [pool for pool in (self.pool, indexed) if pool is not None]

    def _append(self, entries, key, positions):
        """Return the last keys with the new ones, the index of each new key, and the entries."""
        if entries is None:
            return key, positions, None
        held, span = entries["tokens"].shape[1], Span.of(positions)
        base = jnp.maximum(span.start - held, 0)
        recent = Recent.extend(entries["tokens"], base, key, positions)
        kept = recent.keep(jnp.maximum(span.end - held, 0), held)
        return recent.tokens, recent.places, {"tokens": kept}

    def _choose(self, x, latent, positions, visible, entries):
        """Return the compressed keys that each query attends to, and the indexer's entries."""
        if self.indexer is None:
            return None, None
        q, weights = self.indexer(x, latent, positions)
        keys, kept = self.indexer.pool(x, positions, entries)
        return self.indexer.choose(q, weights, keys[:, None], visible - 1), kept

    def _project(self, y: Float[Array, "... n d"]):
        """Project each group of heads to its latent, and all latents to ``[..., h]``."""
        config, (b, t, n, d) = self.config, y.shape
        matrices = self.out_a.get_value().reshape(config.groups, config.group_rank, -1)
        rows = jnp.moveaxis(y.reshape(b * t, config.groups, n // config.groups * d), 1, 0)
        latents = jnp.moveaxis(multiply(rows, matrices, contracted=(2, 2)), 0, 1)
        return self.out_b(
            latents.reshape(b, t, config.groups * config.group_rank).astype(self.dtype)
        )


def build_compressed_attention(config: CompressedConfig, path: str, make: Builder):
    """Build the attention of one layer, sharded by groups of heads along the mesh axis `tensor`.

    Keys, compressed keys, indexer and caches are replicated on every device.

    Args:
      config: sizes of the whole layer.
      path: path of the layer.
      make: the `Builder` of the model.
    """
    groups, shards = config.groups, make.settings.shards
    rows = ShardSpec("rows", shards)
    return build_sharded(
        make,
        lambda make, sizes: CompressedAttention(sizes, make, path),
        config,
        dataclasses.replace(
            config, num_heads=config.num_heads // shards, groups=max(groups // shards, 1)
        ),
        specs={
            "attention.q": rows,
            "sinks": rows,
            "out_a": rows,
            "out_b": ShardSpec("columns", shards),
        },
        last=f"{path}.out_b",
        width=groups * config.group_rank,
        reason=(
            f"{groups} groups of heads cannot be divided into {shards} equal parts"
            if groups % shards
            else None
        ),
    )
