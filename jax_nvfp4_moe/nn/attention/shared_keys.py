"""Grouped-query attention to the keys and values of an earlier layer."""

from jax import lax

from jax_nvfp4_moe.nn.attention.grouped_query import GQAConfig
from jax_nvfp4_moe.nn.attention.kv_cache import KEY_AXES, group_channels
from jax_nvfp4_moe.nn.building.builder import Builder, as_stored
from jax_nvfp4_moe.nn.packing import pack_like, unpack
from jax_nvfp4_moe.numerics.rope import rotate
from jax_nvfp4_moe.ops.causal_attention.op import attention
from jax_nvfp4_moe.parallel.tensor_parallel import HeadParallel


class SharedKeysAttention(HeadParallel):
    """Attention of a layer that projects queries alone.

    Its cache entries are those of the earlier layer, which hold the new tokens already. It returns
    them as they are.

    Attributes:
      q: the projection of queries.
      q_norm: the norm of each query head.
      out: the output projection.
      config: sizes and options, static.
    """

    cache_axes = KEY_AXES

    def __init__(self, config: GQAConfig, make: Builder, path: str):
        """Build the layer at `path`; the sizes in `config` are those of one shard."""
        rows = config.num_heads * config.head_dim
        self.config, self.target = config, make.settings.target
        self.q = make.linear(f"{path}.q", rows, config.hidden, as_stored(config.bias))
        self.q_norm = make.norm(f"{path}.q_norm", config.head_dim, config.eps)
        self.out = make.linear(f"{path}.out", config.hidden, rows, as_stored(config.out_bias))

    def mix(self, x, positions, entries):
        """Return the attention of tokens `x`, in the shape of `x`, and the cache entries."""
        config = self.config
        q = self.q_norm(group_channels(unpack(self.q(x), positions), config.head_dim))
        y = attention(
            rotate(q, positions, config.rope),
            entries["k"],
            entries["v"],
            positions,
            scale=config.scale,
            window=config.window,
            target=self.target,
        )
        return self.out(lax.collapse(pack_like(y, positions, x), 2)), entries
