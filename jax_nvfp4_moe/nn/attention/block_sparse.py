"""Grouped-query attention to blocks of keys that an indexer chooses, as in MiniMax-M3."""

import dataclasses
from collections.abc import Mapping
from typing import ClassVar

import jax.numpy as jnp
from jax import lax

from jax_nvfp4_moe.nn.attention.grouped_query import Attention, GQAConfig
from jax_nvfp4_moe.nn.attention.kv_cache import KEY_AXES, empty_entries, group_channels
from jax_nvfp4_moe.nn.building.builder import Builder
from jax_nvfp4_moe.nn.packing import pack_like, unpack
from jax_nvfp4_moe.numerics.rope import rotate
from jax_nvfp4_moe.ops.block_attention import BlockChoice, block_attention
from jax_nvfp4_moe.ops.cache import append

_PUBLISHED = BlockChoice(size=128, top=16, local=1)  # of MiniMax-M3


@dataclasses.dataclass(frozen=True)
class BlockSparseConfig(GQAConfig):
    """Sizes and options of an attention with an indexer. All fields are static.

    Attributes:
      index_dim: width of the indexer's queries and keys.
      choice: how many blocks of keys the indexer chooses.
    """

    index_dim: int = 128
    choice: BlockChoice = _PUBLISHED


class BlockSparseAttention(Attention):
    """Grouped-query attention in which each key head chooses the blocks of keys that it shows.

    The indexer projects tokens to one query for each key head, and to one key. Both are normalized
    and rotated. The cache holds the keys of the indexer too, in the dtype of the model.

    Source: `MiniMaxM3VLAttention` of transformers.
    """

    cache_axes: ClassVar[Mapping[str, int | None]] = {**KEY_AXES, "index": None}

    def __init__(self, config: BlockSparseConfig, make: Builder, path: str):
        """Build the layer at `path`; the sizes in `config` are those of one shard."""
        super().__init__(config, make, path)
        self.config, width = config, config.index_dim
        rows = {"q": config.num_kv_heads * width, "k": width}
        self.index = make.merged_linear(f"{path}.index", config.hidden, rows)
        norms = {"eps": config.eps, "centered": config.centered}
        self.index_q_norm = make.norm(f"{path}.index_q_norm", width, **norms)
        self.index_k_norm = make.norm(f"{path}.index_k_norm", width, **norms)

    def empty_cache(self, batch: int, max_length: int):
        """Return empty cache entries for the keys, values and index keys of one shard."""
        index = empty_entries(batch, max_length, self.dtype, index=(1, self.config.index_dim))
        return {**super().empty_cache(batch, max_length), **index}

    def mix(self, x, positions, entries):
        """Return the attention of tokens `x`, in the shape of `x`, and the cache entries."""
        q, k, v = self.project(x, positions)
        index = unpack(self.index(x), positions)
        index = group_channels(index, self.config.index_dim)
        index_q, index_k = jnp.split(index, [self.config.num_kv_heads], axis=2)
        index = [self.index_q_norm(index_q), self.index_k_norm(index_k)]
        if self.config.rope is not None:
            index = [rotate(part, positions, self.config.rope) for part in index]
        seen, kept = self.kv.append(entries, positions, {"k": k, "v": v})
        seen = self.kv.widen(seen)  # `block_attention` reads no FP8
        seen_index, kept_index = append(entries, positions, index=index[1])
        y = block_attention(
            q,
            seen["k"],
            seen["v"],
            index[0],
            seen_index["index"],
            positions,
            choice=self.config.choice,
            scale=self.config.scale,
        )
        both = None if kept is None or kept_index is None else {**kept, **kept_index}
        return self.out(pack_like(lax.collapse(y, 2), positions, x)), both
