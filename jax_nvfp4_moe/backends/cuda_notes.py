"""Which kernels the CUDA records of 16-bit engines run for a problem, as ``ffi/cuda`` chooses them.

A record has three kinds: the engines; a kernel for layers of a few slots, which sorts nothing
before it; and the plain kernels, for what the engines do not take.
"""

from jax_nvfp4_moe.numerics.activations import ACTIVATIONS
from jax_nvfp4_moe.scheme import Problem, Scheme

ENGINE_MAX_EXTENT = 1 << 18  # rows or columns of a matrix

# Of the kernel for few slots (ffi/cuda/gemm/expert_gemm_few.cu); a test compares. A slot is the
# visit of a token to one expert.
_MAX_SLOTS = 32
_MAX_WEIGHTS = 64 << 20  # that the slots of a layer multiply by, in both products
_MAX_ROWS_BYTES = 90 << 10
_STATIC_BYTES = 13 << 10
_K_TILE, _ROW_PADDING = 64, 16
_FEW_SCHEMES = frozenset({Scheme.W4A16, Scheme.W4A4, Scheme.W4A4_UNIT_SCALE})


def few_slots_shared_bytes(slots: int, slots_per_row: int, k: int, *, rounds: bool) -> int:
    """Return the bytes of shared memory that a block of the kernel for few slots needs.

    Args:
      slots: slots of the product.
      slots_per_row: slots that share a row of its left operand.
      k: length of a row.
      rounds: whether rows are rounded to NVFP4 on their way, each slot's under its expert's scale.
    """
    rows = -(-slots // slots_per_row) + (slots if rounds and slots_per_row > 1 else 0)
    return rows * (2 * _K_TILE * -(-k // _K_TILE) + _ROW_PADDING) + _STATIC_BYTES


def _layer_shared_bytes(problem: Problem, tokens: int) -> int:
    """Return what the larger of a layer's two products needs for `tokens` tokens."""
    slots, rounds = tokens * problem.top_k, problem.scheme is not Scheme.W4A16
    first = few_slots_shared_bytes(slots, problem.top_k, problem.hidden, rounds=rounds)
    return max(first, few_slots_shared_bytes(slots, 1, problem.intermediate, rounds=rounds))


def _few_tokens(problem: Problem, gate_up_rows: int) -> tuple[int, int]:
    """Return up to how many tokens need no sort, and how many would if shared memory had no end."""
    weights = problem.top_k * problem.hidden * (gate_up_rows + problem.intermediate)
    most = min(_MAX_SLOTS // problem.top_k, _MAX_WEIGHTS // weights)
    limit = min(_MAX_ROWS_BYTES + _STATIC_BYTES, problem.target.shared_bytes)
    fits = (t for t in range(most, 0, -1) if _layer_shared_bytes(problem, t) <= limit)
    return next(fits, 0), most


def note_engines(problem: Problem) -> tuple[str, ...]:
    """Say where the plain kernels run, and up to how many tokens a layer needs no sort."""
    extent = max(problem.hidden, problem.intermediate)
    if problem.dtype == "float32":
        return ("float32 runs the plain kernels; the fast ones take bfloat16 and float16",)
    if extent > ENGINE_MAX_EXTENT:
        return (
            f"the plain kernels run, since the fast ones take matrices of up to "
            f"{ENGINE_MAX_EXTENT} rows and columns, got {extent}",
        )
    if problem.op != "moe_mlp" or problem.scheme not in _FEW_SCHEMES or problem.top_k < 1:
        return ()
    gated = problem.activation is None or ACTIVATIONS[problem.activation].gated
    tokens, most = _few_tokens(problem, (2 if gated else 1) * problem.intermediate)
    if tokens == most:
        return ()
    return (
        f"calls of more than {tokens} tokens sort them first: the kernel that does not would need "
        f"{_layer_shared_bytes(problem, tokens + 1)} bytes of shared memory for {tokens + 1}, and "
        f"{problem.target} has {problem.target.shared_bytes}, of which it takes at most "
        f"{_MAX_ROWS_BYTES + _STATIC_BYTES}",
    )
