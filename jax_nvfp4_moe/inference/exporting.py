"""Export programs that call the kernels of this package with `jax.export`.

An exported program contains the names of its kernels, not the kernels themselves. `export_checks`
tells `jax.export` that the kernels may be exported. `load_exported` registers them in the process
that runs the program::

  exported = jax.export.export(jax.jit(step), disabled_checks=nvfp4.export_checks())(*arguments)
  path.write_bytes(exported.serialize())           # needs the package flatbuffers
  ...
  step = nvfp4.load_exported(path.read_bytes())    # in another process
  y = step.call(*arguments)

Arguments may contain `NVFP4Tensor`, `MoEParams`, `DenseExperts`, `FP8Tensor` and the `Cache` of a
model. An `nnx.State` cannot be serialized; pass ``jax.tree.leaves(state)`` instead. A function that
calls `generate` can be exported too, and may return a `GenerationStats`.
"""

import json
import re

import jax
import jax.export

from jax_nvfp4_moe.backends import _ffi
from jax_nvfp4_moe.inference.generation import GenerationStats
from jax_nvfp4_moe.models.decoder import Cache
from jax_nvfp4_moe.numerics.fp8 import FP8Tensor
from jax_nvfp4_moe.numerics.tensor import DenseExperts, MoEParams, NVFP4Tensor
from jax_nvfp4_moe.ops.records import RECORDS
from jax_nvfp4_moe.scheme import NoBackendError

# A custom call of XLA itself, which sets the memory layout of a model's cache. `jax.export` does
# not list it among the calls that are safe to export.
_OF_XLA = ("LayoutConstraint",)


def _extensions() -> dict[str, str]:
    """Return each FFI target -> the compiled extension, or part of one, that contains it."""
    return {target: backend.extension for backend in RECORDS for target in backend.ffi_targets}


def export_checks() -> list[jax.export.DisabledSafetyCheck]:
    """Return the value of `disabled_checks` with which `jax.export.export` accepts our kernels.

    The checks exist because a custom call may not exist, or may differ, where a program is loaded.
    Load a program with the same version of this package that exported it. Other versions may expect
    the operands of a kernel in another order.

    Returns:
      A list of `jax.export.DisabledSafetyCheck`, one for each kernel, and one for the call with
      which XLA constrains the memory layout of a cache.

    Example:
      >>> import jax
      >>> import jax.numpy as jnp
      >>> import jax_nvfp4_moe as nvfp4
      >>> weight = nvfp4.quantize(jnp.ones((32, 64)))
      >>> x = jnp.ones((5, 64), jnp.bfloat16)
      >>> export = jax.export.export(
      ...     jax.jit(nvfp4.ops.linear), disabled_checks=nvfp4.export_checks()
      ... )
      >>> export(x, weight).out_avals[0].shape
      (5, 32)

    Source: https://docs.jax.dev/en/latest/export/export.html.
    """
    names = (*sorted(_extensions()), *_OF_XLA)
    return [jax.export.DisabledSafetyCheck.custom_call(name) for name in names]


def load_exported(serialized: bytes | bytearray) -> jax.export.Exported:
    """Load an exported program, and register the kernels that it calls.

    Args:
      serialized: bytes that ``Exported.serialize`` returned.

    Returns:
      A `jax.export.Exported`; its method `call` runs the program.

    Raises:
      NoBackendError: this installation lacks kernels that the program calls; lists all of them.
      TypeError: `serialized` is not bytes.
      ValueError: `serialized` is no exported program.
      ImportError: flatbuffers is not installed; the extra "export" installs it.

    Example:
      >>> import jax
      >>> import jax.numpy as jnp
      >>> import jax_nvfp4_moe as nvfp4
      >>> weight = nvfp4.quantize(jnp.ones((32, 64)))
      >>> x = jnp.ones((5, 64), jnp.bfloat16)
      >>> export = jax.export.export(
      ...     jax.jit(nvfp4.ops.linear), disabled_checks=nvfp4.export_checks()
      ... )
      >>> program = export(x, weight).serialize()
      >>> nvfp4.load_exported(program).call(x, weight).shape
      (5, 32)

    Source: https://docs.jax.dev/en/latest/export/export.html.
    """
    if not isinstance(serialized, bytes | bytearray):
        raise TypeError(f"serialized: expected bytes, got {type(serialized).__name__}")
    try:
        exported = jax.export.deserialize(bytearray(serialized))
    except (ImportError, MemoryError):
        raise
    except Exception as error:  # flatbuffers has no class of its own for bytes of another kind
        raise ValueError(
            f"serialized: expected the bytes of a program that `jax.export` wrote, got "
            f"{len(serialized)} other bytes ({error})"
        ) from None
    called = set(re.findall(rb"nvfp4_\w+", exported.mlir_module_serialized))
    needed = {name: part for name, part in _extensions().items() if name.encode() in called}
    reasons = dict(_ffi.missing(tuple(sorted(set(needed.values())))))
    problems = [f"{name}: {reasons[part]}" for name, part in needed.items() if part in reasons]
    if problems:
        raise NoBackendError(
            "the exported program calls kernels that this installation lacks:\n"
            + "\n".join(problems)
        )
    return exported


def _serialize_static(static) -> bytes:
    """Return the static fields of a pytree as JSON."""
    return json.dumps(list(static)).encode()


def _read_static(serialized) -> tuple:
    """Return the static fields of a pytree from JSON."""
    return tuple(json.loads(bytes(serialized)))


# `jax.export` can serialize only pytree classes that are registered here.
for _node in (NVFP4Tensor, MoEParams, DenseExperts, FP8Tensor, Cache, GenerationStats):
    jax.export.register_pytree_node_serialization(
        _node,
        serialized_name=f"jax_nvfp4_moe.{_node.__name__}",
        serialize_auxdata=_serialize_static,
        deserialize_auxdata=_read_static,
    )
