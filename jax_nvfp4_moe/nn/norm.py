"""RMSNorm and LayerNorm, and the residual stream that they add to and normalize."""

from typing import NamedTuple

from flax import nnx
from jaxtyping import Array, Float

from jax_nvfp4_moe.nn.indexed_tuple import register_indexed
from jax_nvfp4_moe.nn.variables import read_value
from jax_nvfp4_moe.numerics.norms import layer_normalize, normalize
from jax_nvfp4_moe.ops.norms import add_rms_norm
from jax_nvfp4_moe.scheme import Target


@register_indexed
class Residual(NamedTuple):
    """The residual stream ``x + added`` between two layers, as a pair that is not added yet.

    The next norm adds the two, because one kernel can add and normalize. Otherwise XLA would sum
    the results of all earlier layers again in each norm, which makes late layers slow.

    Attributes:
      x: ``[b, t, h]``, the stream before the last addition.
      added: ``[b, t, h]``, the last result of a layer. None if `x` is the whole stream.
    """

    x: Float[Array, "b t h"]
    added: Float[Array, "b t h"] | None = None


class RMSNorm(nnx.Module):
    """Normalize by the root mean square: ``weight * x / sqrt(mean(x^2) + eps)`` over the last axis.

    The normalization runs in float32. The normalized values are then cast to the dtype of `weight`
    and multiplied by it.

    Attributes:
      weight: `nnx.Param` ``[h]``.
      eps: static float, added to the mean of the squares.
      target: device that `normalize_sum` is lowered for, static; None for the current device.

    Source: Zhang and Sennrich, "Root Mean Square Layer Normalization", arXiv:1910.07467.
    """

    def __init__(self, weight: Float[Array, " h"], eps: float, target: Target | None = None):
        """Make a norm.

        Args:
          weight: ``[h]``.
          eps: added to the mean of the squares.
          target: device that `normalize_sum` is lowered for. None (default) for the current device.
        """
        self.weight = nnx.Param(weight)
        self.eps, self.target = eps, target

    def __call__(
        self, x: Float[Array, "... h"], mean: Float[Array, "... 1"] | None = None
    ) -> Float[Array, "... h"]:
        """Normalize `x` over its last axis.

        Args:
          x: ``[..., h]``, a whole vector or one shard's part of it.
          mean: float32 ``[..., 1]``, the mean of the squares of the whole vector. None computes it
            from `x`, which must then be the whole vector.

        Returns:
          ``[..., h]`` in the dtype of `x`.
        """
        return normalize(x, self.weight.get_value(), self.eps, mean)

    def normalize_sum(
        self, stream: Residual
    ) -> tuple[Float[Array, "b t h"], Float[Array, "b t h"]]:
        """Return the sum of the residual stream, and the normalized sum, ``[b, t, h]`` each."""
        weight = self.weight.get_value()
        return add_rms_norm(stream.x, stream.added, weight, eps=self.eps, target=self.target)


class LayerNorm(nnx.Module):
    """Normalize by mean and variance: ``weight * (x - mean(x)) / sqrt(var(x) + eps) + bias``.

    The computation is in float32 and rounded once.

    Attributes:
      weight: `nnx.Param` ``[h]``.
      bias: `nnx.Param` ``[h]``, or None.
      eps: static float, added to the variance.
      target: device that the logits of a model with this norm are lowered for, static; None for the
        current device.

    Source: Ba et al., "Layer Normalization", arXiv:1607.06450.
    """

    def __init__(
        self,
        weight: Float[Array, " h"],
        bias: Float[Array, " h"] | None,
        eps: float,
        target: Target | None = None,
    ):
        """Make a norm.

        Args:
          weight: ``[h]``.
          bias: ``[h]``, or None for no bias.
          eps: added to the variance.
          target: device that the model is lowered for. None (default) for the current device.
        """
        self.weight, self.bias = nnx.Param(weight), None if bias is None else nnx.Param(bias)
        self.eps, self.target = eps, target

    def __call__(self, x: Float[Array, "... h"]) -> Float[Array, "... h"]:
        """Normalize `x` over its last axis, in its dtype."""
        return layer_normalize(x, self.weight.get_value(), read_value(self.bias), self.eps)

    def normalize_sum(
        self, stream: Residual
    ) -> tuple[Float[Array, "b t h"], Float[Array, "b t h"]]:
        """Return the sum of the residual stream, and the normalized sum, ``[b, t, h]`` each."""
        x = stream.x if stream.added is None else stream.x + stream.added
        return x, self(x)


Norm = RMSNorm | LayerNorm  # the norms of a residual stream
