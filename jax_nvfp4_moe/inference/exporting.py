"""`jax.export` of programs that call this package's kernels.

An exported program names its kernels and holds none of them. `jax.export` must be told that they
are trusted, and the process that runs it again must have them registered::

  exported = jax.export.export(jax.jit(step), disabled_checks=nvfp4.export_checks())(*arguments)
  path.write_bytes(exported.serialize())           # needs the package flatbuffers
  ...
  step = nvfp4.load_exported(path.read_bytes())    # in another process
  y = step.call(*arguments)

Arguments may hold `NVFP4Tensor`, `MoEParams`, `DenseExperts`, `FP8Tensor` and a model's `Cache`. Of
an `nnx.State` pass ``jax.tree.leaves(state)``: its own nodes have no serialized form.
"""

import json
import re

import jax
import jax.export

from jax_nvfp4_moe.backends import BACKENDS, _ffi
from jax_nvfp4_moe.models.decoder import Cache
from jax_nvfp4_moe.numerics.fp8 import FP8Tensor
from jax_nvfp4_moe.numerics.tensor import DenseExperts, MoEParams, NVFP4Tensor
from jax_nvfp4_moe.scheme import NoBackendError

# What XLA itself knows and `jax.export` does not list: the byte order of a model's cache.
_OF_XLA = ("LayoutConstraint",)


def _extensions() -> dict[str, str]:
    """Return FFI target -> what must be there to run it: an extension, or a part of one."""
    return {
        target: backend.can.extension or ""
        for backend in BACKENDS
        for target in backend.ffi_targets
    }


def export_checks() -> list[jax.export.DisabledSafetyCheck]:
    """Return the `disabled_checks` that `jax.export.export` needs: one for each kernel.

    They say that whoever runs the program has the same kernels. That is so for the version of this
    package that wrote it; others may order operands in another way.
    """
    names = (*sorted(_extensions()), *_OF_XLA)
    return [jax.export.DisabledSafetyCheck.custom_call(name) for name in names]


def load_exported(serialized: bytes | bytearray) -> jax.export.Exported:
    """Return an exported program, its kernels registered.

    Args:
      serialized: what ``Exported.serialize`` returned.

    Raises:
      NoBackendError: a kernel that the program calls is not in this installation; lists all.
      ImportError: flatbuffers is not installed.
    """
    exported = jax.export.deserialize(bytearray(serialized))
    called = set(re.findall(rb"nvfp4_\w+", exported.mlir_module_serialized))
    needed = {name: part for name, part in _extensions().items() if name.encode() in called}
    reasons = dict(_ffi.missing(tuple(sorted(set(needed.values())))))
    problems = [f"{name}: {reasons[part]}" for name, part in needed.items() if part in reasons]
    if problems:
        raise NoBackendError("the program calls kernels that are missing:\n" + "\n".join(problems))
    return exported


def _serialize_static(static) -> bytes:
    return json.dumps(list(static)).encode()


def _read_static(serialized) -> tuple:
    return tuple(json.loads(bytes(serialized)))


# So that `jax.export` can write the structure of arguments: static fields, as JSON.
for _node in (NVFP4Tensor, MoEParams, DenseExperts, FP8Tensor, Cache):
    jax.export.register_pytree_node_serialization(
        _node,
        serialized_name=f"jax_nvfp4_moe.{_node.__name__}",
        serialize_auxdata=_serialize_static,
        deserialize_auxdata=_read_static,
    )
