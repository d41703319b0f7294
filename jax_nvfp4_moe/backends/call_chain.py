"""Emit several FFI calls of one platform as a single call, whose kernels may overlap.

`ops.chain_calls` decides which calls form a chain. ``ffi/call_chain.h`` describes the operands and
attributes that this module writes, and runs them.
"""

import dataclasses
import enum
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_nvfp4_moe.numerics.layouts import CANONICAL
from jax_nvfp4_moe.scheme import Backend, Capability, Device

# Values that only the chain reads begin at multiples of this number of bytes.
_ALIGNMENT = 256
# The numbers of XLA_FFI_DataType for the dtypes of all operands and results of our kernels.
DATA_TYPES = {
    "bool": 1,
    "int8": 2,
    "int32": 4,
    "uint8": 6,
    "uint32": 8,
    "float16": 10,
    "float32": 11,
    "bfloat16": 16,
    "float8_e4m3fn": 20,
}


class _Place(enum.IntEnum):
    """Where a buffer of a call lies: `BufferPlace` in ``ffi/call_chain.h``."""

    OPERAND = 0
    RESULT = 1
    SCRATCH = 2


@dataclasses.dataclass(eq=False)
class Value:
    """An array that exists, or that a call will write. Two values are equal if they are identical.

    Attributes:
      shape: its shape.
      dtype: its dtype.
      array: the array; None until it exists.
    """

    shape: tuple[int, ...]
    dtype: Any
    array: Any = None

    @property
    def nbytes(self) -> int:
        """Return the size in bytes."""
        return math.prod(self.shape) * jnp.dtype(self.dtype).itemsize


@dataclasses.dataclass(frozen=True)
class Call:
    """An FFI call of a chain.

    Attributes:
      target: name of the FFI target.
      attributes: its attributes.
      operands: its operands, each with the shape in which the call reads it.
      results: its results.
      aliases: index of an operand -> index of the result that takes its memory.
    """

    target: str
    attributes: Mapping[str, Any]
    operands: Sequence[tuple[Value, tuple[int, ...]]]
    results: Sequence[Value]
    aliases: Mapping[int, int]


def emit_chain(ffi_target: str, calls: Sequence[Call], wanted: Sequence[Value]) -> None:
    """Emit `calls` as one FFI call, and set the arrays of the results that are read after it.

    An operand must exist, or be the result of an earlier call. An operand whose memory a result
    takes must exist, and no later call may read it.

    Args:
      ffi_target: the target that runs a chain.
      calls: the calls in their order.
      wanted: results of the calls whose arrays are needed.
    """
    produced = {value for call in calls for value in call.results}
    operands = [value for call in calls for value, _ in call.operands if value not in produced]
    operands = list(dict.fromkeys(operands))
    aliases, written = {}, []
    for call in calls:
        for operand, result in call.aliases.items():
            written.append(call.results[result])
            aliases[operands.index(call.operands[operand][0])] = call.results[result]
    results = list(dict.fromkeys([*wanted, *written]))
    offsets, size = _place_scratch(calls, set(results))
    places = {value: (_Place.OPERAND, index) for index, value in enumerate(operands)}
    places |= {value: (_Place.RESULT, index) for index, value in enumerate(results)}
    places |= {value: (_Place.SCRATCH, offset) for value, offset in offsets.items()}
    shapes = [jax.ShapeDtypeStruct(value.shape, value.dtype) for value in results]
    emit = jax.ffi.ffi_call(
        ffi_target,
        [*shapes, jax.ShapeDtypeStruct((size,), jnp.uint8)],
        input_output_aliases={operand: results.index(own) for operand, own in aliases.items()},
        vmap_method="sequential",
    )
    arrays = emit(*(value.array for value in operands), **_attributes(calls, places))
    for value, array in zip(results, arrays[:-1], strict=True):
        value.array = array


def _place_scratch(calls, kept):
    """Return the offsets of all results that are not in `kept`, and the bytes that they take.

    Two values share memory if no call needs both: a value is needed from the call that writes it
    to the last call that reads it.
    """
    last = {}
    for index, call in enumerate(calls):
        last |= dict.fromkeys(call.results, index)
        last |= {value: index for value, _ in call.operands}
    offsets, size, live = {}, 0, []
    for index, call in enumerate(calls):
        live = [value for value in live if last[value] >= index]
        for value in call.results:
            if value in kept:
                continue
            offsets[value] = _first_gap(value.nbytes, [(offsets[v], v.nbytes) for v in live])
            size = max(size, offsets[value] + value.nbytes)
            live.append(value)
    return offsets, size


def _first_gap(nbytes, taken):
    """Return the lowest aligned offset with room for `nbytes` between pairs (offset, bytes)."""
    offset = 0
    for start, length in sorted(taken):
        if offset + nbytes <= start:
            break
        offset = max(offset, -(-(start + length) // _ALIGNMENT) * _ALIGNMENT)
    return offset


def _attributes(calls, places):
    """Return the attributes of the chain. Their names, in sorted order, follow the calls."""
    attributes = {}
    for index, call in enumerate(calls):
        numbers = [len(call.operands), len(call.results)]
        buffers = [*call.operands, *((value, value.shape) for value in call.results)]
        for value, shape in buffers:
            code = DATA_TYPES[jnp.dtype(value.dtype).name]
            numbers += [*places[value], code, len(shape), *shape]
        name = f"call_{index:06d}"
        attributes[f"{name}_attributes"] = dict(call.attributes)
        attributes[f"{name}_buffers"] = np.array(numbers, np.int64)
        attributes[f"{name}_target"] = call.target
    return attributes


def _record(platform, extension, devices):
    """Return the record of the target that runs chains on a platform."""
    ffi_target = f"nvfp4_call_chain_{platform}"
    return Backend(
        name=f"call_chain_{platform}",
        can=Capability(
            ops=frozenset({"chain_calls"}),
            devices=devices,
            platform=platform,
            extension=extension,
        ),
        layout=CANONICAL,
        lower={"chain_calls": emit_chain},
        status="executed",
        ffi_targets=(ffi_target,),
    )


CALL_CHAIN_CPU = _record("cpu", "_nvfp4_cpu", (Device(frozenset({None})),))
CALL_CHAIN_CUDA = _record("cuda", "_nvfp4_cuda", (Device(frozenset({None}), (8, 0), (13, 0)),))
