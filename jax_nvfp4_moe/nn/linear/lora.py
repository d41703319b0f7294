"""LoRA: the low-rank adapter of a linear layer, which may hold several layers of the file."""

from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
from flax import nnx
from jax import lax
from jaxtyping import Array, Float

from jax_nvfp4_moe.ops.low_rank import LowRank, low_rank


class LowRankPair(nnx.Module):
    """The two matrices of one adapter.

    Attributes:
      a: `nnx.LoRAParam` ``[r, k]``, or ``[e, r, k]`` for e experts.
      b: `nnx.LoRAParam` ``[n, r]``, or ``[e, n, r]``.
      alpha: static float. The product is multiplied by ``alpha / r``.
    """

    def __init__(self, a: nnx.LoRAParam, b: nnx.LoRAParam, alpha: float):
        """Store the two variables and `alpha`."""
        self.a, self.b, self.alpha = a, b, float(alpha)

    def read(self) -> LowRank:
        """Return the matrices and their factor."""
        a = self.a.get_value()
        return LowRank(a, self.b.get_value(), self.alpha / a.shape[-2])


class LoRA(nnx.Module):
    """The adapter of a linear layer: ``y + alpha / r * (x @ A.T) @ B.T``, added in float32.

    A module may hold several linear layers of the file, such as queries, keys and values. Each of
    them that is adapted has matrices of its own, as in PEFT, which change its part of the result.

    Attributes:
      widths: static pairs of the name of each layer of the file, in the order of the rows of the
        module, and of its number of outputs in one shard. The `LowRankPair` of an adapted layer is
        an attribute under its name.
    """

    def __init__(self, widths: Mapping[str, int], pairs: Mapping[str, LowRankPair]):
        """Store the pairs.

        Args:
          widths: name of each layer -> its number of outputs in one shard.
          pairs: name of each adapted layer -> its matrices.
        """
        self.widths = tuple(widths.items())
        for name, pair in pairs.items():
            setattr(self, name, pair)

    def pairs(self) -> dict[str, LowRankPair]:
        """Return the adapted layers by name."""
        named = ((name, getattr(self, name, None)) for name, _ in self.widths)
        return {name: pair for name, pair in named if pair is not None}

    def add_to(self, x: Float[Array, "... k"], y: Float[Array, "... n"]) -> Float[Array, "... n"]:
        """Return the result `y` of the layer for `x`, with the low-rank products added."""
        # Without the barrier, XLA may merge this GEMM with that of a weight that is not quantized,
        # and copy that weight in each call.
        pairs, x = self.pairs(), lax.optimization_barrier(x)
        parts = [
            low_rank(x, pairs[name].read())
            if name in pairs
            else jnp.zeros((*y.shape[:-1], width), jnp.float32)
            for name, width in self.widths
        ]
        delta = parts[0] if len(parts) == 1 else jnp.concatenate(parts, axis=-1)
        return (y.astype(jnp.float32) + delta).astype(y.dtype)


def add_adapter(layer: Any, x: Float[Array, "... k"], y: Float[Array, "... n"]):
    """Return ``layer.adapter.add_to(x, y)``, or `y` if the layer has no adapter.

    Args:
      layer: a linear layer with an attribute `adapter`, a `LoRA` or None.
      x: input of the layer, which is cast to the dtype of the layer.
      y: result of the layer.
    """
    return y if layer.adapter is None else layer.adapter.add_to(x.astype(layer.dtype), y)
