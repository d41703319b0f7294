"""Latent attention in which each query sees the windows of tokens that an indexer chooses.

The text is divided into windows of r tokens. The indexer has one key for each full window, and
scores them as the indexer of DeepSeek-V3.2 scores keys. A query attends to all tokens of the
windows with the largest scores, and to the tokens of its own window if that is not full yet::

  key[w] = sum over s of softmax(gate[s] + bias[s]) * norm(keys @ x[s])

If a sequence, or the cache, has room for no more windows than a query chooses, a query sees all
tokens before it.

Source: `modeling_glm5_next` of transformers.
"""

from collections.abc import Mapping
from typing import Any, ClassVar

import jax.numpy as jnp
from jaxtyping import Array, Float, Int32

from jax_nvfp4_moe.nn.attention.indexer import Indexer, layer_norm_keys
from jax_nvfp4_moe.nn.attention.key_pool import KeyPool
from jax_nvfp4_moe.nn.attention.kv_cache import group_channels
from jax_nvfp4_moe.nn.attention.latent_attention import LatentAttention, MLAConfig
from jax_nvfp4_moe.nn.building.builder import Builder
from jax_nvfp4_moe.nn.packing import unpack
from jax_nvfp4_moe.numerics.casts import cast
from jax_nvfp4_moe.ops.cache import append
from jax_nvfp4_moe.ops.dense import dense
from jax_nvfp4_moe.ops.state_window import StateWindow, run_tokens

# Stands in for the tokens of windows that a query must not see. No query is at or after it.
_NOWHERE = 2**31 - 1


class NormalizedKeyPool(KeyPool):
    """Makes keys of windows from keys of tokens, which are normalized before they are mixed.

    Attributes:
      keys: linear from tokens to keys.
      gates: `nnx.Param` ``[d, h]``.
      norm_weight: `nnx.Param` ``[d]``.
      norm_bias: `nnx.Param` ``[d]``.
    """

    def build(self, hidden: int, make: Builder, path: str) -> None:
        """Make the parts; the arguments are those of `KeyPool`."""
        d, self.target = self.sizes.head_dim, make.settings.target
        self.keys = make.linear(f"{path}.keys", d, hidden)
        self.gates = make.variable(f"{path}.gates", (d, hidden))
        self.norm_weight = make.variable(f"{path}.norm_weight", (d,))
        self.norm_bias = make.variable(f"{path}.norm_bias", (d,))
        self.build_bias(make, path)

    def read(self, x: Float[Array, "... h"]) -> Float[Array, "... w"]:
        """Return the keys of tokens, and behind them their gates."""
        keys = layer_norm_keys(self.keys(x), self.norm_weight, self.norm_bias)
        gates = cast(dense(x, self.gates.get_value(), target=self.target), keys.dtype)
        return jnp.concatenate([keys, gates], axis=-1)

    def finish(self, keys: Float[Array, "b c d"], index: Int32[Array, "b c"]):
        """Return the keys as they are, ``[b, c, 1, d]``."""
        del index
        return keys[:, :, None, :]


class WindowIndexer(Indexer):
    """An indexer that chooses windows, without rotation.

    Attributes:
      pool: makes the keys of windows.
    """

    def __init__(self, config: MLAConfig, make: Builder, path: str):
        """Build the indexer of a layer at `path`."""
        sizes, pool, rank = config.indexer, config.pool, config.q_lora_rank
        assert sizes is not None
        assert pool is not None
        assert rank is not None
        self.sizes = sizes
        self.queries = make.linear(f"{path}.queries", sizes.heads * sizes.head_dim, rank)
        self.head_weights = make.linear(f"{path}.head_weights", sizes.heads, config.hidden)
        self.pool = NormalizedKeyPool(pool, config.hidden, "index", make, f"{path}.pool")

    def __call__(self, x: Float[Array, "... h"], latent: Float[Array, "... r"], positions) -> Any:
        """Return queries ``[b, t, heads, head_dim]`` and the float32 weights of the heads."""
        q = group_channels(unpack(self.queries(latent), positions), self.sizes.head_dim)
        return q, unpack(self._weigh(x), positions)


class PooledLatentAttention(LatentAttention):
    """Latent attention with a `WindowIndexer`, whose keys the cache holds too."""

    cache_axes: ClassVar[Mapping[str, int | None]] = {
        "latent": None,
        "index": None,
        "index_tokens": None,
    }

    def __init__(self, config: MLAConfig, make: Builder, path: str):
        """Build the layer at `path`; the number of heads in `config` is that of one shard."""
        super().__init__(config, make, path)
        self.indexer = WindowIndexer(config, make, f"{path}.indexer")

    def empty_cache(self, batch: int, max_length: int):
        """Return empty cache entries: those of `LatentAttention`, and those of the indexer."""
        own = self.indexer.pool.empty_cache(batch, max_length)
        return {**super().empty_cache(batch, max_length), **own}

    @property
    def states(self) -> frozenset[str]:
        """The names of cache entries that hold the last tokens, and not all by position."""
        return frozenset(self.indexer.pool.entries[1:])

    def mix(self, x, positions, entries) -> Any:
        """Return the attention of tokens `x`, in the shape of `x`, and the cache entries.

        Tokens whose states are kept are read one by one.
        """
        if isinstance(entries, StateWindow):
            return run_tokens(self._mix, entries, dict, x, positions)
        return self._mix(x, positions, entries)

    def _mix(self, x, positions, entries):
        """Compute `mix` with plain entries, or without."""
        q, latent, residual = self._project(x, positions)
        index_q, weights = self.indexer(x, residual, positions)
        keys, own = self.indexer.pool(x, positions, entries)
        kept = None if entries is None else {"latent": entries["latent"]}
        seen, kept = append(kept, positions, latent=latent)
        rate = self.indexer.pool.sizes.rate
        full = (positions + 1) // rate  # so many windows each query may choose from
        windows = self.indexer.choose(index_q, weights, keys[:, None], full - 1)
        chosen = None if windows is None else expand_windows(windows, full, rate)
        y = self._attend(q, seen["latent"], positions, chosen)
        return self._finish(y, positions, x), None if kept is None else {**kept, **(own or {})}


def expand_windows(
    windows: Int32[Array, "b t c"], full: Int32[Array, "b t"], rate: int
) -> Int32[Array, "b t s"]:
    """Return the positions of the tokens that each query attends to.

    They are the tokens of its windows, and of the window behind the full ones. Of the latter, those
    after the query are among them.

    Args:
      windows: the windows of each query, all different. Those that are not full for the query are
        left out.
      full: the number of windows that are full for each query.
      rate: the number of tokens of a window.
    """
    offsets = jnp.arange(rate, dtype=jnp.int32)[None, None]
    tokens = windows[..., None] * rate + offsets[:, :, None]
    tokens = jnp.where((windows < full[..., None])[..., None], tokens, _NOWHERE)
    rest = full[..., None] * rate + offsets[..., : rate - 1]
    *queries, count = windows.shape
    return jnp.concatenate([tokens.reshape(*queries, count * rate), rest], axis=-1)
