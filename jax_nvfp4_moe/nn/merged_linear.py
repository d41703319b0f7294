"""MergedLinear: several linear layers that read the same input, computed as one GEMM."""

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from jax_nvfp4_moe.nn.dense import DenseLinear
from jax_nvfp4_moe.nn.intermediates import record


class MergedLinear(nnx.Module):
    """Several linear layers that read the same input.

    ``y = concatenate([first(x), second(x), ...], axis=-1)``

    If no layer is quantized, their weights are joined and one GEMM computes all results. Decoding
    one token is bound by reading weights, and one large read is faster than several small ones.

    Attributes:
      joined: `DenseLinear` with the rows of all layers, or None if a layer is quantized. In that
        case each layer is an attribute under its own name.
      names: static tuple of the names of the layers, in the order of their rows.
    """

    def __init__(self, **linears):
        """Join the layers, which are passed by name in the order of their rows."""
        self.names = tuple(linears)
        self.joined = _join(tuple(linears.values()))
        for name, part in linears.items() if self.joined is None else ():
            setattr(self, name, part)

    def __call__(self, x: Float[Array, "... k"]) -> Float[Array, "... n"]:
        """Return the results of all layers, concatenated along the last axis."""
        record(self, x)
        if self.joined is not None:
            return self.joined(x)
        return jnp.concatenate([getattr(self, name)(x) for name in self.names], axis=-1)


def _join(linears) -> DenseLinear | None:
    """Return one layer with the rows of all `linears`, or None if one of them is quantized."""
    if not all(isinstance(part, DenseLinear) for part in linears):
        return None
    biases = [part.bias for part in linears]
    bias = None
    if any(one is not None for one in biases):
        rows = [part.weight.get_value().shape[:1] for part in linears]
        bias = jnp.concatenate(
            [
                jnp.zeros(shape, linears[0].dtype) if one is None else one.get_value()
                for one, shape in zip(biases, rows, strict=True)
            ]
        )
    weight = jnp.concatenate([part.weight.get_value() for part in linears])
    return DenseLinear(weight, bias, dtype=linears[0].dtype)
