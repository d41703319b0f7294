"""What kernels and Python must agree on: sizes that kernels take, and bytes of memory.

C++ states each of these facts once, in headers that kernels and handlers include. The CPU
extension exports them (``ffi/launch_facts.cc``). Every build has that extension, so that programs
can be lowered for a GPU without the CUDA extension.
"""

import functools
import importlib
from typing import Any

from jax.core import min_dim

from jax_nvfp4_moe.backends._ffi import EXTENSIONS


@functools.cache
def _load() -> tuple[Any, str | None]:
    """Return the facts and None, or None and why they cannot be read."""
    _, remedy = EXTENSIONS["_nvfp4_cpu"]
    try:
        module = importlib.import_module("jax_nvfp4_moe._nvfp4_cpu")
    except ImportError as error:
        return None, f"the extension _nvfp4_cpu is not usable here ({error}): {remedy}"
    if not hasattr(module, "launch_facts"):
        return None, f"the extension _nvfp4_cpu was built from older sources: {remedy}"
    return module.launch_facts, None


def why_missing() -> str | None:
    """Return why there are no facts, without which no kernel can be called; None if there are."""
    return _load()[1]


def facts() -> Any:
    """Return the module of the facts, which has a constant or a function for each.

    Raises:
      ImportError: if `why_missing` returns a reason.
    """
    found, reason = _load()
    if found is None:
        raise ImportError(reason)
    return found


def workspace_bytes(ffi_target: str, *sizes: int) -> int:
    """Return the bytes of scratch memory that a call of an FFI target needs.

    Args:
      ffi_target: name of the target.
      *sizes: the sizes of the call, as the tables of ``ffi`` list them for the target.
    """
    return facts().WORKSPACE_BYTES[ffi_target](*sizes)


def workspace_bytes_of_rows(ffi_target: str, rows: Any, *sizes: int) -> Any:
    """Return the bytes of scratch memory of a call whose number of rows may be a symbol.

    Args:
      ffi_target: name of the target.
      rows: number of rows, or what the target counts instead, such as the tokens of a layer or the
        chunks of a recurrence. It may be a symbol of `jax.export.symbolic_shape`.
      *sizes: the other sizes of the call.
    """
    fixed, of_row, most_rows = facts().WORKSPACE_ROWS[ffi_target](*sizes)
    return fixed + of_row * (min_dim(rows, most_rows) if most_rows else rows)
