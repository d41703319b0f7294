"""The module of a linear layer, which follows from the format of its weights in the file."""

import dataclasses

from jax_nvfp4_moe.checkpoint.values import LinearWeights
from jax_nvfp4_moe.nn.building.settings import Settings
from jax_nvfp4_moe.nn.linear.dense_linear import DenseLinear
from jax_nvfp4_moe.nn.linear.fp8_linear import FP8Linear
from jax_nvfp4_moe.nn.linear.nvfp4_linear import NVFP4Linear
from jax_nvfp4_moe.nn.linear.scaled_linear import ScaledLinear
from jax_nvfp4_moe.parallel.expert_mesh import TENSOR
from jax_nvfp4_moe.parallel.shard_spec import ShardSpec
from jax_nvfp4_moe.parallel.sharded_variable import mark
from jax_nvfp4_moe.scheme import FP8ActivationScaling


def make_linear(
    found: LinearWeights, n: int, k: int, settings: Settings, spec: ShardSpec | None = None
) -> DenseLinear | FP8Linear | NVFP4Linear | ScaledLinear:
    """Make a linear layer from its weights in the file.

    Args:
      found: weights of one shard.
      n: number of outputs of one shard.
      k: number of inputs of one shard.
      settings: how modules are made.
      spec: how the layer is sharded along `tensor`. None means that it is replicated.

    Returns:
      The module that fits the format of the weights.
    """
    if found.checkpoint_scheme is None:
        made = DenseLinear(found.weight, found.bias, target=settings.target, dtype=settings.dtype)
    elif isinstance(found.checkpoint_scheme, FP8ActivationScaling):
        made = FP8Linear(
            found.weight,
            found.bias,
            found.input_scale,
            checkpoint_scheme=found.checkpoint_scheme,
            multiply_by_reciprocal=found.multiply_by_reciprocal,
            scheme=settings.scheme,
            target=settings.target,
            dtype=settings.dtype,
        )
    else:
        made = NVFP4Linear(
            k,
            n,
            weight=found.weight,
            bias=found.bias,
            input_scale=found.input_scale,
            checkpoint_scheme=found.checkpoint_scheme,
            **settings.module_arguments(),
        )
    layout = spec and spec.layout(n if spec.axis == "rows" else k, settings.shards)
    by_columns = spec is not None and spec.axis == "columns"
    if spec is not None:
        made.weight = mark(made.weight, layout)
        made.bias = mark(made.bias, None if by_columns else layout)
        if by_columns:
            assert settings.expert_mesh is not None
            made.bias_axis = settings.expert_mesh.name(TENSOR)
    if found.channel_scale is None:
        return made
    scaled = ScaledLinear(made, found.channel_scale)
    if layout is not None and by_columns:  # the scales are sharded like the columns they multiply
        scaled.scale = mark(scaled.scale, dataclasses.replace(layout, axis="rows"))
    return scaled
