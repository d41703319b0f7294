"""FP8Linear: a linear layer whose weight matrix is stored in FP8."""

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from jax_nvfp4_moe.nn.intermediates import record
from jax_nvfp4_moe.nn.linear.lora import LoRA, add_adapter, weight_with_adapters
from jax_nvfp4_moe.nn.variables import NVFP4Param, read_bias, read_value
from jax_nvfp4_moe.numerics.fp8 import FP8Tensor
from jax_nvfp4_moe.ops.dense import dense_fp8
from jax_nvfp4_moe.scheme import FP8ActivationScaling, Scheme, Target, rounds_to_fp8


def find_activation_scaling(
    checkpoint_scheme: FP8ActivationScaling, scheme: Scheme | str | None, target: Target | None
) -> FP8ActivationScaling:
    """Return how the inputs of FP8 products are rounded when the model runs.

    `scheme.rounds_to_fp8` decides whether the inputs are rounded at all. If they are, the result is
    `checkpoint_scheme`; otherwise it is `FP8ActivationScaling.WEIGHTS`, which rounds nothing.

    Args:
      checkpoint_scheme: the rounding that the checkpoint declares.
      scheme: the scheme that the caller asked for, or None.
      target: the device; None takes JAX's default device.
    """
    rounds = rounds_to_fp8(scheme, target or Target.current())
    return checkpoint_scheme if rounds else FP8ActivationScaling.WEIGHTS


class FP8Linear(nnx.Module):
    """A linear layer whose weight matrix is stored in FP8 (E4M3).

    ``y = round(x) @ (values * scale).T + bias``, where ``round`` is the identity or rounds to E4M3,
    as `activations` says. Sums are float32. The bias is added to them before they are rounded.

    A scale belongs to a row, or to 128 weights of a row. Then the kernel for few rows multiplies
    the float32 sum over these by the scale. With more rows, or on another device, each call
    dequantizes the weight and rounds ``values * scale`` to the module's dtype. This takes
    temporary memory: two bytes for each weight of the layer in 16 bits.

    Attributes:
      weight: `NVFP4Param` that holds an `FP8Tensor` ``[n, k]``.
      bias: `nnx.Param` ``[n]`` in the module's dtype, or None.
      input_scale: `NVFP4Param` that holds the float32 scale of the activations; None unless they
        are rounded with a calibrated scale.
      dtype: static dtype of the result; inputs are cast to it.
      target: static `Target` that products are lowered for; None for any platform.
      checkpoint_scheme: static `FP8ActivationScaling`. The rounding that the checkpoint declares.
      activations: static `FP8ActivationScaling`. The rounding that runs.
      multiply_by_reciprocal: static bool; see `numerics.fp8.round_fp8`.
      bias_axis: static str, None by default. The mesh axis over which the columns of `weight`
        are sharded and the results summed. Then only the first shard adds the bias.
      adapter: `LoRA`, or None by default. What `add_lora` has added beside the weight.
    """

    bias_axis: str | None = None
    adapter: LoRA | None = None

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
        """Make a layer from its weights.

        Args:
          weight: `FP8Tensor` ``[n, k]`` (outputs, inputs): values and scales.
          bias: ``[n]``, cast to `dtype`, or None.
          input_scale: float32 scalar. Required if activations are rounded with a calibrated scale,
            ignored otherwise. Defaults to None.
          checkpoint_scheme: the rounding of activations that the checkpoint declares: an
            `FP8ActivationScaling` or its name. Defaults to "fp8_weights", which rounds nothing.
          multiply_by_reciprocal: how values are scaled before they are rounded; see
            `numerics.fp8.round_fp8`. Defaults to False.
          scheme: the scheme that the caller asked for, or None. `scheme.rounds_to_fp8` decides from
            it and from `target` whether activations are rounded.
          target: the device to run on, for which `ops.dense.dense_fp8` chooses a kernel. None
            (default) lowers for any platform, and takes JAX's default device for `scheme`.
          dtype: dtype of the result, to which inputs are cast. Defaults to bfloat16.

        Raises:
          ValueError: activations are rounded with a calibrated scale, and `input_scale` is None.
        """
        self.dtype, self.target = jnp.dtype(dtype), target
        self.checkpoint_scheme = FP8ActivationScaling(checkpoint_scheme)
        self.activations = find_activation_scaling(self.checkpoint_scheme, scheme, target)
        if self.activations is FP8ActivationScaling.STATIC and input_scale is None:
            raise ValueError(
                "input_scale: checkpoint scheme 'fp8' rounds activations with a calibrated scale, "
                "a float32 scalar; got None. Pass it, or use scheme 'w4a16', which does not round"
            )
        self.multiply_by_reciprocal = multiply_by_reciprocal
        self.weight = NVFP4Param(weight)
        self.bias = None if bias is None else nnx.Param(jnp.asarray(bias, self.dtype))
        used = self.activations is FP8ActivationScaling.STATIC
        self.input_scale = NVFP4Param(jnp.asarray(input_scale, jnp.float32)) if used else None

    def __call__(self, x: Float[Array, "... k"]) -> Float[Array, "... n"]:
        """Multiply `x` by the weight and add the bias.

        Args:
          x: ``[..., k]``; cast to the module's dtype.

        Returns:
          ``[..., n]`` in the module's dtype.
        """
        return self._multiply(x, self.dtype)

    def in_float32(self, x: Float[Array, "... k"]) -> Float[Array, "... n"]:
        """Do what a call does, and return the float32 sums, such as logits, without rounding."""
        return self._multiply(x, jnp.float32)

    def _multiply(self, x, dtype):
        """Return the result of a call in `dtype`."""
        y = self._multiply_by(weight_with_adapters(self, self.adapter), x, dtype)
        return add_adapter(self, x, y)

    def _multiply_by(self, weight: FP8Tensor, x: Float[Array, "... k"], dtype):
        """Do what a call does without an adapter, with another weight and in another dtype."""
        record(self, x)
        return dense_fp8(
            x.astype(self.dtype),
            weight,
            activations=self.activations,
            input_scale=read_value(self.input_scale),
            multiply_by_reciprocal=self.multiply_by_reciprocal,
            bias=read_bias(self),
            target=self.target,
            dtype=dtype,
        )
