"""Emit several FFI calls of one platform as a single call, whose kernels may overlap.

`ops.chain_calls` decides which calls form a chain. ``ffi/call_chain.h`` describes the operands and
attributes that this module writes, and runs them.
"""

import collections
import dataclasses
import enum
import heapq
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_nvfp4_moe.numerics.layouts import CANONICAL
from jax_nvfp4_moe.numerics.varying import vary_like, vary_together
from jax_nvfp4_moe.scheme import Backend, Capability, Device

# The target that runs chains on GPUs. Their calls may run beside each other.
_CUDA = "nvfp4_call_chain_cuda"
# A product with this many outputs has four output tiles or more, of up to 256 outputs. About a
# quarter of its blocks then shares a tile at most.
_MANY_OUTPUTS = 1024
# With at most this many inputs, output tiles are not shared: see kWorthSplitting in
# ``ffi/cuda/scheduling/plan_schedule.cuh``.
_FEW_INPUTS = 512
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
    """What a call has to do with branches and with the next call: `CallFlag` in the same file."""

    FORK = 1
    BRANCH = 2
    JOIN = 4
    DEFER = 8


@dataclasses.dataclass(frozen=True)
class _Deferral:
    """When a call leaves its work to the next one.

    Attributes:
      targets: FFI targets that the next call may have.
      operands: index of an operand of the next call -> index of the result that it must be.
      axis: axis of the first of these results.
      lengths: the lengths that this axis may have.
      unwritten: index of a result that no kernel writes then; None if all are written.
    """

    targets: frozenset[str]
    operands: Mapping[int, int]
    axis: int
    lengths: range
    unwritten: int | None = None


_ONE = range(1, 2)
_SEVERAL = range(2, 1 << 31)
_ANY = range(1, 1 << 31)

# FFI target -> when a call of it leaves its work to the next call. The handlers of both calls in
# ``ffi/cuda_*_bindings.cc`` pass it on.
_DEFERRALS = {
    # Each block of a linear layer computes the norm of its one row.
    "nvfp4_add_rms_norm_cuda": _Deferral(
        frozenset(
            {
                "nvfp4_dense_few_cuda",
                "nvfp4_grouped_gemm_w4a16_sm80",
                "nvfp4_grouped_gemm_w4a16_sm90",
            }
        ),
        {0: 1},
        axis=0,
        lengths=_ONE,
    ),
    # Attention prepares the heads of one new token.
    "nvfp4_prepare_heads_cuda": _Deferral(
        frozenset({"nvfp4_attention_cuda"}),
        {0: 0, 1: 1, 2: 2},
        axis=1,
        lengths=_ONE,
        unwritten=0,
    ),
    # A norm computes the sum over the experts of each token that it adds. With one token, the
    # experts leave nothing: their second product computes the sum.
    **dict.fromkeys(
        ("nvfp4_moe_w4a16_sm80", "nvfp4_moe_w4a16_sm90"),
        _Deferral(
            frozenset({"nvfp4_add_rms_norm_cuda"}), {1: 0}, axis=0, lengths=_SEVERAL, unwritten=0
        ),
    ),
    # A norm adds shared experts to the routed ones.
    **dict.fromkeys(
        ("nvfp4_add_gated_cuda", "nvfp4_add_linear_gated_cuda"),
        _Deferral(
            frozenset({"nvfp4_add_rms_norm_cuda"}), {1: 0}, axis=0, lengths=_ANY, unwritten=0
        ),
    ),
}


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


@dataclasses.dataclass(frozen=True)
class Branch:
    """Successive calls of a chain that run beside the calls ahead of them, the window.

    Attributes:
      fork: index of the first call of the window. The branch starts when all calls before this one
        have ended.
      begin: index of the first call of the branch. The window ends before it.
      join: index of the call after the branch. It waits for the window and for the branch.
    """

    fork: int
    begin: int
    join: int

    @property
    def saving(self) -> int:
        """Return how many calls run beside others."""
        return min(self.begin - self.fork, self.join - self.begin)

    @property
    def size(self) -> int:
        """Return the number of calls of the branch and its window."""
        return self.join - self.fork


def find_deferred(calls: Sequence[Call], wanted: Sequence[Value]) -> frozenset[int]:
    """Find the calls of a chain that leave their work to the next call.

    A call that leaves its own work gets none from the call before it.

    Args:
      calls: the calls in their order.
      wanted: results that are read after the chain.

    Returns:
      Their indices.
    """
    deferred, readers = set(), collections.Counter(wanted)
    readers.update(value for call in calls for value in {value for value, _ in call.operands})
    for index in reversed(range(len(calls) - 1)):
        call, following = calls[index : index + 2]
        rule = _DEFERRALS.get(call.target)
        if rule is None or following.target not in rule.targets or index + 1 in deferred:
            continue
        read = [following.operands[operand][0] for operand in rule.operands]
        written = [call.results[result] for result in rule.operands.values()]
        is_private = rule.unwritten is None or readers[call.results[rule.unwritten]] == 1
        if read == written and written[0].shape[rule.axis] in rule.lengths and is_private:
            deferred.add(index)
    return frozenset(deferred)


def find_branches(calls: Sequence[Call], deferred: frozenset[int] = frozenset()) -> list[Branch]:
    """Find the calls of a chain that may run beside others.

    Shared experts are the first example. They read the result of a norm, as the router does, and
    the next call that reads their result is a sum with the result of the routed experts.

    A branch and its window have at least two calls each: a shorter branch saves less than a fork
    and a join cost. Calls with aliases are in neither, because they write to memory that other
    calls may read. A call of the branch reads nothing that the window writes.

    Args:
      calls: the calls in their order.
      deferred: indices of calls that leave their work to the next one. No branch or window begins
        or ends between the two.

    Returns:
      Branches that do not overlap, in their order. Together they save the largest number of calls,
      and among such branches they have the largest number of calls.
    """
    writers = {value: index for index, call in enumerate(calls) for value in call.results}
    reads = [{writers[v] for v, _ in call.operands if v in writers} for call in calls]
    # The best branches of the calls before an index, after what they save and their size.
    best: list[tuple[tuple[int, int], tuple[Branch, ...]]] = [((0, 0), ())]
    for join in range(1, len(calls)):
        most, chosen = best[-1]
        for branch in _branches_before(join, calls, reads, deferred):
            (saving, size), others = best[branch.fork]
            found = saving + branch.saving, size + branch.size
            if found > most:
                most, chosen = found, (*others, branch)
        best.append((most, chosen))
    return list(best[-1][1])


def _branches_before(join, calls, reads, deferred):
    """Yield all branches that end before call `join`, with their longest windows.

    Args:
      join: index of a call.
      calls: the calls.
      reads: for each call, the indices of the calls whose results it reads.
      deferred: as in `find_branches`.
    """
    if join - 1 in deferred:
        return
    outside: list[int] = []  # what the branch reads, as a heap of negative indices
    for begin in range(join - 1, 1, -1):
        if calls[begin].aliases:
            return
        for index in reads[begin]:
            heapq.heappush(outside, -index)
        while outside and -outside[0] >= begin:
            heapq.heappop(outside)
        fork = 1 - outside[0] if outside else 0
        aliases = (i + 1 for i in range(begin - 1, fork - 1, -1) if calls[i].aliases)
        fork = next(aliases, fork)
        if begin - 1 in deferred:
            continue
        branch = Branch(fork + 1 if fork - 1 in deferred else fork, begin, join)
        is_read = any(index >= begin for index in reads[join])
        if branch.saving >= 2 and is_read and not _may_block(calls, branch):
            yield branch


def _may_block(calls, branch):
    """Return whether blocks of two kernels could occupy a GPU and wait for others, for ever.

    Blocks of an expert product may wait for later blocks of the same kernel, which compute parts of
    the same output tile (``ffi/cuda/scheduling/partial_sums.cuh``). A kernel alone has room for all
    its blocks. Two kernels beside each other have not, but the blocks of one output tile find room
    if no product has few tiles, each of which many blocks share.
    """
    sides = calls[branch.fork : branch.begin], calls[branch.begin : branch.join]
    products = [[p for call in side for p in _expert_products(call)] for side in sides]
    few_tiles = any(n < _MANY_OUTPUTS and k > _FEW_INPUTS for side in products for n, k in side)
    return all(products) and few_tiles


def _expert_products(call):
    """Return the outputs and inputs of the products whose blocks may wait for each other.

    The experts of a token have outputs of their own.
    """
    shapes = [shape for _, shape in call.operands]
    if call.target.startswith("nvfp4_grouped_gemm_"):
        return [(call.results[0].shape[-1], shapes[0][-1])]
    if call.target.startswith("nvfp4_moe_"):
        hidden, gate_up, top_k = shapes[0][-1], shapes[1][1], shapes[11][-1]
        return [(top_k * gate_up, hidden), (top_k * hidden, int(call.attributes["intermediate"]))]
    return []


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
    deferred = find_deferred(calls, wanted)
    branches = find_branches(calls, deferred) if ffi_target == _CUDA else []
    offsets, size = _place_scratch(calls, set(results), branches, deferred)
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
    attributes = _attributes(calls, places, _flags(len(calls), branches, deferred))
    given = vary_together([value.array for value in operands])
    arrays = vary_like(emit(*given, **attributes), given)
    for value, array in zip(results, arrays[:-1], strict=True):
        value.array = array


def _place_scratch(calls, kept, branches=(), deferred=()):
    """Return the offsets of all results that are not in `kept`, and the bytes that they take.

    Two values share memory if no call needs both: a value is needed from the call that writes it
    to the last call that reads it. The calls of a branch and of its window run in any order, so
    that what one of them needs is needed until the last one has ended. What a call needs that
    leaves its work to the next one, that next one needs.
    """
    last = {}

    def use(call, index):
        last.update(dict.fromkeys(call.results, index))
        last.update({value: index for value, _ in call.operands})

    ends = {i: branch.join - 1 for branch in branches for i in range(branch.fork, branch.join)}
    for index, call in enumerate(calls):
        use(call, ends.get(index, index + 1 if index in deferred else index))
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


def _flags(count, branches, deferred):
    """Return the flags of `count` calls."""
    flags = [_Flag.DEFER if index in deferred else _Flag(0) for index in range(count)]
    for branch in branches:
        flags[branch.fork] |= _Flag.FORK
        flags[branch.join] |= _Flag.JOIN
        for index in range(branch.begin, branch.join):
            flags[index] |= _Flag.BRANCH
    return flags


def _record(platform, ffi_target, extension, devices):
    """Return the record of the target that runs chains on a platform."""
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


CALL_CHAIN_CPU = _record("cpu", "nvfp4_call_chain_cpu", "_nvfp4_cpu", (Device(frozenset({None})),))
CALL_CHAIN_CUDA = _record(
    "cuda", _CUDA, "_nvfp4_cuda", (Device(frozenset({None}), (8, 0), (13, 0)),)
)
