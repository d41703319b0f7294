"""Which calls of a chain run in parallel with the calls ahead of them."""

import bisect
import dataclasses
from collections.abc import Iterator, Sequence

from jax_nvfp4_moe.backends.chains.calls import Call
from jax_nvfp4_moe.backends.launch_facts import facts

# A fork and its scope have at least this many calls: fewer save less than a fork and a join cost.
_FEWEST = 2
# A product with this many outputs has four output tiles or more, of up to 256 outputs. About a
# quarter of its blocks then shares a tile at most.
_MANY_OUTPUTS = 1024
_SUM = "nvfp4_all_reduce_cuda"


@dataclasses.dataclass(frozen=True)
class Fork:
    """Successive calls of a chain that run in parallel with the calls ahead of them, its scope.

    Attributes:
      start: index of the first call of the scope. The fork starts when all calls before this one
        have ended.
      begin: index of the first call of the fork. The scope ends before it.
      join: index of the call after the fork. It waits for the scope and for the fork.
    """

    start: int
    begin: int
    join: int

    @property
    def saving(self) -> int:
        """Return how many calls run in parallel with others."""
        return min(self.begin - self.start, self.join - self.begin)

    @property
    def size(self) -> int:
        """Return the number of calls of the fork and its scope."""
        return self.join - self.start


def find_forks(calls: Sequence[Call], fused: frozenset[int] = frozenset()) -> list[Fork]:
    """Find the calls of a chain that may run in parallel with others.

    Shared experts are the first example. They read the result of a norm, as the router does, and
    the next call that reads their result is a sum with the result of the routed experts.

    Calls with aliases are in no fork and no scope, because they write to memory that other calls
    may read. Neither are sums over GPUs, which must run one at a time and in the same order on all
    GPUs. A call of a fork reads nothing that its scope writes.

    Args:
      calls: the calls in their order.
      fused: indices of calls that are fused into the next one. No fork or scope begins or ends
        between the two.

    Returns:
      Forks that do not overlap, in their order. Together they save the largest number of calls, and
      among such forks they have the largest number of calls.
    """
    writers = {value: index for index, call in enumerate(calls) for value in call.results}
    reads = [{writers[v] for v, _ in call.operands if v in writers} for call in calls]
    # For each call, the first call from which on each call before it may be in a fork.
    free_from = [0]
    for index, call in enumerate(calls):
        stays = call.aliases or call.target == _SUM
        free_from.append(index + 1 if stays else free_from[-1])
    # The best forks among the calls before an index, after what they save and their size.
    best: list[tuple[tuple[int, int], tuple[Fork, ...]]] = [((0, 0), ())]
    for join in range(1, len(calls)):
        most, chosen = best[-1]
        for fork in _forks_before(join, calls, reads, fused, free_from):
            (saving, size), others = best[fork.start]
            found = saving + fork.saving, size + fork.size
            if found > most:
                most, chosen = found, (*others, fork)
        best.append((most, chosen))
    return list(best[-1][1])


def _forks_before(join, calls, reads, fused, free_from) -> Iterator[Fork]:
    """Yield all forks that end before call `join`, with their longest scopes.

    Args:
      join: index of a call.
      calls: the calls.
      reads: for each call, the indices of the calls whose results it reads.
      fused: as in `find_forks`.
      free_from: for each call, the first call from which on each call before it may be in a fork.
    """
    if join - 1 in fused:
        return
    sources: list[int] = []  # calls before the fork whose results it reads, in their order
    for begin in range(join - 1, max(free_from[join], 2) - 1, -1):
        for index in reads[begin]:
            bisect.insort(sources, index)
        while sources and sources[-1] >= begin:
            sources.pop()
        start = max(sources[-1] + 1 if sources else 0, free_from[begin])
        if begin - 1 in fused:
            continue
        fork = Fork(start + 1 if start - 1 in fused else start, begin, join)
        is_read = any(index >= begin for index in reads[join])
        if fork.saving >= _FEWEST and is_read and not _may_block(calls, fork):
            yield fork


def _may_block(calls, fork):
    """Return whether blocks of two kernels could occupy a GPU and wait for others, for ever.

    Blocks of an expert product may wait for later blocks of the same kernel, which compute parts of
    the same output tile (``ffi/cuda/scheduling/partial_sums.cuh``). A kernel alone has room for all
    its blocks. Two kernels in parallel have not, but the blocks of one output tile find room
    if no product has few tiles, each of which many blocks share.
    """
    sides = calls[fork.start : fork.begin], calls[fork.begin : fork.join]
    products = [[p for call in side for p in _expert_products(call)] for side in sides]
    if not all(products):
        return False
    unsplit = facts().UNSPLIT_INPUTS  # with at most so many inputs, output tiles are not shared
    return any(n < _MANY_OUTPUTS and k > unsplit for side in products for n, k in side)


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
