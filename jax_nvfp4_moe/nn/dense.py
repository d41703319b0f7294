"""Flax NNX linears that are not NVFP4: dense, and FP8."""

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from jax_nvfp4_moe.nn.intermediates import record
from jax_nvfp4_moe.numerics.fp8 import FP8Tensor
from jax_nvfp4_moe.ops.dense import dense, dense_fp8
from jax_nvfp4_moe.parallel.expert_mesh import first_shard_only
from jax_nvfp4_moe.scheme import FP8ActivationScaling, Scheme, Target, rounds_to_fp8


class NVFP4Param(nnx.Variable):
    """Frozen quantized state: an `NVFP4Tensor`, `MoEParams`, an `FP8Tensor` or a scale.

    Its own class and no `nnx.Param`, so that optimizers, `nnx.grad` and LoRA pass it by.
    """


def find_activation_scaling(
    checkpoint_scheme: FP8ActivationScaling, scheme: Scheme | str | None, target: Target | None
) -> FP8ActivationScaling:
    """Return how the inputs of FP8 products are rounded; see `scheme.rounds_to_fp8`."""
    rounds = rounds_to_fp8(scheme, target or Target.current())
    return checkpoint_scheme if rounds else FP8ActivationScaling.WEIGHTS


class DenseLinear(nnx.Module):
    """A linear that is not quantized: ``y = x @ weight.T + bias``, float32 sums.

    Attributes:
      weight: `nnx.Param` ``[n, k]`` in the module's dtype.
      bias: `nnx.Param` ``[n]``, or None.
      adds_bias_once: static; whether shards add up their results, so that one of them adds it.
    """

    adds_bias_once: bool = False

    def __init__(
        self,
        weight: Float[Array, "n k"],
        bias: Float[Array, " n"] | None = None,
        *,
        dtype=jnp.bfloat16,
    ):
        """Make a linear of `weight` ``[n, k]`` and `bias` ``[n]``, both cast to `dtype`."""
        self.dtype = jnp.dtype(dtype)
        self.weight = nnx.Param(jnp.asarray(weight, self.dtype))
        self.bias = None if bias is None else nnx.Param(jnp.asarray(bias, self.dtype))

    def __call__(self, x: Float[Array, "... k"]) -> Float[Array, "... n"]:
        """Multiply; `x` is cast to the module's dtype, which the result has."""
        record(self, x)
        y = dense(x.astype(self.dtype), self.weight.get_value())
        if self.bias is not None:
            y = y + jnp.expand_dims(_bias_of(self), range(y.ndim - 1))
        return y.astype(self.dtype)


class FP8Linear(nnx.Module):
    """A linear with an FP8 matrix: ``y = round(x) @ (values * scale).T + bias``, float32 sums.

    Attributes:
      weight: `NVFP4Param` of an `FP8Tensor` ``[n, k]``.
      bias: `nnx.Param` ``[n]``, or None.
      adds_bias_once: static; whether shards add up their results, so that one of them adds it.
      input_scale: `NVFP4Param` of the activations' float32 scale, or None.
      checkpoint_scheme: static; how the checkpoint says that activations are rounded.
      activations: static; how they are.
      multiply_by_reciprocal: static; see `numerics.fp8.round_fp8`.
    """

    adds_bias_once: bool = False

    def __init__(
        self,
        weight: FP8Tensor,
        bias: Float[Array, " n"] | None = None,
        input_scale: Float[Array, ""] | None = None,
        *,
        checkpoint_scheme: FP8ActivationScaling | str = FP8ActivationScaling.WEIGHTS,
        multiply_by_reciprocal: bool = False,
        scheme: Scheme | str | None = None,
        target: Target | None = None,
        dtype=jnp.bfloat16,
    ):
        """Make a linear of `weight` ``[n, k]``.

        Args:
          weight: values and scales.
          bias: ``[n]``, cast to `dtype`.
          input_scale: needed where activations are rounded with a calibrated scale.
          checkpoint_scheme: what the checkpoint says of activations.
          multiply_by_reciprocal: see `numerics.fp8.round_fp8`.
          scheme, target: activations are rounded where `scheme.rounds_to_fp8` says so.
          dtype: of the result; inputs are cast to it.

        Raises:
          ValueError: activations are to be rounded with a calibrated scale, and there is none.
        """
        self.dtype = jnp.dtype(dtype)
        self.checkpoint_scheme = FP8ActivationScaling(checkpoint_scheme)
        self.activations = find_activation_scaling(self.checkpoint_scheme, scheme, target)
        if self.activations is FP8ActivationScaling.STATIC and input_scale is None:
            raise ValueError("input_scale: expected a scalar with declared 'fp8', got None")
        self.multiply_by_reciprocal = multiply_by_reciprocal
        self.weight = NVFP4Param(weight)
        self.bias = None if bias is None else nnx.Param(jnp.asarray(bias, self.dtype))
        used = self.activations is FP8ActivationScaling.STATIC
        self.input_scale = NVFP4Param(jnp.asarray(input_scale, jnp.float32)) if used else None

    def __call__(self, x: Float[Array, "... k"]) -> Float[Array, "... n"]:
        """Multiply; `x` is cast to the module's dtype, which the result has."""
        record(self, x)
        y = dense_fp8(
            x.astype(self.dtype),
            self.weight.get_value(),
            activations=self.activations,
            input_scale=None if self.input_scale is None else self.input_scale.get_value(),
            multiply_by_reciprocal=self.multiply_by_reciprocal,
        )
        if self.bias is not None:
            y = y + jnp.expand_dims(_bias_of(self), range(y.ndim - 1))
        return y.astype(self.dtype)


def _bias_of(linear: DenseLinear | FP8Linear):
    """Return what a linear with a bias adds, in float32."""
    assert linear.bias is not None
    bias = linear.bias.get_value().astype(jnp.float32)
    return first_shard_only(bias) if linear.adds_bias_once else bias
