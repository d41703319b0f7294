"""ScaledLinear: a linear layer that multiplies its input channels by stored scales first."""

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from jax_nvfp4_moe.nn.linear.dense_linear import DenseLinear
from jax_nvfp4_moe.nn.linear.fp8_linear import FP8Linear
from jax_nvfp4_moe.nn.linear.lora import LoRA, add_adapter, weight_with_adapters
from jax_nvfp4_moe.nn.linear.nvfp4_linear import NVFP4Linear
from jax_nvfp4_moe.nn.variables import NVFP4Param


class ScaledLinear(nnx.Module):
    """A linear layer whose input channels are multiplied by scales: ``y = linear(x * scale)``.

    AWQ divides columns of a weight by these scales before it quantizes the weight, so that the
    columns of large activations lose less. If activations are rounded, the layer rounds the
    product ``x * scale``. The product has the dtype of the layer.

    Attributes:
      scale: `NVFP4Param` ``[k]`` in the dtype of the layer, so that optimizers skip it.
      linear: the linear layer that multiplies the scaled input.
      adapter: `LoRA`, or None by default. What `add_lora` has added beside the layer. It reads the
        input before the scales.

    Source: Lin, Tang, Tang, Yang, Chen, Wang, Xiao, Dang, Gan, Han, "AWQ: Activation-aware Weight
    Quantization for LLM Compression and Acceleration", arXiv:2306.00978, 2023.
    """

    adapter: LoRA | None = None

    def __init__(self, linear: NVFP4Linear | FP8Linear | DenseLinear, scale: Float[Array, " k"]):
        """Put scales before a layer.

        Args:
          linear: the linear layer, such as an `NVFP4Linear` with k inputs.
          scale: one factor for each of the k inputs.
        """
        self.scale = NVFP4Param(scale.astype(linear.dtype))
        self.linear = linear

    def __call__(self, x: Float[Array, "... k"]) -> Float[Array, "... n"]:
        """Multiply the channels of `x` by their scales, and run the layer."""
        scale = self.scale.get_value()
        weight = weight_with_adapters(self.linear, self.adapter, scale)
        scaled = x.astype(self.dtype) * jnp.expand_dims(scale, range(x.ndim - 1))
        return add_adapter(self, x, self.linear._multiply_by(weight, scaled, self.dtype))

    @property
    def dtype(self) -> jnp.dtype:
        """The dtype of the result."""
        return self.linear.dtype
