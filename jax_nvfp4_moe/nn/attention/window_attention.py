"""Grouped-query attention in which each query sees the windows of tokens that an indexer chooses.

The text is divided into windows of r tokens. The key of a window is the mean of r keys, which is
then normalized and rotated to the position of its first token. A query attends to all tokens of the
windows with the largest scores, and to the tokens of its own window if that is not full yet::

  score[t, w] = sum over heads h of relu(q[t, h] @ key[w])

If a sequence, or the cache, has room for no more windows than a query chooses, a query sees all
tokens before it.

Source: `modeling_qwen4_exp` of transformers.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int32

from jax_nvfp4_moe.nn.attention.grouped_query import Attention, GQAConfig
from jax_nvfp4_moe.nn.attention.indexer import Indexer, IndexerSizes
from jax_nvfp4_moe.nn.attention.key_pool import KeyPool, PoolSizes
from jax_nvfp4_moe.nn.attention.kv_cache import KEY_AXES, group_channels
from jax_nvfp4_moe.nn.attention.pooled_latent_attention import expand_windows
from jax_nvfp4_moe.nn.building.builder import Builder
from jax_nvfp4_moe.nn.packing import pack_like, unpack
from jax_nvfp4_moe.numerics.rope import rotate
from jax_nvfp4_moe.ops.causal_attention.op import attention
from jax_nvfp4_moe.ops.chosen_keys import attend_to_chosen
from jax_nvfp4_moe.ops.gating import gate_heads
from jax_nvfp4_moe.ops.state_window import StateWindow, run_tokens


@dataclasses.dataclass(frozen=True)
class WindowConfig(GQAConfig):
    """Sizes and options of an attention with an indexer. All fields are static.

    Attributes:
      indexer: sizes of the indexer.
      rate: number of tokens of a window.
    """

    indexer: IndexerSizes | None = None
    rate: int = 1


class MeanKeyPool(KeyPool):
    """Makes keys of windows from projected tokens: their mean, normalized and rotated."""

    @property
    def channels(self) -> int:
        """The number of channels of a token in the cache."""
        return self.sizes.head_dim

    def build(self, hidden: int, make: Builder, path: str) -> None:
        """Make the norm; the arguments are those of `KeyPool`."""
        del hidden
        self.norm = make.norm(f"{path}.norm", self.sizes.head_dim, self.sizes.eps, centered=True)

    def read(self, x: Float[Array, "... d"]) -> Float[Array, "... d"]:
        """Return projected tokens as they are."""
        return x

    def mix_windows(self, windows: Float[Array, "b c r d"], index: Int32[Array, "b c"]):
        """Return the mean over the tokens of each window."""
        del index
        return jnp.mean(windows.astype(jnp.float32), axis=2)

    def finish(self, keys: Float[Array, "b c d"], index: Int32[Array, "b c"]):
        """Return the keys ``[b, c, 1, d]`` of windows; `index` is that of each window."""
        assert self.sizes.rope is not None
        keys = self.norm(keys)[:, :, None, :]
        return rotate(keys, index * self.sizes.rate, self.sizes.rope)


class MeanIndexer(Indexer):
    """An indexer of windows, whose heads all have the weight 1.

    Attributes:
      pool: makes the keys of windows.
    """

    def __init__(self, sizes: IndexerSizes, config: WindowConfig, make: Builder, path: str):
        """Build the indexer of a layer at `path`."""
        assert config.rope is not None
        self.sizes, self.rope, d = sizes, config.rope, sizes.head_dim
        self.queries_and_key = make.linear(
            f"{path}.queries_and_key", (sizes.heads + 1) * d, config.hidden
        )
        self.query_norm = make.norm(f"{path}.query_norm", d, config.eps, centered=True)
        how = {"overlaps": False, "head_dim": d, "rope": config.rope, "eps": config.eps}
        pool = PoolSizes(config.rate, **how)
        self.pool = MeanKeyPool(pool, config.hidden, "index", make, f"{path}.pool")

    def project(self, x: Float[Array, "... h"], positions) -> Any:
        """Return queries ``[b, t, heads, head_dim]`` and projected keys ``[b, t, head_dim]``."""
        heads = group_channels(unpack(self.queries_and_key(x), positions), self.sizes.head_dim)
        q, k = jnp.split(heads, [self.sizes.heads], axis=2)
        return rotate(self.query_norm(q), positions, self.rope), k[:, :, 0]


class WindowAttention(Attention):
    """Grouped-query attention with a `MeanIndexer`, whose keys the cache holds too."""

    cache_axes: ClassVar[Mapping[str, int | None]] = {
        **KEY_AXES,
        "index": None,
        "index_tokens": None,
    }

    def __init__(self, config: WindowConfig, make: Builder, path: str):
        """Build the layer at `path`; the sizes in `config` are those of one shard."""
        super().__init__(config, make, path)
        assert config.indexer is not None
        self.indexer = MeanIndexer(config.indexer, config, make, f"{path}.indexer")

    def empty_cache(self, batch: int, max_length: int):
        """Return empty cache entries: keys and values, and those of the indexer."""
        own = self.indexer.pool.empty_cache(batch, max_length)
        return {**super().empty_cache(batch, max_length), **own}

    @property
    def states(self) -> frozenset[str]:
        """The names of cache entries that hold the last tokens, and not all by position."""
        return frozenset(self.indexer.pool.entries[1:])

    def mix(self, x, positions, entries):
        """Return the attention of tokens `x`, in the shape of `x`, and the cache entries.

        Tokens whose states are kept are read one by one.
        """
        if isinstance(entries, StateWindow):
            return run_tokens(self._mix, entries, dict, x, positions)
        return self._mix(x, positions, entries)

    def _mix(self, x, positions, entries):
        """Compute `mix` with plain entries, or without."""
        index_q, index_k = self.indexer.project(x, positions)
        keys, own = self.indexer.pool(index_k, positions, entries)
        rate, scale = self.indexer.pool.sizes.rate, self.config.scale
        full = (positions + 1) // rate  # so many windows each query may choose from
        weights = jnp.ones(index_q.shape[:3], jnp.float32)
        windows = self.indexer.choose(index_q, weights, keys[:, None], full - 1)
        qkv = self._projected(x, positions)
        kept = None if entries is None else {name: entries[name] for name in KEY_AXES}
        q, seen, kept = self._prepare(qkv, positions, kept)
        if windows is None:
            how = {"scale": scale, "target": self.target, **self.kv.scale_options}
            y = attention(q, seen["k"], seen["v"], positions, **how)
        else:
            seen = self.kv.widen(seen)
            chosen = expand_windows(windows, full, rate)
            scale = q.shape[-1] ** -0.5 if scale is None else scale
            y = attend_to_chosen(q, seen["k"], seen["v"], positions, chosen, scale=scale)
        y = gate_heads(y, qkv, target=self.target)
        kept = None if kept is None else {**kept, **(own or {})}
        return self.out(lax.collapse(pack_like(y, positions, x), 2)), kept
