"""NVFP4Param, and how modules make and read their variables."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec

from jax_nvfp4_moe.parallel.expert_mesh import first_shard_only
from jax_nvfp4_moe.parallel.partition_specs import partition_specs
from jax_nvfp4_moe.parallel.sharded_variable import ShardedVariable


class NVFP4Param(ShardedVariable, nnx.Variable):
    """A variable that holds frozen weights: quantized matrices, their scales, and routed experts.

    The value is an `NVFP4Tensor`, `MoEParams`, `DenseExperts`, an `FP8Tensor` or a float32 scale.
    The class is not an `nnx.Param`, so optimizers, `nnx.grad` and LoRA skip it. Use it in filters.

    Example:
      >>> from flax import nnx
      >>> import jax_nvfp4_moe as nvfp4
      >>> moe = nvfp4.NVFP4MoE(8, 64, 32, top_k=2, rngs=nnx.Rngs(0))
      >>> frozen, trained = nnx.state(moe, nvfp4.NVFP4Param, nnx.Param)
      >>> list(frozen), list(trained)
      (['experts'], ['token_router'])

    Source: `nnx.Variable` and the filters of Flax.
    """

    @property
    def sharding(self) -> Any:
        """The value with each array replaced by its sharding, or by None if it has none.

        `nnx.eval_shape` in the context of a mesh takes a variable without a sharding for one array.
        """
        return jax.tree.map(lambda leaf: getattr(leaf, "sharding", None), self.get_value())

    def replace(self, *args: Any, **updates: Any) -> Any:
        """Return a copy with another value or other metadata, as `nnx.Variable.replace` does.

        `nnx.get_partition_spec` passes one `PartitionSpec` for the variable, or None. The arrays of
        the value are sharded in different ways, so the copy then holds one for each array.
        """
        if args and (args[0] is None or isinstance(args[0], PartitionSpec)):
            args = (partition_specs(self), *args[1:])
        return super().replace(*args, **updates)


class DerivedParam(NVFP4Param):
    """Frozen weights that follow from other weights of the model, such as a rounded copy of a head.

    `save` leaves them out. `restore` calls the method ``derive_weights`` of the module that has
    them and the weights from which they follow.
    """


def read_value(variable):
    """Return the array that `variable` holds, or None if `variable` is None."""
    return None if variable is None else variable.get_value()


def wrap_value(kind, value):
    """Return a variable of class `kind` that holds an array, or None if `value` is None."""
    return None if value is None else kind(jnp.asarray(value))


def wrap_scale(value):
    """Return `value` as an `NVFP4Param` in float32, or None if `value` is None."""
    return None if value is None else NVFP4Param(jnp.asarray(value, jnp.float32))


def read_bias(linear):
    """Return the bias that this shard of a linear layer adds, or None if the layer has none."""
    bias = read_value(linear.bias)
    if bias is None or linear.bias_axis is None:
        return bias
    return first_shard_only(bias, linear.bias_axis)
