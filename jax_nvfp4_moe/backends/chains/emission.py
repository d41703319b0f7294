"""Emit the calls of a chain as a single FFI call."""

import enum
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from jax_nvfp4_moe.backends.chains.calls import Call, Value
from jax_nvfp4_moe.backends.chains.forks import find_forks
from jax_nvfp4_moe.backends.chains.fusion import find_fused
from jax_nvfp4_moe.backends.record import CPU, CUDA, Backend, Kernel
from jax_nvfp4_moe.numerics.varying import vary_like, vary_together

# The target that runs chains on GPUs. Their calls may run in parallel.
_CUDA = "nvfp4_call_chain_cuda"


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


class _Flag(enum.IntFlag):
    """What a call has to do with forks and with the next call: `CallFlag` in the same file."""

    SCOPE = 1  # the first call of a scope
    FORK = 2  # a call of a fork
    JOIN = 4  # the call after a fork
    FUSE = 8  # a call that is fused into the next one


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
    fused = find_fused(calls, wanted)
    forks = find_forks(calls, fused) if ffi_target == _CUDA else []
    offsets, size = _place_scratch(calls, set(results), forks, fused)
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
    attributes = _attributes(calls, places, _flags(len(calls), forks, fused))
    given = vary_together([_in_shape_of(value, aliases.get(i)) for i, value in enumerate(operands)])
    arrays = vary_like(emit(*given, **attributes), given)
    for value, array in zip(results, arrays[:-1], strict=True):
        value.array = array


def _in_shape_of(operand, result):
    """Return the array of an operand, in the shape of the result that takes its memory, if any."""
    array = operand.array
    return array if result is None else jax.lax.reshape(array, result.shape)


def _place_scratch(calls, kept, forks=(), fused=()):
    """Return the offsets of all results that are not in `kept`, and the bytes that they take.

    Two values share memory if no call needs both: a value is needed from the call that writes it
    to the last call that reads it. The calls of a fork and of its scope run in any order, so
    that what one of them needs is needed until the last one has ended. What a fused call
    needs, the next call needs.
    """
    last = {}

    def use(call, index):
        last.update(dict.fromkeys(call.results, index))
        last.update({value: index for value, _ in call.operands})

    ends = {i: fork.join - 1 for fork in forks for i in range(fork.start, fork.join)}
    for index, call in enumerate(calls):
        use(call, ends.get(index, index + 1 if index in fused else index))
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


def _attributes(calls, places, flags):
    """Return the attributes of the chain. Their names, in sorted order, follow the calls."""
    attributes = {}
    for index, call in enumerate(calls):
        numbers = [len(call.operands), len(call.results), int(flags[index])]
        buffers = [*call.operands, *((value, value.shape) for value in call.results)]
        for value, shape in buffers:
            code = DATA_TYPES[jnp.dtype(value.dtype).name]
            numbers += [*places[value], code, len(shape), *shape]
        name = f"call_{index:06d}"
        attributes[f"{name}_attributes"] = dict(call.attributes)
        attributes[f"{name}_buffers"] = np.array(numbers, np.int64)
        attributes[f"{name}_target"] = call.target
    return attributes


def _flags(count, forks, fused):
    """Return the flags of `count` calls."""
    flags = [_Flag.FUSE if index in fused else _Flag(0) for index in range(count)]
    for fork in forks:
        flags[fork.start] |= _Flag.SCOPE
        flags[fork.join] |= _Flag.JOIN
        for index in range(fork.begin, fork.join):
            flags[index] |= _Flag.FORK
    return flags


# The targets that run chains.
CALL_CHAIN_CPU = Backend(
    "call_chain_cpu", {"chain_calls": Kernel(emit_chain, "nvfp4_call_chain_cpu")}, (CPU,)
)
CALL_CHAIN_CUDA = Backend("call_chain_cuda", {"chain_calls": Kernel(emit_chain, _CUDA)}, (CUDA,))


BACKENDS = (CALL_CHAIN_CPU, CALL_CHAIN_CUDA)
