"""DenseLinear: a linear layer that is not quantized."""

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from jax_nvfp4_moe.nn.intermediates import record
from jax_nvfp4_moe.nn.linear.lora import LoRA, add_adapter, weight_with_adapters
from jax_nvfp4_moe.nn.variables import read_bias
from jax_nvfp4_moe.ops.dense import dense
from jax_nvfp4_moe.scheme import Target


class DenseLinear(nnx.Module):
    """A linear layer that is not quantized: ``y = x @ weight.T + bias``.

    Sums are float32. The bias is added to them before they are rounded.

    Attributes:
      weight: `nnx.Param` ``[n, k]`` in the module's dtype.
      bias: `nnx.Param` ``[n]`` in the module's dtype, or None.
      dtype: static dtype of the result; inputs are cast to it.
      target: static `Target` that products are lowered for; None for any platform.
      bias_axis: static str, None by default. The mesh axis over which the columns of `weight`
        are sharded and the results summed. Then only the first shard adds the bias.
      adapter: `LoRA`, or None by default. What `add_lora` has added beside the weight.
    """

    bias_axis: str | None = None
    adapter: LoRA | None = None

    def __init__(
        self,
        weight: Float[Array, "n k"],
        bias: Float[Array, " n"] | None = None,
        *,
        target: Target | None = None,
        dtype=jnp.bfloat16,
    ):
        """Make a layer from its weights.

        Args:
          weight: ``[n, k]`` (outputs, inputs), cast to `dtype`.
          bias: ``[n]``, cast to `dtype`, or None.
          target: the device to run on, for which `ops.dense.dense` chooses a kernel. None (default)
            lowers for any platform.
          dtype: dtype of the weights and of the result. Defaults to bfloat16.
        """
        self.dtype, self.target = jnp.dtype(dtype), target
        self.weight = nnx.Param(jnp.asarray(weight, self.dtype))
        self.bias = None if bias is None else nnx.Param(jnp.asarray(bias, self.dtype))

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

    def _multiply_by(self, weight: Float[Array, "n k"], x: Float[Array, "... k"], dtype):
        """Do what a call does without an adapter, with another weight and in another dtype."""
        record(self, x)
        return dense(
            x.astype(self.dtype),
            weight,
            bias=read_bias(self),
            target=self.target,
            dtype=dtype,
        )
