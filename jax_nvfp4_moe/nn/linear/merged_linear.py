"""MergedLinear: several linear layers that read the same input, with few GEMMs."""

import dataclasses
import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from jax_nvfp4_moe.checkpoint.values import LinearWeights
from jax_nvfp4_moe.nn.building.settings import Settings
from jax_nvfp4_moe.nn.intermediates import record
from jax_nvfp4_moe.nn.linear.fp8_linear import find_activation_scaling
from jax_nvfp4_moe.numerics.fp8 import FP8Tensor
from jax_nvfp4_moe.numerics.tensor import NVFP4Tensor
from jax_nvfp4_moe.ops.compiling_ahead import Noted
from jax_nvfp4_moe.scheme import FP8ActivationScaling, Scheme, choose_scheme


class MergedLinear(nnx.Module):
    """Several linear layers that read the same input.

    ``y = concatenate([first(x), second(x), ...], axis=-1)``

    Neighboring layers of the same format are one module with the rows of all of them, which one
    GEMM computes. Decoding one token is bound by reading weights, and one large read is faster than
    several small ones. `find_runs` says which layers are joined, and `join_weights` joins them.

    Attributes:
      names: static tuple of the names of the modules, in the order of their rows. Each module is an
        attribute under its name. A module that holds several layers has their names with
        underscores between them, such as "q_k_v".
    """

    def __init__(self, **linears):
        """Store the modules, which are passed by name in the order of their rows."""
        self.names = tuple(linears)
        for name, part in linears.items():
            setattr(self, name, part)

    def __call__(self, x: Float[Array, "... k"]) -> Float[Array, "... n"]:
        """Return the results of all layers, concatenated along the last axis."""
        results = self.apart(x)
        return results[0] if len(results) == 1 else jnp.concatenate(results, axis=-1)

    def apart(self, x: Float[Array, "... k"]) -> list[Float[Array, "... n"]]:
        """Return the result of each module, in the order of `names`."""
        record(self, x)
        return [getattr(self, name)(x) for name in self.names]


def find_runs(
    weights: Mapping[str, LinearWeights], settings: Settings
) -> Iterator[tuple[str, ...]]:
    """Yield the names of the layers of each module of a `MergedLinear`, in order.

    Neighboring layers belong to one module if the file stores them in the same format, and if that
    module computes what the layers compute. A layer whose activations are rounded with a calibrated
    scale is therefore alone: each layer has its own input scale, and a GEMM has only one.

    Args:
      weights: name of each layer -> its weights, or their shapes.
      settings: how modules are made; the scheme and the device decide how activations are rounded.
    """
    for _, run in itertools.groupby(weights, lambda name: _format(name, weights[name], settings)):
        yield tuple(run)


def _format(name, found: LinearWeights, settings: Settings):
    """Return a key that is equal for layers that can be joined."""
    declared = found.checkpoint_scheme
    if declared is None:
        return (None,)
    form = None
    if isinstance(declared, FP8ActivationScaling):
        form = found.weight.has_groups
        used = find_activation_scaling(declared, settings.scheme, settings.target)
        alone = used is FP8ActivationScaling.STATIC
    else:
        assert isinstance(declared, Scheme)
        used, _ = choose_scheme(declared, settings.scheme, settings.target)
        alone = used is Scheme.W4A4
    alone = alone or found.channel_scale is not None  # the scales multiply the inputs of one layer
    return (declared, form, name if alone else None, found.multiply_by_reciprocal)


def join_weights(parts: Sequence[LinearWeights]) -> LinearWeights:
    """Return one layer with the rows of all `parts`, which have the same format and inputs.

    The result has no input scale if there are several parts. Each row keeps the global scale of its
    matrix, so that the values do not change.

    Args:
      parts: weights of at least one layer. NVFP4 weights are canonical.
    """
    first = parts[0]
    if len(parts) == 1:
        return first
    return dataclasses.replace(
        first,
        weight=_join_matrices(tuple(part.weight for part in parts)),
        bias=_join_biases(parts),
        input_scale=None,
    )


@Noted
@jax.jit  # one program instead of several for each matrix of a model that is loaded
def _join_matrices(weights) -> Any:
    """Return one matrix with the rows of all `weights`, which have the same type."""
    if isinstance(weights[0], FP8Tensor):
        values, scales = zip(*((one.values, one.scale) for one in weights), strict=True)
        return FP8Tensor(jnp.concatenate(values), jnp.concatenate(scales))
    if not isinstance(weights[0], NVFP4Tensor):
        return jnp.concatenate(weights)
    divisors = None
    if weights[0].global_divisor is not None:
        divisors = jnp.concatenate([_each_row(one, one.global_divisor) for one in weights])
    return NVFP4Tensor(
        jnp.concatenate([one.packed for one in weights]),
        jnp.concatenate([one.block_scale for one in weights]),
        jnp.concatenate([_each_row(one, one.global_scale) for one in weights]),
        divisors,
    )


def _each_row(weight: NVFP4Tensor, scale):
    """Return the scale of a matrix for each of its rows."""
    return jnp.broadcast_to(scale, weight.shape[:1])


def _join_biases(parts):
    """Return the biases of all rows, with zeros for a layer without a bias; None if none has one.

    The zeros have the dtype of the other biases.
    """
    dtype = next((part.bias.dtype for part in parts if part.bias is not None), None)
    if dtype is None:
        return None
    return jnp.concatenate(
        [
            jnp.zeros(part.weight.shape[:1], dtype) if part.bias is None else part.bias
            for part in parts
        ]
    )
