"""Call a kernel through XLA's FFI, unless its tokens have no rows."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp


def kernel_call(
    ffi_target: str,
    results: jax.ShapeDtypeStruct | Sequence[jax.ShapeDtypeStruct],
    *,
    input_output_aliases: Mapping[int, int] | None = None,
) -> Callable[..., Any]:
    """Return a function that calls an FFI target with operands and attributes.

    The first operand of every kernel has the rows that the kernel works on. If it has no elements,
    the function calls nothing: a result that shares its memory with an operand is that operand, and
    every other result is zeros. No kernel thus needs a grid or a workspace for no rows.

    Args:
      ffi_target: name under which the extension registers the target.
      results: shape and dtype of the result, or of each of several results.
      input_output_aliases: index of an operand -> index of the result that takes its memory; None
        (default) for none.

    Returns:
      A function of arrays, and of attributes by name, with what `jax.ffi.ffi_call` returns.
    """
    aliases = dict(input_output_aliases or {})
    call = jax.ffi.ffi_call(
        ffi_target, results, input_output_aliases=aliases, vmap_method="sequential"
    )

    def run(*operands, **attributes):
        if 0 not in operands[0].shape:
            return call(*operands, **attributes)
        kept = {result: operands[operand] for operand, result in aliases.items()}
        if isinstance(results, jax.ShapeDtypeStruct):
            return kept.get(0, _zeros(results))
        return [kept[i] if i in kept else _zeros(one) for i, one in enumerate(results)]

    return run


def _zeros(result):
    return jnp.zeros(result.shape, result.dtype)
