"""MergedLinear: linears that read the same input."""

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from jax_nvfp4_moe.nn.dense import DenseLinear
from jax_nvfp4_moe.nn.intermediates import record


class MergedLinear(nnx.Module):
    """Linears that read the same input: one product, where none of them is quantized.

    ``y[..., n1 + n2] = concatenate([first(x), second(x)])``. While decoding, a product of one token
    is bound by reading its weights: one large read is faster than some small ones.

    Attributes:
      joined: `DenseLinear` of all rows, or None where a linear is quantized. Then each linear is an
        attribute under its own name.
      names: static; of the linears, in the order of their rows.
    """

    def __init__(self, **linears):
        """Join `linears`."""
        self.names = tuple(linears)
        self.joined = _join(tuple(linears.values()))
        for name, part in linears.items() if self.joined is None else ():
            setattr(self, name, part)

    def __call__(self, x: Float[Array, "... k"]) -> Float[Array, "... n"]:
        """Return the results of all linears, one behind the other."""
        record(self, x)
        if self.joined is not None:
            return self.joined(x)
        return jnp.concatenate([getattr(self, name)(x) for name in self.names], axis=-1)


def _join(linears) -> DenseLinear | None:
    """Return one linear of all rows, or None."""
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
