"""Notes on which kernels a CUDA record of 16-bit engines runs, as ``ffi/cuda`` chooses them.

A record has four kinds of kernels: the engines, two for layers with few slots that need no sorting,
a kernel for linear layers with few rows, and plain kernels for everything that the engines do not
accept. A slot is a pair of a token and one of its experts. ``ffi/cuda/layers/forms.h`` chooses.
"""

from jax_nvfp4_moe.backends.launch_facts import facts
from jax_nvfp4_moe.numerics.activations import ACTIVATIONS
from jax_nvfp4_moe.scheme import Problem, Scheme


def _note_linear(problem: Problem) -> tuple[str, ...]:
    """Return the note on the kernel for few rows, if the problem can be a linear layer in W4A16."""
    if problem.scheme is not Scheme.W4A16 or problem.num_experts != 1:
        return ()
    target = problem.target
    clusters = (target.compute_capability or (0, 0)) >= (9, 0)
    rows = facts().most_linear_rows(problem.hidden, clusters, target.shared_bytes)
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
    if problem.op != "moe_mlp" or problem.top_k < 1:
        return ()
    return _note_sort(problem)


def _note_sort(problem: Problem) -> tuple[str, ...]:
    """Return the note on the kernels that do not sort, if shared memory limits their tokens."""
    gated = problem.activation is None or ACTIVATIONS[problem.activation].gated
    token_scales = problem.scheme is Scheme.W4A4_TOKEN_SCALE
    sizes = problem.top_k, problem.hidden, problem.intermediate
    tokens, most = (
        facts().most_unsorted_tokens(*sizes, gated, token_scales, shared_bytes)
        for shared_bytes in (problem.target.shared_bytes, 1 << 62)
    )
    if tokens == most:
        return ()
    needed = facts().few_slots_shared_bytes((tokens + 1) * problem.top_k, *sizes)
    return (
        f"calls with more than {tokens} tokens sort the tokens by expert first: the kernel that "
        f"does not sort needs {needed} bytes of shared memory for {tokens + 1} tokens; "
        f"{problem.target} has {problem.target.shared_bytes}",
    )
