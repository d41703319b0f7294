"""Call a kernel through XLA's FFI, unless its tokens have no rows."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jax_nvfp4_moe.numerics.varying import vary_like, vary_together


def kernel_call(
    ffi_target: str,
    results: Any,
    *,
    input_output_aliases: Mapping[int, int] | None = None,
) -> Callable[..., Any]:
    """Return a function that calls an FFI target with operands and attributes.

    The first operand of every kernel has the rows that the kernel works on. If it has no elements,
    the function calls nothing: a result that shares its memory with an operand is that operand, and
    every other result is zeros. No kernel thus needs a grid or a workspace for no rows.

    Args:
      ffi_target: name under which the extension registers the target.
      results: something with the shape and dtype of the result, or a sequence for several results.
      input_output_aliases: index of an operand -> index of the result that takes its memory; None
        (default) for none.

    Returns:
      A function of arrays, and of attributes by name, that returns the result, or a tuple. Inside
      `jax.shard_map`, the results vary along the mesh axes along which any operand varies. The call
      of JAX gives results that do not vary, and their gradients would be wrong.
    """
    aliases = dict(input_output_aliases or {})
    is_single = not isinstance(results, Sequence)
    several = [results] if is_single else results
    shapes = tuple(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in several)
    call = jax.ffi.ffi_call(
        ffi_target,
        shapes[0] if is_single else shapes,
        input_output_aliases=aliases,
        vmap_method="sequential",
    )

    def run(*operands, **attributes):
        operands = vary_together(operands)
        return vary_like(emit(operands, attributes), operands)

    def emit(operands, attributes):
        if 0 not in operands[0].shape:
            return call(*operands, **attributes)
        kept = {result: operands[operand] for operand, result in aliases.items()}
        found = tuple(
            kept[i] if i in kept else jnp.zeros(x.shape, x.dtype) for i, x in enumerate(shapes)
        )
        return found[0] if is_single else found

    return run


def scratch(size: int) -> jax.ShapeDtypeStruct:
    """Return the result of a kernel that is `size` bytes of scratch memory."""
    return jax.ShapeDtypeStruct((size,), jnp.uint8)
