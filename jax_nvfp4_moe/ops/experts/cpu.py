"""Records and lowerings of the CPU kernels; the kernels themselves are in ``ffi/cpu``."""

import jax.numpy as jnp
from jax.core import min_dim

from jax_nvfp4_moe.backends.record import Backend, Device, Kernel
from jax_nvfp4_moe.ops.experts.lowering import (
    lower_grouped_gemm,
    lower_moe,
)
from jax_nvfp4_moe.scheme import Scheme

# A call processes as many tokens at a time as fit into this many bytes.
_ROUND_BYTES = 256 * 2**20


def moe_workspace_bytes(
    tokens: int, top_k: int, num_experts: int, hidden: int, intermediate: int, *, gated: bool, dtype
) -> int:
    """Return the bytes of scratch memory for one call of the expert layer.

    A slot is a pair of a token and one of its experts. Each slot takes its two prepared rows and
    one float32 row of the output of `down`. The handler works in rounds. A round has as many tokens
    as fit into the memory, and at least one.
    """
    del gated  # the output of the activation has `intermediate` columns in both cases
    row = 4 * max(hidden, intermediate)
    slot = _prepared_row(hidden, dtype) + _prepared_row(intermediate, dtype) + row + 16
    fits = max(1, _ROUND_BYTES // (slot * max(top_k, 1)))
    return _fixed_bytes(num_experts) + slot * (min_dim(tokens, fits) * top_k + 16)


def grouped_gemm_workspace_bytes(rows: int, num_experts: int, n: int, k: int, *, dtype) -> int:
    """Return the bytes of scratch memory for one grouped GEMM; `n` does not matter."""
    del n
    row = _prepared_row(k, dtype) + 16
    fits = max(1, _ROUND_BYTES // row)
    return _fixed_bytes(num_experts) + row * (min_dim(rows, fits) + 16)


def _prepared_row(k, dtype):
    """Return the most bytes that any instruction set needs for a row (``ffi/cpu/kernels.h``)."""
    bytes_per_value = 6 if jnp.dtype(dtype) == jnp.float32 else 4
    return -(-k // 32) * 32 * bytes_per_value + 64


def _fixed_bytes(num_experts):
    """Return the bytes for the offsets and row blocks of the experts, and for alignment."""
    return 32 * num_experts + 2048


MOE_W4A16_CPU = Backend(
    "moe_w4a16_cpu",
    {
        "moe_mlp": Kernel(
            lower_moe,
            "nvfp4_moe_w4a16_cpu",
            workspace_bytes=moe_workspace_bytes,
            symbolic_rows=True,
        ),
        "grouped_gemm": Kernel(
            lower_grouped_gemm,
            "nvfp4_grouped_gemm_w4a16_cpu",
            workspace_bytes=grouped_gemm_workspace_bytes,
            symbolic_rows=True,
        ),
    },
    (Device("cpu", schemes=frozenset(Scheme)),),
    max_top_k="MAX_TOP_K",
    layout="cpu_16x16",
    status="executed, measured",
)
