"""Lightning indexer: cheap scores by which each query chooses the keys that it attends to.

For the query of token t and the key of token s, with a few small heads h that share one key::

  score[t, s] = sum over h of weight[t, h] * relu(q[t, h] @ k[s])

The indexer of DeepSeek also multiplies the scores by positive numbers that all scores share, turns
queries and keys by one Hadamard matrix, and rounds them to FP8. The factors do not change which
scores are the largest, and the matrix changes no product. Like transformers, this module leaves out
all three.

Source: arXiv:2512.02556; `modeling_deepseek_v32` and `modeling_glm_moe_dsa` of transformers.
"""

import dataclasses
from typing import Any

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int32

from jax_nvfp4_moe.nn.attention.kv_cache import group_channels
from jax_nvfp4_moe.nn.building.builder import Builder
from jax_nvfp4_moe.nn.linear.dense_linear import DenseLinear
from jax_nvfp4_moe.nn.linear.fp8_linear import FP8Linear
from jax_nvfp4_moe.nn.packing import unpack
from jax_nvfp4_moe.numerics.norms import layer_normalize
from jax_nvfp4_moe.numerics.rope import Rope, pair_halves, rotate
from jax_nvfp4_moe.ops.chosen_keys import choose_keys

# Epsilon of the norm of the keys. The models do not pass rms_norm_eps to this norm.
_EPS = 1e-6


@dataclasses.dataclass(frozen=True)
class IndexerSizes:
    """Sizes of an indexer. All fields are static.

    Attributes:
      heads: number of heads of queries.
      head_dim: width of a query and of a key.
      count: number of keys that a query attends to.
      interleaved: whether the two channels of a rotated pair are adjacent in the checkpoint. If
        not, they are half of the rotated channels apart.
    """

    heads: int
    head_dim: int
    count: int
    interleaved: bool


class Indexer(nnx.Module):
    """The projections of an indexer. It is replicated on every device of a mesh.

    Attributes:
      sizes: static.
      rope: rotation of the first channels of queries and keys, static.
    """

    def __init__(
        self, sizes: IndexerSizes, rope: Rope, hidden: int, rank: int, make: Builder, path: str
    ):
        """Build the indexer.

        Args:
          sizes: its sizes.
          rope: rotation of the first channels of queries and keys.
          hidden: width of the tokens.
          rank: width of the latents of the queries.
          make: builds the parts.
          path: path of the indexer.
        """
        self.sizes, self.rope = sizes, rope
        self.queries = make.linear(f"{path}.queries", sizes.heads * sizes.head_dim, rank)
        self.keys = make.linear(f"{path}.keys", sizes.head_dim, hidden)
        self.head_weights = make.linear(f"{path}.head_weights", sizes.heads, hidden)
        self.norm_weight = make.variable(f"{path}.norm_weight", (sizes.head_dim,))
        self.norm_bias = make.variable(f"{path}.norm_bias", (sizes.head_dim,))

    def __call__(
        self,
        x: Float[Array, "... h"],
        latent: Float[Array, "... r"],
        positions: Int32[Array, "b t"],
    ) -> Any:
        """Project tokens.

        Args:
          x: the tokens, ``[b, t, h]`` or packed.
          latent: the latents of their queries, normalized, packed if `x` is.
          positions: position of each token.

        Returns:
          The queries ``[b, t, heads, head_dim]``, the keys ``[b, t, 1, head_dim]``, and the float32
          weights of the heads ``[b, t, heads]``.
        """
        q = unpack(self.queries(latent), positions)
        q = group_channels(q, self.sizes.head_dim)
        k = unpack(self.keys(x), positions)
        k = layer_norm_keys(k, self.norm_weight, self.norm_bias)[:, :, None, :]
        weights = unpack(self._weigh(x), positions)
        return self._rotate(q, positions), self._rotate(k, positions), weights

    def choose(
        self, q, weights, k: Float[Array, "b 1 s d"], positions
    ) -> Int32[Array, "b t c"] | None:
        """Return the positions of the keys that each query attends to, or None for all keys.

        Args:
          q: queries, as a call returns them.
          weights: weights of their heads, as a call returns them.
          k: keys of all positions, which may be those of a cache.
          positions: position of each query.
        """
        if k.shape[2] <= self.sizes.count:
            return None
        return choose_keys(q, weights, k[:, 0], positions, count=self.sizes.count)

    def _rotate(self, x, positions):
        if self.sizes.interleaved:
            width = 2 * len(self.rope.frequencies)
            x = jnp.concatenate([pair_halves(x[..., :width]), x[..., width:]], axis=-1)
        return rotate(x, positions, self.rope)

    def _weigh(self, x):
        """Return the weights of the heads, in float32 also where the model is in bfloat16."""
        if isinstance(self.head_weights, DenseLinear | FP8Linear):
            return self.head_weights.in_float32(x)
        return self.head_weights(x).astype(jnp.float32)


def layer_norm_keys(
    keys: Float[Array, "... d"], weight: nnx.Param, bias: nnx.Param
) -> Float[Array, "... d"]:
    """Return the keys of an indexer, normalized."""
    return layer_normalize(keys, weight.get_value(), bias.get_value(), _EPS)
