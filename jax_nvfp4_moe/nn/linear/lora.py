"""LoRA: the low-rank adapter of a linear layer, which may hold several layers of the file."""

import functools
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
from flax import nnx
from jax import lax
from jaxtyping import Array, Float

from jax_nvfp4_moe.numerics.changed_weights import add_rounded
from jax_nvfp4_moe.ops.low_rank import LowRank, low_rank, only_gradient, product_of


class LowRankPair(nnx.Module):
    """The two matrices of one adapter.

    Attributes:
      a: `nnx.LoRAParam` ``[r, k]``, or ``[e, r, k]`` for e experts.
      b: `nnx.LoRAParam` ``[n, r]``, or ``[e, n, r]``.
      alpha: static float. The product is multiplied by ``alpha / r``.
      merge_aware: static bool. Whether a call multiplies by the weight that `merge_lora` would
        make, instead of adding the product.
    """

    def __init__(self, a: nnx.LoRAParam, b: nnx.LoRAParam, alpha: float, merge_aware: bool = False):
        """Store the two variables, `alpha` and `merge_aware`, which is False by default."""
        self.a, self.b, self.alpha, self.merge_aware = a, b, float(alpha), merge_aware

    def read(self) -> LowRank:
        """Return the matrices and their factor."""
        a = self.a.get_value()
        return LowRank(a, self.b.get_value(), self.alpha / a.shape[-2], self.merge_aware)


class LoRA(nnx.Module):
    """The adapter of a linear layer: ``y + alpha / r * (x @ A.T) @ B.T``, added in float32.

    A module may hold several linear layers of the file, such as queries, keys and values. Each of
    them that is adapted has matrices of its own, as in PEFT, which change its part of the result.

    If a pair is `merge_aware`, the layer multiplies by ``round(W + alpha / r * B @ A)`` instead,
    the weight that `merge_lora` makes. The derivative of the rounding is taken for the identity.

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
            _beside(x, pairs[name].read())
            if name in pairs
            else jnp.zeros((*y.shape[:-1], width), jnp.float32)
            for name, width in self.widths
        ]
        delta = parts[0] if len(parts) == 1 else jnp.concatenate(parts, axis=-1)
        return (y.astype(jnp.float32) + delta).astype(y.dtype)

    def change(self, inputs: int, *, merge_aware_only: bool = False) -> Float[Array, "n k"] | None:
        """Return ``alpha / r * B @ A`` of all layers, the change of the weight of the module.

        Args:
          inputs: k.
          merge_aware_only: whether adapters that are not `merge_aware` count as zeros. False by
            default.

        Returns:
          float32 ``[n, k]``, or None if no adapter counts.
        """
        pairs = self.pairs()
        if merge_aware_only:
            pairs = {name: pair for name, pair in pairs.items() if pair.merge_aware}
        if not pairs:
            return None
        parts = [
            product_of(pairs[name].read()) if name in pairs else jnp.zeros((width, inputs))
            for name, width in self.widths
        ]
        return parts[0] if len(parts) == 1 else jnp.concatenate(parts)


def _beside(x, pair):
    """Return what a call adds for an adapter: its product, or only the gradient of the product."""
    if pair.rounded:
        return only_gradient(functools.partial(low_rank, pair=pair), x)
    return low_rank(x, pair)


def weight_with_adapters(layer: Any, adapter: LoRA | None, channel_scale: Any = None) -> Any:
    """Return the weight by which a call of a linear layer multiplies.

    It is the stored weight, to which the products of adapters that are `merge_aware` are added.

    Args:
      layer: a linear layer with a variable `weight`.
      adapter: the adapter of the layer, or None.
      channel_scale: ``[k]``, factors of the inputs of the layer but not of the adapter, or None.
    """
    weight = layer.weight.get_value()
    change = adapter and adapter.change(weight.shape[-1], merge_aware_only=True)
    if change is None:
        return weight
    return lax.stop_gradient(merge_weight(weight, lax.stop_gradient(change), channel_scale))


def merge_weight(weight: Any, change: Float[Array, "n k"], channel_scale: Any = None) -> Any:
    """Return a weight with a change added, in the format of the weight; see `add_rounded`.

    Args:
      weight: an `NVFP4Tensor` in any layout, an `FP8Tensor` or a float array.
      change: the change of what multiplies the inputs.
      channel_scale: ``[k]``, factors by which inputs are multiplied before the weight, or None.
    """
    if channel_scale is not None:
        scale = channel_scale.astype(jnp.float32)[None]
        change = jnp.where(scale == 0, 0, change / jnp.where(scale == 0, 1, scale))
    return add_rounded(weight, change)


def add_adapter(layer: Any, x: Float[Array, "... k"], y: Float[Array, "... n"]):
    """Return ``layer.adapter.add_to(x, y)``, or `y` if the layer has no adapter.

    Args:
      layer: a linear layer with an attribute `adapter`, a `LoRA` or None.
      x: input of the layer, which is cast to the dtype of the layer.
      y: result of the layer.
    """
    return y if layer.adapter is None else layer.adapter.add_to(x.astype(layer.dtype), y)
