"""Multi-head latent attention in which each query sees only the keys that an indexer chooses.

This is the sparse attention of DeepSeek-V3.2 and GLM-5. In later versions of GLM-5, some layers
have no indexer and attend to the keys that an earlier layer chose. If a sequence, or the cache, has
room for no more tokens than a query chooses, the attention is that of DeepSeek-V3.

Source: arXiv:2512.02556; `modeling_deepseek_v32` and `modeling_glm_moe_dsa` of transformers.
"""

from collections.abc import Mapping
from typing import Any, ClassVar

from jax_nvfp4_moe.nn.attention.indexer import Indexer
from jax_nvfp4_moe.nn.attention.kv_cache import empty_entries
from jax_nvfp4_moe.nn.attention.latent_attention import LatentAttention, MLAConfig
from jax_nvfp4_moe.nn.building.builder import Builder
from jax_nvfp4_moe.ops.cache import append


class SparseLatentAttention(LatentAttention):
    """Latent attention with an indexer. The cache also holds the indexer's key of each token."""

    cache_axes: ClassVar[Mapping[str, int | None]] = {"latent": None, "index": None}

    def __init__(self, config: MLAConfig, make: Builder, path: str):
        """Build the layer at `path`; the number of heads in `config` is that of one shard."""
        super().__init__(config, make, path)
        assert config.indexer is not None
        assert config.rope is not None
        assert config.q_lora_rank is not None
        self.indexer = Indexer(
            config.indexer,
            config.rope,
            config.hidden,
            config.q_lora_rank,
            make,
            f"{path}.indexer",
        )

    def empty_cache(self, batch: int, max_length: int):
        """Return empty cache entries: those of `LatentAttention`, and the keys of the indexer."""
        shape = (1, self.indexer.sizes.head_dim)
        keys = empty_entries(batch, max_length, self.dtype, index=shape)
        return {**super().empty_cache(batch, max_length), **keys}

    def mix(self, x, positions, entries, *further) -> Any:
        """Return the attention of tokens `x`, in the shape of `x`, and the cache entries.

        If there is a further argument, which is not used, the positions of the chosen keys ``[b, t,
        c]`` are a further result, or None if the queries see all keys.
        """
        q, latent, residual = self._project(x, positions)
        index_q, key, weights = self.indexer(x, residual, positions)
        seen, entries = append(entries, positions, latent=latent, index=key)
        chosen = self.indexer.choose(index_q, weights, seen["index"], positions)
        y = self._attend(q, seen["latent"], positions, chosen)
        return self._finish(y, positions, x), entries, *[chosen for _ in further]


class FollowingLatentAttention(LatentAttention):
    """Latent attention to the keys that an earlier layer chose."""

    def mix(self, x, positions, entries, *further) -> Any:
        """Return what `SparseLatentAttention.mix` returns; `further` holds the chosen keys."""
        (chosen,) = further
        q, latent, _ = self._project(x, positions)
        seen, entries = append(entries, positions, latent=latent)
        y = self._attend(q, seen["latent"], positions, chosen)
        return self._finish(y, positions, x), entries, chosen
