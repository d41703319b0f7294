"""Notes on which kernels a CUDA record of 16-bit engines runs, as ``ffi/cuda`` chooses them.

A record has four kinds of kernels: the engines, two for layers with few slots that need no sorting,
a kernel for linear layers with few rows, and plain kernels for everything that the engines do not
accept. A slot is a pair of a
token and one of its experts.
"""

from jax_nvfp4_moe.backends.launch_facts import facts
from jax_nvfp4_moe.numerics.activations import ACTIVATIONS
from jax_nvfp4_moe.scheme import Problem, Scheme

# Limits of the kernels for few slots (ffi/cuda/gemm/expert_gemm_few.cu and combined_gemm_few.cu);
# a test compares them.
_MAX_SLOTS = 32
_MAX_WEIGHTS = 64 << 20  # the most weights that the slots of a layer read in both GEMMs
_STATIC_BYTES, _COMBINED_STATIC_BYTES = 2 << 10, 1 << 10  # of the two GEMMs
_PART_BYTES = 576  # 16 rows of a weight tile
_RING_BYTES, _MAX_ROWS = 4 * 8 * _PART_BYTES, 8  # of the first GEMM
_WARPS, _COMBINED_RING_BYTES, _COLUMN_BYTES = 16, 16 * 6 * _PART_BYTES, 72  # of the second GEMM
_K_TILE, _ROW_PADDING = 64, 16
# Limits of the kernel for linear layers with few rows (ffi/cuda/gemm/linear_few.cu). Before 9.0, a
# thread block keeps all rows in shared memory.
_ROWS_WITH_CLUSTERS, _ROWS_WITHOUT_CLUSTERS = 64, 8
_FEW_SCHEMES = frozenset({Scheme.W4A16, Scheme.W4A4, Scheme.W4A4_UNIT_SCALE})


def few_slots_shared_bytes(slots: int, slots_per_row: int, k: int) -> int:
    """Return the bytes of shared memory per thread block that the first GEMM needs.

    Args:
      slots: number of slots of the GEMM.
      slots_per_row: number of slots that share a row of the left operand.
      k: length of a row.
    """
    rows = min(_MAX_ROWS, -(-slots // slots_per_row))
    return _RING_BYTES + rows * _row_bytes(k) + _STATIC_BYTES


def combined_few_shared_bytes(slots: int, k: int) -> int:
    """Return the bytes of shared memory per thread block that the second GEMM needs.

    A block keeps rows of `k` elements, weights in flight, and sums of each warp.
    """
    sums = (slots + _MAX_ROWS * (_WARPS - 1)) * _COLUMN_BYTES
    return _COMBINED_RING_BYTES + slots * _row_bytes(k) + sums + _COMBINED_STATIC_BYTES


def _row_bytes(k: int) -> int:
    return 2 * _K_TILE * -(-k // _K_TILE) + _ROW_PADDING


def _layer_shared_bytes(problem: Problem, tokens: int) -> int:
    """Return the shared memory for `tokens` tokens: the larger need of the layer's two GEMMs."""
    slots = tokens * problem.top_k
    first = few_slots_shared_bytes(slots, problem.top_k, problem.hidden)
    return max(first, combined_few_shared_bytes(slots, problem.intermediate))


def _few_tokens(problem: Problem, gate_up_rows: int) -> tuple[int, int]:
    """Return up to how many tokens a layer runs without sorting, on this device and at most.

    The second number would hold if shared memory were unlimited.
    """
    weights = problem.top_k * problem.hidden * (gate_up_rows + problem.intermediate)
    most = min(_MAX_SLOTS // problem.top_k, _MAX_WEIGHTS // weights)
    fits = (
        t
        for t in range(most, 0, -1)
        if _layer_shared_bytes(problem, t) <= problem.target.shared_bytes
    )
    return next(fits, 0), most


def linear_few_rows(problem: Problem) -> int:
    """Return up to how many rows a linear layer in W4A16 runs in the kernel for few rows."""
    target = problem.target
    if (target.compute_capability or (0, 0)) >= (9, 0):
        return _ROWS_WITH_CLUSTERS
    return min(target.shared_bytes // _row_bytes(problem.hidden), _ROWS_WITHOUT_CLUSTERS)


def _note_linear(problem: Problem) -> tuple[str, ...]:
    """Return the note on the kernel for few rows, if the problem can be a linear layer in W4A16."""
    if problem.scheme is not Scheme.W4A16 or problem.num_experts != 1:
        return ()
    rows = linear_few_rows(problem)
    if rows < 1:
        return ()
    return (f"a linear layer with up to {rows} rows runs in one kernel, without a workspace",)


def note_engines(problem: Problem) -> tuple[str, ...]:
    """Return notes on which kernels run.

    They say when plain kernels run, up to how many tokens need no sorting, and up to how many rows
    a linear layer has a kernel of its own.
    """
    extent = max(problem.hidden, problem.intermediate)
    if problem.dtype == "float32":
        return ("float32 runs the plain kernels; the fast ones need bfloat16 or float16",)
    if extent > facts().MAX_ENGINE_EXTENT:
        return (
            f"the plain kernels run, because the fast ones accept matrices of up to "
            f"{facts().MAX_ENGINE_EXTENT} rows and columns, got {extent}",
        )
    if problem.op == "grouped_gemm":
        return _note_linear(problem)
    if problem.op != "moe_mlp" or problem.scheme not in _FEW_SCHEMES or problem.top_k < 1:
        return ()
    gated = problem.activation is None or ACTIVATIONS[problem.activation].gated
    tokens, most = _few_tokens(problem, (2 if gated else 1) * problem.intermediate)
    if tokens == most:
        return ()
    return (
        f"calls with more than {tokens} tokens sort the tokens by expert first: the kernel that "
        f"does not sort needs {_layer_shared_bytes(problem, tokens + 1)} bytes of shared memory "
        f"for {tokens + 1} tokens; {problem.target} has {problem.target.shared_bytes}",
    )
