"""The record of W4A4 kernels for compute capability 10.x, and the sizes of their workspaces.

The kernels are in ``ffi/cuda/layers/moe_w4a4_sm100.cu`` and ``grouped_gemm_w4a4_sm100.cu``. The
GEMM itself is CUTLASS's. A build contains these kernels only if it found the headers of CUTLASS.
"""

from jax_nvfp4_moe.backends.record import Backend, Device, Kernel
from jax_nvfp4_moe.ops.experts.cuda import SEGMENTS, row_tables
from jax_nvfp4_moe.ops.experts.lowering import lower_grouped_gemm, lower_moe
from jax_nvfp4_moe.ops.workspace import sections
from jax_nvfp4_moe.scheme import W4A4_SCHEMES

# C++ code divides the workspace into arrays (ffi/cuda/gemm/fp4_groups.cuh and the files above). The
# sizes here must agree with it, and a test compares them.
_CHUNK_SLOTS = 65536  # a layer processes its tokens in chunks of at most this many slots
_SCALE_TILE_ROWS, _SCALE_TILE_K, _SCALE_TILE_BYTES = 128, 64, 512
_COLLECTIVE_BYTES = 512 << 10  # upper bound of the workspace that CUTLASS requests
_OUTPUT_MULTIPLE = 8
_OPERAND_ENTRY = (8, 8, 8, 20)  # bytes of pointer, stride, pointer to scales, layout of scales


def _up(n, multiple):
    """Round `n` up to a multiple of `multiple`."""
    return -(-n // multiple) * multiple


def _groups(num_experts):
    """Return the bytes of the arguments that describe one grouped GEMM to CUTLASS."""
    entry = (12, *_OPERAND_ENTRY, *_OPERAND_ENTRY, 8, 8, 8, 4)
    return sections(*(size * num_experts for size in entry))


def _fp4_rows(rows, num_experts, k):
    """Return the bytes for codes and for block scales in tiles; each expert starts a new tile."""
    k = _up(k, _SCALE_TILE_K)
    tiles = (rows // _SCALE_TILE_ROWS + num_experts) * (k // _SCALE_TILE_K)
    return sections(rows * (k // 2), tiles * _SCALE_TILE_BYTES)


def moe_workspace_bytes(
    tokens: int, top_k: int, num_experts: int, hidden: int, intermediate: int, *, gated: bool, dtype
) -> int:
    """Return the bytes of scratch memory for one call of the expert layer.

    The memory holds one chunk of tokens: the order of its slots by expert, the arguments of both
    GEMMs, quantized rows, and the sums of a GEMM in bfloat16.
    """
    slots = min(tokens, _CHUNK_SLOTS // max(top_k, 1)) * top_k
    columns = max((2 if gated else 1) * intermediate, hidden)
    return (
        row_tables(slots, num_experts)
        + sections(4 * slots, 4 * SEGMENTS * num_experts, 4 * slots)
        + 2 * (_groups(num_experts) + sections(4 * slots))
        + _fp4_rows(slots, num_experts, max(hidden, intermediate))
        + sections(2 * slots * columns, _COLLECTIVE_BYTES)
    )


def grouped_gemm_workspace_bytes(rows: int, num_experts: int, n: int, k: int, *, dtype) -> int:
    """Return the bytes of scratch memory for one grouped GEMM."""
    return (
        row_tables(rows, num_experts)
        + _groups(num_experts)
        + _fp4_rows(rows, num_experts, k)
        + sections(4 * rows, 2 * rows * _up(n, _OUTPUT_MULTIPLE), _COLLECTIVE_BYTES)
    )


MOE_W4A4_SM100 = Backend(
    "moe_w4a4_sm100",
    {
        "moe_mlp": Kernel(lower_moe, "nvfp4_moe_w4a4_sm100", workspace_bytes=moe_workspace_bytes),
        "grouped_gemm": Kernel(
            lower_grouped_gemm,
            "nvfp4_grouped_gemm_w4a4_sm100",
            workspace_bytes=grouped_gemm_workspace_bytes,
        ),
    },
    (Device("cuda", (10, 0), (11, 0), W4A4_SCHEMES),),
    part="w4a4_sm100",
    max_extent="MAX_EXTENT",
    dtypes=("bfloat16",),
    max_top_k="MAX_TOP_K",
    layout="fp4_128x64",
    status="CUTLASS's GEMM compiled, not executed; the rest executed on Hopper with that GEMM"
    " emulated",
)
