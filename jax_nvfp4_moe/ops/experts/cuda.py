"""Records and lowerings of the CUDA kernels; the kernels themselves are in ``ffi/cuda``.

A slot is a pair of a token and one of its experts. "Engines" are the fast GEMM kernels for 16-bit
activations. "Plain kernels" are the ones for everything that the engines do not accept.
"""

from jax_nvfp4_moe.backends.launch_facts import facts
from jax_nvfp4_moe.backends.record import HALVES, Backend, Device, Kernel
from jax_nvfp4_moe.ops.experts.cuda_notes import note_engines
from jax_nvfp4_moe.ops.experts.lowering import (
    lower_grouped_gemm,
    lower_moe,
)
from jax_nvfp4_moe.ops.workspace import sections
from jax_nvfp4_moe.scheme import W4A4_SCHEMES, Scheme

# C++ code divides the workspace into arrays (the files of ffi/cuda/layers). The sizes here must
# agree with it, and a test compares them.
_TILE_ROWS = 64
_CHUNK_SLOTS = 32768  # a layer processes its tokens in chunks of at most this many slots
SEGMENTS = 32  # the slots of a chunk are divided into this many segments for sorting
_ENGINE_CHUNK_SLOTS = 65536
_ENGINE_CHUNK_ROWS = 1 << 18  # a grouped GEMM processes its rows in chunks of at most this many
_ENGINE_TILE_ROWS = 8  # rows of the smallest output tile
_ENGINE_MAX_BLOCKS, _ENGINE_FLAGS = 768, 8
_ENGINE_SCHEDULE = (8 * (_ENGINE_MAX_BLOCKS + 1), 4 * _ENGINE_FLAGS * _ENGINE_MAX_BLOCKS)
_ENGINE_PARTIAL_SUMS = 32 << 20
_FP4_K = 128  # the FP4 engine pads the length of a row to a multiple of this number


def row_tables(rows: int, num_experts: int, tile_rows: int = _TILE_ROWS) -> int:
    """Return the bytes for the first rows of the experts, the tiles, and the number of tiles."""
    tiles = rows // tile_rows + min(rows, num_experts)
    return sections(4 * (num_experts + 1), 16 * tiles, 4)


def _quantized_rows(rows: int, k: int) -> int:
    """Return the bytes for codes, block scales and one float32 scale per row."""
    return sections(rows * (k // 2), rows * (k // 16), 4 * rows)


def moe_workspace_bytes(
    tokens: int, top_k: int, num_experts: int, hidden: int, intermediate: int, *, gated: bool, dtype
) -> int:
    """Return the bytes of scratch memory for one call of the expert layer with the plain kernels.

    The memory holds one chunk of tokens: the order of its slots by expert, activations
    ``[slots, i]`` of `dtype`, outputs ``[slots, h]`` in float32, and quantized rows.
    """
    slots = min(tokens, _CHUNK_SLOTS // max(top_k, 1)) * top_k
    activated, down = slots * intermediate * dtype.itemsize, 4 * slots * hidden
    return (
        row_tables(slots, num_experts)
        + sections(4 * slots, 4 * SEGMENTS * num_experts, activated, down)
        + _quantized_rows(slots, max(hidden, intermediate))
    )


def moe_w4a16_workspace_bytes(
    tokens: int, top_k: int, num_experts: int, hidden: int, intermediate: int, *, gated: bool, dtype
) -> int:
    """Return the bytes of scratch memory for one call of a w4a16 expert layer.

    The memory is large enough for both kinds of kernels. The engines keep activations and outputs
    in 16 bits, and pass partial sums in float32. The plain kernels run float32 and quantized
    activations.
    """
    slots = min(tokens, _ENGINE_CHUNK_SLOTS // max(top_k, 1)) * top_k
    own = row_tables(slots, num_experts, _ENGINE_TILE_ROWS) + sections(
        4 * slots,
        4 * SEGMENTS * num_experts,
        *_ENGINE_SCHEDULE,
        *_ENGINE_SCHEDULE,
        _ENGINE_PARTIAL_SUMS,
        2 * slots * intermediate,
        2 * slots * hidden,
        4 * slots,
    )
    plain = moe_workspace_bytes(
        tokens, top_k, num_experts, hidden, intermediate, gated=gated, dtype=dtype
    )
    return max(own, plain)


def grouped_gemm_workspace_bytes(rows: int, num_experts: int, n: int, k: int, *, dtype) -> int:
    """Return the bytes of scratch memory for one grouped GEMM with the plain kernels."""
    return row_tables(rows, num_experts) + _quantized_rows(rows, k)


def _chunk_rows(rows: int, k: int) -> int:
    """Return how many rows of a grouped GEMM an engine processes at once."""
    return min(rows, _ENGINE_CHUNK_ROWS, ((1 << 32) - 1) // (k // 8))


def grouped_gemm_w4a16_workspace_bytes(
    rows: int, num_experts: int, n: int, k: int, *, dtype
) -> int:
    """Return the bytes of scratch memory for one w4a16 grouped GEMM.

    The engines process a chunk of rows at a time. The plain kernels run float32, and matrices with
    very many rows or columns.
    """
    if dtype.itemsize > 2 or max(n, k) > facts().MAX_ENGINE_EXTENT:
        return grouped_gemm_workspace_bytes(rows, num_experts, n, k, dtype=dtype)
    rows = _chunk_rows(rows, k)
    return row_tables(rows, num_experts, _ENGINE_TILE_ROWS) + sections(
        *_ENGINE_SCHEDULE, _ENGINE_PARTIAL_SUMS, 2 * rows * k, 4 * rows
    )


def _fp4_rows(rows: int, k: int) -> int:
    """Return the bytes for quantized rows that are padded for the FP4 engine."""
    return _quantized_rows(rows, -(-k // _FP4_K) * _FP4_K)


def moe_w4a4_workspace_bytes(
    tokens: int, top_k: int, num_experts: int, hidden: int, intermediate: int, *, gated: bool, dtype
) -> int:
    """Return the bytes of scratch memory for one call of an expert layer on FP4 engines.

    The memory holds the quantized rows of both GEMMs, outputs in 16 bits, and partial sums in
    float32.
    """
    del gated, dtype  # the output of the activation has `intermediate` columns in both cases
    slots = min(tokens, _ENGINE_CHUNK_SLOTS // max(top_k, 1)) * top_k
    return (
        row_tables(slots, num_experts, _ENGINE_TILE_ROWS)
        + sections(4 * slots, 4 * SEGMENTS * num_experts, *_ENGINE_SCHEDULE, *_ENGINE_SCHEDULE)
        + sections(_ENGINE_PARTIAL_SUMS, 2 * slots * max(hidden, intermediate))
        + _fp4_rows(slots, hidden)
        + _fp4_rows(slots, intermediate)
    )


def grouped_gemm_w4a4_workspace_bytes(rows: int, num_experts: int, n: int, k: int, *, dtype) -> int:
    """Return the bytes of scratch memory for one grouped GEMM on FP4 engines."""
    del n, dtype
    rows = _chunk_rows(rows, k)
    tables = row_tables(rows, num_experts, _ENGINE_TILE_ROWS)
    return tables + sections(*_ENGINE_SCHEDULE, _ENGINE_PARTIAL_SUMS) + _fp4_rows(rows, k)


def _record(name, devices, status, workspaces, *, layout="mma_64x64", **limits):
    """Return the record of an expert layer and of a grouped GEMM.

    Args:
      name: name of the record.
      devices: where the kernels implement which schemes.
      status: on which hardware they were executed, emulated or only compiled.
      workspaces: functions that return the workspace bytes of the layer and of the grouped GEMM.
      layout: name of the layout of the weights.
      limits: further fields of `Backend`.
    """
    moe, grouped_gemm = workspaces
    suffix = name.removeprefix("moe_")
    targets = f"nvfp4_moe_{suffix}", f"nvfp4_grouped_gemm_{suffix}"
    return Backend(
        name,
        {
            "moe_mlp": Kernel(lower_moe, targets[0], workspace_bytes=moe),
            "grouped_gemm": Kernel(lower_grouped_gemm, targets[1], workspace_bytes=grouped_gemm),
        },
        devices,
        status=status,
        layout=layout,
        **{"max_extent": "MAX_EXTENT", "max_top_k": "MAX_TOP_K", **limits},
    )


_ALL = frozenset(Scheme)
MOE_W4A4_SM120 = _record(
    "moe_w4a4_sm120",
    (Device("cuda", (12, 0), (13, 0), W4A4_SCHEMES),),
    "mma.sync on FP4: executed on Hopper with its one instruction emulated; compiled for 120f, not"
    " executed natively",
    (moe_w4a4_workspace_bytes, grouped_gemm_w4a4_workspace_bytes),
    layout="fp4_64x64",
    dtypes=HALVES,
    max_extent="MAX_ENGINE_EXTENT",
    shared_bytes="SHARED_BYTES_SM120",
)
MOE_W4A16_SM90 = _record(
    "moe_w4a16_sm90",
    (Device("cuda", (9, 0), (10, 0), _ALL),),
    "wgmma and mma.sync in 16 bits, plain kernels for float32: executed",
    (moe_w4a16_workspace_bytes, grouped_gemm_w4a16_workspace_bytes),
    notes=note_engines,
    shared_bytes="SHARED_BYTES_SM90",
)
# The sm_80 kernels are also the weight-only path of Blackwell. They also run whatever the Blackwell
# records above do not accept: float32, and devices of 10.x to 12.x that no record names.
MOE_W4A16_SM80 = _record(
    "moe_w4a16_sm80",
    (Device("cuda", (8, 0), (9, 0), _ALL), Device("cuda", (10, 0), (13, 0), _ALL)),
    "mma.sync in 16 bits, plain kernels for float32: executed on Hopper",
    (moe_w4a16_workspace_bytes, grouped_gemm_w4a16_workspace_bytes),
    notes=note_engines,
    shared_bytes="SHARED_BYTES_SM80",
)
