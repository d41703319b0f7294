"""Functions that refuse to be differentiated, instead of returning gradients of zero."""

import functools
from collections.abc import Callable

import jax
from jax.custom_derivatives import SymbolicZero, zero_from_primal


def not_differentiable(name: str, function: Callable) -> Callable:
    """Return `function`, which raises an error if it is differentiated.

    Codes are integers, so JAX would take the derivative of a quantization for zero everywhere, and
    a gradient through it would silently be zero.

    Args:
      name: what the message calls the function.
      function: a function of arrays. Arguments may also be None.

    Raises:
      ValueError: when the result is differentiated with respect to one of its arguments. The
        message says how to write a straight-through gradient.
    """
    guarded = jax.custom_jvp(function)

    @functools.partial(guarded.defjvp, symbolic_zeros=True)
    def _refuse(primals, tangents):
        zeros = jax.tree.leaves(tangents, is_leaf=lambda one: isinstance(one, SymbolicZero))
        if not all(isinstance(one, SymbolicZero) for one in zeros):
            raise ValueError(
                f"{name} has no derivative, because codes are integers. For a straight-through "
                "gradient, which takes the rounding for the identity, write: frozen = "
                "jax.lax.stop_gradient(w); w = w + (nvfp4.quantize(frozen).dequantize(w.dtype) - "
                "frozen). If the quantized weights are constants, quantize outside of the "
                "differentiated function, or quantize jax.lax.stop_gradient(w)"
            )
        result = guarded(*primals)
        return result, jax.tree.map(
            lambda leaf: zero_from_primal(leaf, symbolic_zeros=True), result
        )

    return guarded
