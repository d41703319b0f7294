"""Which calls of a chain are fused into the next call, whose kernel does the work of both."""

import collections
import dataclasses
from collections.abc import Mapping, Sequence

from jax_nvfp4_moe.backends.chains.calls import Call, Value


@dataclasses.dataclass(frozen=True)
class _Fusion:
    """When a call is fused into the next one.

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

# FFI target -> when a call of it is fused into the next call. The handlers of both calls in
# ``ffi/cuda_*_bindings.cc`` pass the work on.
_FUSIONS = {
    # Each block of a linear layer computes the norm of its one row.
    "nvfp4_add_rms_norm_cuda": _Fusion(
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
    "nvfp4_prepare_heads_cuda": _Fusion(
        frozenset({"nvfp4_attention_cuda"}),
        {0: 0, 1: 1, 2: 2},
        axis=1,
        lengths=_ONE,
        unwritten=0,
    ),
    # A norm computes the sum over the experts of each token that it adds. With one token, the
    # experts are not fused: their second product computes the sum.
    **dict.fromkeys(
        ("nvfp4_moe_w4a16_sm80", "nvfp4_moe_w4a16_sm90"),
        _Fusion(
            frozenset({"nvfp4_add_rms_norm_cuda"}), {1: 0}, axis=0, lengths=_SEVERAL, unwritten=0
        ),
    ),
    # A router counts the ids of experts from the first one of its GPU.
    "nvfp4_route_cuda": _Fusion(
        frozenset({"nvfp4_shift_ids_cuda"}), {0: 0}, axis=0, lengths=_ANY, unwritten=0
    ),
    # A norm adds shared experts to the routed ones, and adds up what it adds over GPUs. If a linear
    # layer behind the norm takes one row, that layer computes the norm. On two H200s, a step of 16
    # layers then takes 529 us, and 535 us if the norm adds up over the GPUs instead.
    **dict.fromkeys(
        ("nvfp4_add_gated_cuda", "nvfp4_add_linear_gated_cuda", "nvfp4_all_reduce_cuda"),
        _Fusion(frozenset({"nvfp4_add_rms_norm_cuda"}), {1: 0}, axis=0, lengths=_ANY, unwritten=0),
    ),
}


def find_fused(calls: Sequence[Call], wanted: Sequence[Value]) -> frozenset[int]:
    """Find the calls of a chain that are fused into the next call.

    No call is fused into one that is fused itself.

    Args:
      calls: the calls in their order.
      wanted: results that are read after the chain.

    Returns:
      Their indices.
    """
    fused, readers = set(), collections.Counter(wanted)
    readers.update(value for call in calls for value in {value for value, _ in call.operands})
    for index in reversed(range(len(calls) - 1)):
        call, following = calls[index : index + 2]
        rule = _FUSIONS.get(call.target)
        if rule is None or following.target not in rule.targets or index + 1 in fused:
            continue
        read = [following.operands[operand][0] for operand in rule.operands]
        written = [call.results[result] for result in rule.operands.values()]
        is_private = rule.unwritten is None or readers[call.results[rule.unwritten]] == 1
        if read == written and written[0].shape[rule.axis] in rule.lengths and is_private:
            fused.add(index)
    return frozenset(fused)
