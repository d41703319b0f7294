"""Run calls of FFI targets on the emulated device: one by one, or as a chain that fuses them."""

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from support.emulation.cuda_emulation import Device, emulate

_FUSE = 8  # kFuseFlag of ffi/call_chain.h
# Numbers of XLA_FFI_DataType.
_CODES = {
    "int32": 4,
    "uint8": 6,
    "float16": 10,
    "float32": 11,
    "bfloat16": 16,
    "float8_e4m3fn": 20,
}


@dataclasses.dataclass(frozen=True)
class Result:
    """A result of an earlier call of the chain, as an operand, in a shape of its own if given."""

    call: int
    index: int
    shape: tuple[int, ...] | None = None


@dataclasses.dataclass(frozen=True)
class Call:
    """A call of an FFI target.

    Attributes:
      target: its name.
      operands: arrays and results of earlier calls.
      results: shape and dtype of each result.
      attributes: those of the target.
      in_place: index of an operand, which is an array -> that of the result in its memory.
    """

    target: str
    operands: Sequence[Any]
    results: Sequence[tuple[tuple[int, ...], Any]]
    attributes: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    in_place: Mapping[int, int] = dataclasses.field(default_factory=dict)

    def behind(self, count: int) -> "Call":
        """Return this call in a chain with `count` calls ahead of it."""
        operands = [
            dataclasses.replace(x, call=x.call + count) if isinstance(x, Result) else x
            for x in self.operands
        ]
        return dataclasses.replace(self, operands=operands)

    @property
    def likes(self):
        return [jax.ShapeDtypeStruct(*result) for result in self.results]


def run_apart(library, calls: Sequence[Call], device: Device):
    """Run each call by itself. Return the results of each one, and the number of all launches."""
    found, launches = [], 0
    for call in calls:
        operands = [_find(x, found) if isinstance(x, Result) else x for x in call.operands]

        def run(*operands, call=call):
            own = jax.ffi.ffi_call(
                call.target, call.likes, input_output_aliases=dict(call.in_place)
            )
            return own(*operands, **call.attributes)

        found.append(emulate(library, run, *operands, device=device))
        launches += library.launch_count()
    return found, launches


def _find(result, found):
    """Return a result, in the shape in which it is read."""
    array = found[result.call][result.index]
    return array if result.shape is None else array.reshape(result.shape)


def run_chain(library, calls: Sequence[Call], fused: int, device: Device):
    """Run the calls as a chain, in which call `fused` is fused into the next one.

    Returns:
      As `run_apart`.
    """
    arrays: dict[
        int, Any
    ] = {}  # an array is one operand of the chain, also if several calls read it
    for call in calls:
        arrays |= {id(x): x for x in call.operands if not isinstance(x, Result)}
    places = list(arrays)
    likes = [like for call in calls for like in call.likes]
    starts = np.cumsum([0, *(len(call.results) for call in calls)])
    aliases, attributes = {}, {}
    for number, call in enumerate(calls):
        flags = _FUSE if number == fused else 0
        numbers = [len(call.operands), len(call.results), flags]
        for index, x in enumerate(call.operands):
            if isinstance(x, Result):
                at = int(starts[x.call]) + x.index
                shape = x.shape or likes[at].shape
                numbers += _describe(1, at, jax.ShapeDtypeStruct(shape, likes[at].dtype))
                continue
            place = places.index(id(x))
            numbers += _describe(0, place, x)
            if index in call.in_place:
                aliases[place] = int(starts[number]) + call.in_place[index]
        for index, like in enumerate(call.likes):
            numbers += _describe(1, int(starts[number]) + index, like)
        attributes[f"call_{number}_attributes"] = dict(call.attributes)
        attributes[f"call_{number}_buffers"] = np.array(numbers, np.int64)
        attributes[f"call_{number}_target"] = call.target

    def run(*arrays):
        scratch = jax.ShapeDtypeStruct((0,), np.uint8)
        own = jax.ffi.ffi_call(
            "nvfp4_call_chain_cuda", [*likes, scratch], input_output_aliases=aliases
        )
        return own(*arrays, **attributes)

    results = emulate(library, run, *arrays.values(), device=device)
    found = [results[start:end] for start, end in itertools.pairwise(starts)]
    return found, library.launch_count()


def _describe(place, index, array):
    """Return the numbers of a buffer in an operand (place 0) or in a result (1) of the chain."""
    return [place, index, _CODES[np.dtype(array.dtype).name], array.ndim, *array.shape]
