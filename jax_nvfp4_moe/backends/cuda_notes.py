"""Notes on which kernels a CUDA record of 16-bit engines runs, as ``ffi/cuda`` chooses them.

A record has three kinds of kernels: the engines, two for layers with few slots that need no
sorting, and plain kernels for everything that the engines do not accept. A slot is a pair of a
token and one of its experts.
"""

from jax_nvfp4_moe.numerics.activations import ACTIVATIONS
from jax_nvfp4_moe.scheme import Problem, Scheme

ENGINE_MAX_EXTENT = 1 << 18  # the most rows or columns of a matrix that the engines accept

# Limits of the kernels for few slots (ffi/cuda/gemm/expert_gemm_few.cu and combined_gemm_few.cu);
# a test compares them.
_MAX_SLOTS = 32
_MAX_WEIGHTS = 64 << 20  # the most weights that the slots of a layer read in both GEMMs
_MAX_ROWS_BYTES = 90 << 10
_STATIC_BYTES = 13 << 10
_COMBINED_STATIC_BYTES = 3 << 10
_WARPS, _RING_BYTES, _SUM_BYTES = 16, 16 * 6 * 576, 640  # of the second GEMM
_K_TILE, _ROW_PADDING = 64, 16
_FEW_SCHEMES = frozenset({Scheme.W4A16, Scheme.W4A4, Scheme.W4A4_UNIT_SCALE})


def few_slots_shared_bytes(slots: int, slots_per_row: int, k: int, *, rounds: bool) -> int:
    """Return the bytes of shared memory per thread block that the first GEMM needs.

    Args:
      slots: number of slots of the GEMM.
      slots_per_row: number of slots that share a row of the left operand.
      k: length of a row.
      rounds: whether rows are rounded to NVFP4 inside the kernel, for each slot with the scale of
        its expert.
    """
    rows = -(-slots // slots_per_row) + (slots if rounds and slots_per_row > 1 else 0)
    return rows * _row_bytes(k) + _STATIC_BYTES


def combined_few_shared_bytes(slots: int, k: int) -> int:
    """Return the bytes of shared memory per thread block that the second GEMM needs.

    A block keeps rows of `k` elements, weights in flight, and sums of each warp.
    """
    sums = (slots + _WARPS - 1) * _SUM_BYTES
    return _RING_BYTES + slots * _row_bytes(k) + sums + _COMBINED_STATIC_BYTES


def _row_bytes(k: int) -> int:
    return 2 * _K_TILE * -(-k // _K_TILE) + _ROW_PADDING


def _needs(problem: Problem, tokens: int) -> tuple[tuple[int, int], ...]:
    """Return bytes of shared memory for `tokens` tokens and their limit, for both GEMMs."""
    slots, rounds = tokens * problem.top_k, problem.scheme is not Scheme.W4A16
    device = problem.target.shared_bytes
    first = few_slots_shared_bytes(slots, problem.top_k, problem.hidden, rounds=rounds)
    second = combined_few_shared_bytes(slots, problem.intermediate)
    return (first, min(_MAX_ROWS_BYTES + _STATIC_BYTES, device)), (second, device)


def _lacks(problem: Problem, tokens: int) -> tuple[int, int] | None:
    """Return the need and the limit of the first GEMM that `tokens` tokens do not fit, or None."""
    return next((need for need in _needs(problem, tokens) if need[0] > need[1]), None)


def _few_tokens(problem: Problem, gate_up_rows: int) -> tuple[int, int]:
    """Return up to how many tokens a layer runs without sorting, on this device and at most.

    The second number would hold if shared memory were unlimited.
    """
    weights = problem.top_k * problem.hidden * (gate_up_rows + problem.intermediate)
    most = min(_MAX_SLOTS // problem.top_k, _MAX_WEIGHTS // weights)
    fits = (t for t in range(most, 0, -1) if _lacks(problem, t) is None)
    return next(fits, 0), most


def note_engines(problem: Problem) -> tuple[str, ...]:
    """Return notes that say when plain kernels run, and up to how many tokens need no sorting."""
    extent = max(problem.hidden, problem.intermediate)
    if problem.dtype == "float32":
        return ("float32 runs the plain kernels; the fast ones need bfloat16 or float16",)
    if extent > ENGINE_MAX_EXTENT:
        return (
            f"the plain kernels run, because the fast ones accept matrices of up to "
            f"{ENGINE_MAX_EXTENT} rows and columns, got {extent}",
        )
    if problem.op != "moe_mlp" or problem.scheme not in _FEW_SCHEMES or problem.top_k < 1:
        return ()
    gated = problem.activation is None or ACTIVATIONS[problem.activation].gated
    tokens, most = _few_tokens(problem, (2 if gated else 1) * problem.intermediate)
    if tokens == most or (lack := _lacks(problem, tokens + 1)) is None:
        return ()
    return (
        f"calls with more than {tokens} tokens sort the tokens by expert first: a kernel that "
        f"does not sort needs {lack[0]} bytes of shared memory for {tokens + 1} tokens; "
        f"{problem.target} has {problem.target.shared_bytes}, and the kernel uses at most "
        f"{lack[1]}",
    )
