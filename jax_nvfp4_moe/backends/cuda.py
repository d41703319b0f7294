"""Records and lowerings of the CUDA kernels; the kernels themselves are in ``ffi/cuda``.

A slot is a pair of a token and one of its experts. "Engines" are the fast GEMM kernels for 16-bit
activations. "Plain kernels" are the ones for everything that the engines do not accept.
"""

from jax_nvfp4_moe.backends.attention_calls import (
    lower_absorb_queries,
    lower_attention,
    lower_expand_values,
    lower_latent_attention,
    lower_prepare_heads,
    lower_prepare_latents,
    note_fp8_attention,
)
from jax_nvfp4_moe.backends.cuda_notes import ENGINE_MAX_EXTENT, note_engines
from jax_nvfp4_moe.backends.custom_call import (
    lower_activate,
    lower_add_gated,
    lower_add_linear_gated,
    lower_add_rms_norm,
    lower_dense,
    lower_dense_fp8,
    lower_gate_heads,
    lower_grouped_gemm,
    lower_moe,
    lower_quantize,
    lower_route,
)
from jax_nvfp4_moe.numerics.layouts import CANONICAL
from jax_nvfp4_moe.scheme import (
    W4A4_SCHEMES,
    Backend,
    Capability,
    Device,
    Problem,
    Scheme,
    no_notes,
)

_EXTENSION = "_nvfp4_cuda"


# C++ code divides the workspace into arrays (the files of ffi/cuda/layers). The sizes here must
# agree with it, and a test compares them.
_SECTION_BYTES = 256
_TILE_ROWS = 64
_CHUNK_SLOTS = 32768  # a layer processes its tokens in chunks of at most this many slots
_SEGMENTS = 32  # the slots of a chunk are divided into this many segments for sorting
_ENGINE_CHUNK_SLOTS = 65536
_ENGINE_CHUNK_ROWS = 1 << 18  # a grouped GEMM processes its rows in chunks of at most this many
_ENGINE_TILE_ROWS = 8  # rows of the smallest output tile
_ENGINE_MAX_BLOCKS, _ENGINE_FLAGS = 768, 8
_ENGINE_SCHEDULE = (8 * (_ENGINE_MAX_BLOCKS + 1), 4 * _ENGINE_FLAGS * _ENGINE_MAX_BLOCKS)
_ENGINE_PARTIAL_SUMS = 32 << 20
_MAX_EXTENT = 1 << 22  # the most rows or columns of a matrix that the kernels can index
_FP4_K = 128  # the FP4 engine pads the length of a row to a multiple of this number
# Attention divides the keys of few queries among so many thread blocks. A tile has so many rows,
# and a part of the keys at least so many keys. For few rows with wide values, it has half as many
# thread blocks.
_SPLIT_BLOCKS, _SPLIT_ROWS, _SPLIT_KEYS = 264, 64, 256
_FEW_ROWS, _NARROW_VALUES = 16, 128
_LATENT_SPLIT_KEYS = 64  # latent attention has half as many thread blocks for more than few rows
QUANTIZE_PARTIALS = 256  # number of pieces of x whose largest magnitudes are found first


def _sections(*sizes: int) -> int:
    """Return the total bytes of arrays that each start at a multiple of 256 bytes."""
    return sum(-(-size // _SECTION_BYTES) * _SECTION_BYTES for size in sizes)


def _row_tables(rows: int, num_experts: int, tile_rows: int = _TILE_ROWS) -> int:
    """Return the bytes for the first rows of the experts, the tiles, and the number of tiles."""
    tiles = rows // tile_rows + min(rows, num_experts)
    return _sections(4 * (num_experts + 1), 16 * tiles, 4)


def _quantized_rows(rows: int, k: int) -> int:
    """Return the bytes for codes, block scales and one float32 scale per row."""
    return _sections(rows * (k // 2), rows * (k // 16), 4 * rows)


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
        _row_tables(slots, num_experts)
        + _sections(4 * slots, 4 * _SEGMENTS * num_experts, activated, down)
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
    own = _row_tables(slots, num_experts, _ENGINE_TILE_ROWS) + _sections(
        4 * slots,
        4 * _SEGMENTS * num_experts,
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
    return _row_tables(rows, num_experts) + _quantized_rows(rows, k)


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
    if dtype.itemsize > 2 or max(n, k) > ENGINE_MAX_EXTENT:
        return grouped_gemm_workspace_bytes(rows, num_experts, n, k, dtype=dtype)
    rows = _chunk_rows(rows, k)
    return _row_tables(rows, num_experts, _ENGINE_TILE_ROWS) + _sections(
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
        _row_tables(slots, num_experts, _ENGINE_TILE_ROWS)
        + _sections(4 * slots, 4 * _SEGMENTS * num_experts, *_ENGINE_SCHEDULE, *_ENGINE_SCHEDULE)
        + _sections(_ENGINE_PARTIAL_SUMS, 2 * slots * max(hidden, intermediate))
        + _fp4_rows(slots, hidden)
        + _fp4_rows(slots, intermediate)
    )


def grouped_gemm_w4a4_workspace_bytes(rows: int, num_experts: int, n: int, k: int, *, dtype) -> int:
    """Return the bytes of scratch memory for one grouped GEMM on FP4 engines."""
    del n, dtype
    rows = _chunk_rows(rows, k)
    tables = _row_tables(rows, num_experts, _ENGINE_TILE_ROWS)
    return tables + _sections(*_ENGINE_SCHEDULE, _ENGINE_PARTIAL_SUMS) + _fp4_rows(rows, k)


def _parts_workspace_bytes(b, t, n, m, s, dv, blocks, keys):
    """Return the bytes for the float32 results of each part of the keys, if they are divided."""
    tiles = max(b * m * -(-t * (n // m) // _SPLIT_ROWS), 1)
    splits = min(blocks // tiles, -(-s // keys))
    if splits <= 1:
        return 0
    return _sections(4 * b * t * n * splits * dv, 8 * b * t * n * splits)


def attention_workspace_bytes(b: int, t: int, n: int, m: int, s: int, dv: int) -> int:
    """Return the bytes of scratch memory for one call of attention."""
    alone = t * (n // m) <= _FEW_ROWS and dv > _NARROW_VALUES
    blocks = _SPLIT_BLOCKS // 2 if alone else _SPLIT_BLOCKS
    return _parts_workspace_bytes(b, t, n, m, s, dv, blocks, _SPLIT_KEYS)


def latent_attention_workspace_bytes(b: int, t: int, n: int, m: int, s: int, dv: int) -> int:
    """Return the bytes of scratch memory for one call of latent attention."""
    blocks = _SPLIT_BLOCKS if t * (n // m) <= _FEW_ROWS else _SPLIT_BLOCKS // 2
    return _parts_workspace_bytes(b, t, n, m, s, dv, blocks, _LATENT_SPLIT_KEYS)


def _record(suffix, devices, status, workspaces, *, layout="mma_64x64", notes=no_notes, **limits):
    """Return the record of the kernels whose names end in `suffix`.

    Args:
      suffix: end of the names of the record and of its FFI targets.
      devices: where the kernels implement which schemes.
      status: on which hardware they were executed, emulated or only compiled.
      workspaces: functions that return the workspace bytes of the layer and of the grouped GEMM.
      layout: name of the layout of the weights.
      notes: see `Backend`.
      limits: further fields of `Capability`.
    """
    moe_workspace, grouped_gemm_workspace = workspaces
    moe, grouped_gemm = f"nvfp4_moe_{suffix}", f"nvfp4_grouped_gemm_{suffix}"
    return Backend(
        name=f"moe_{suffix}",
        can=Capability(
            ops=frozenset({"moe_mlp", "grouped_gemm"}),
            devices=devices,
            platform="cuda",
            extension=_EXTENSION,
            **{"max_extent": _MAX_EXTENT, **limits},
        ),
        layout=layout,
        lower={
            "moe_mlp": lower_moe(moe, moe_workspace),
            "grouped_gemm": lower_grouped_gemm(grouped_gemm, grouped_gemm_workspace),
        },
        status=status,
        notes=notes,
        ffi_targets=(moe, grouped_gemm),
    )


MOE_W4A4_SM120 = _record(
    "w4a4_sm120",
    (Device(W4A4_SCHEMES, (12, 0), (13, 0)),),
    "mma.sync on FP4: executed on Hopper with its one instruction emulated; compiled for 120f, not"
    " executed natively",
    (moe_w4a4_workspace_bytes, grouped_gemm_w4a4_workspace_bytes),
    layout="fp4_64x64",
    dtypes=frozenset({"bfloat16", "float16"}),
    max_extent=ENGINE_MAX_EXTENT,
    shared_bytes=83104,
)
MOE_W4A16_SM90 = _record(
    "w4a16_sm90",
    (Device(frozenset(Scheme), (9, 0), (10, 0)),),
    "wgmma and mma.sync in 16 bits, plain kernels for float32: executed",
    (moe_w4a16_workspace_bytes, grouped_gemm_w4a16_workspace_bytes),
    notes=note_engines,
    shared_bytes=225280,
)
# The sm_80 kernels are also the weight-only path of Blackwell. They also run whatever the Blackwell
# records above do not accept: float32, and devices of 10.x to 12.x that no record names.
MOE_W4A16_SM80 = _record(
    "w4a16_sm80",
    (
        Device(frozenset(Scheme), (8, 0), (9, 0)),
        Device(frozenset(Scheme), (10, 0), (13, 0)),
    ),
    "mma.sync in 16 bits, plain kernels for float32: executed on Hopper",
    (moe_w4a16_workspace_bytes, grouped_gemm_w4a16_workspace_bytes),
    notes=note_engines,
    shared_bytes=67232,
)

QUANTIZE_CUDA = Backend(
    name="quantize_cuda",
    can=Capability(
        ops=frozenset({"quantize_nvfp4"}),
        devices=(Device(frozenset({None}), (8, 0), (13, 0)),),
        platform="cuda",
        extension=_EXTENSION,
    ),
    layout=CANONICAL,
    lower={"quantize_nvfp4": lower_quantize("nvfp4_quantize_cuda", QUANTIZE_PARTIALS)},
    status="executed",
    ffi_targets=("nvfp4_quantize_cuda",),
)

ROUTE_CUDA = Backend(
    name="route_cuda",
    can=Capability(
        ops=frozenset({"route"}),
        devices=(Device(frozenset({None}), (8, 0), (13, 0)),),
        platform="cuda",
        extension=_EXTENSION,
        dtypes=frozenset({"float32"}),
        max_experts=1024,
    ),
    layout=CANONICAL,
    lower={"route": lower_route("nvfp4_route_cuda")},
    status="executed",
    ffi_targets=("nvfp4_route_cuda",),
)

ATTENTION_CUDA = Backend(
    name="attention_cuda",
    can=Capability(
        ops=frozenset({"attention"}),
        devices=(Device(frozenset({None}), (8, 0), (13, 0)),),
        platform="cuda",
        extension=_EXTENSION,
        dtypes=frozenset({"bfloat16", "float16"}),
        head_widths=range(8, 257, 8),
    ),
    layout=CANONICAL,
    lower={
        "attention": lower_attention(
            "nvfp4_attention_cuda",
            attention_workspace_bytes,
            "nvfp4_attention_fp8_cuda",
        )
    },
    status="executed",
    notes=note_fp8_attention,
    ffi_targets=("nvfp4_attention_cuda", "nvfp4_attention_fp8_cuda"),
)

LATENT_ATTENTION_CUDA = Backend(
    name="latent_attention_cuda",
    can=Capability(
        ops=frozenset({"latent_attention"}),
        devices=(Device(frozenset({None}), (8, 0), (13, 0)),),
        platform="cuda",
        extension=_EXTENSION,
        dtypes=frozenset({"bfloat16", "float16"}),
        head_widths=(range(8, 577, 8), range(8, 513, 8)),
        shared_bytes=99328,
    ),
    layout=CANONICAL,
    lower={
        "latent_attention": lower_latent_attention(
            "nvfp4_latent_attention_cuda", latent_attention_workspace_bytes
        )
    },
    status="executed",
    ffi_targets=("nvfp4_latent_attention_cuda",),
)

NORM_CUDA = Backend(
    name="norm_cuda",
    can=Capability(
        ops=frozenset({"add_rms_norm"}),
        devices=(Device(frozenset({None}), (8, 0), (13, 0)),),
        platform="cuda",
        extension=_EXTENSION,
        max_extent=_MAX_EXTENT,
    ),
    layout=CANONICAL,
    lower={"add_rms_norm": lower_add_rms_norm("nvfp4_add_rms_norm_cuda")},
    status="executed",
    ffi_targets=("nvfp4_add_rms_norm_cuda",),
)

# Rows up to which the kernel runs, and the number of which the length of a row is a multiple. With
# FP8 weights, it is a multiple of the second one.
DENSE_FEW_ROWS, DENSE_FACTOR, DENSE_FP8_FACTOR = 64, 8, 16


def _dense_notes(_: Problem) -> tuple[str, ...]:
    """Say which calls take the kernel."""
    return (f"1 to {DENSE_FEW_ROWS} rows take the kernel; more rows take XLA's dot",)


DENSE_CUDA = Backend(
    name="dense_cuda",
    can=Capability(
        ops=frozenset({"dense", "dense_fp8"}),
        devices=(Device(frozenset({None}), (8, 0), (13, 0)),),
        platform="cuda",
        extension=_EXTENSION,
        dtypes=frozenset({"bfloat16", "float16"}),
        max_extent=_MAX_EXTENT,
    ),
    layout=CANONICAL,
    lower={
        "dense": lower_dense("nvfp4_dense_few_cuda"),
        "dense_fp8": lower_dense_fp8("nvfp4_dense_fp8_few_cuda"),
    },
    status="executed",
    notes=_dense_notes,
    ffi_targets=("nvfp4_dense_few_cuda", "nvfp4_dense_fp8_few_cuda"),
)

GATING_CUDA = Backend(
    name="gating_cuda",
    can=Capability(
        ops=frozenset({"activate", "add_gated", "add_linear_gated", "gate_heads"}),
        devices=(Device(frozenset({None}), (8, 0), (13, 0)),),
        platform="cuda",
        extension=_EXTENSION,
        max_extent=_MAX_EXTENT,
    ),
    layout=CANONICAL,
    lower={
        "activate": lower_activate("nvfp4_activate_cuda"),
        "add_gated": lower_add_gated("nvfp4_add_gated_cuda"),
        "add_linear_gated": lower_add_linear_gated("nvfp4_add_linear_gated_cuda"),
        "gate_heads": lower_gate_heads("nvfp4_gate_heads_cuda"),
    },
    status="executed",
    ffi_targets=(
        "nvfp4_activate_cuda",
        "nvfp4_add_gated_cuda",
        "nvfp4_add_linear_gated_cuda",
        "nvfp4_gate_heads_cuda",
    ),
)

HEADS_CUDA = Backend(
    name="heads_cuda",
    can=Capability(
        ops=frozenset({"prepare_heads"}),
        devices=(Device(frozenset({None}), (8, 0), (13, 0)),),
        platform="cuda",
        extension=_EXTENSION,
        dtypes=frozenset({"bfloat16", "float16"}),
        head_widths=range(0, 257, 4),
    ),
    layout=CANONICAL,
    lower={
        "prepare_heads": lower_prepare_heads(
            "nvfp4_prepare_heads_cuda", "nvfp4_prepare_heads_fp8_cuda"
        )
    },
    status="executed",
    ffi_targets=("nvfp4_prepare_heads_cuda", "nvfp4_prepare_heads_fp8_cuda"),
)

LATENTS_CUDA = Backend(
    name="latents_cuda",
    can=Capability(
        ops=frozenset({"prepare_latents"}),
        devices=(Device(frozenset({None}), (8, 0), (13, 0)),),
        platform="cuda",
        extension=_EXTENSION,
        dtypes=frozenset({"bfloat16", "float16"}),
        head_widths=(range(4, (1 << 18) + 1, 4), range(4, 4097, 4), range(4, 257, 4)),
    ),
    layout=CANONICAL,
    lower={"prepare_latents": lower_prepare_latents("nvfp4_prepare_latents_cuda")},
    status="executed",
    ffi_targets=("nvfp4_prepare_latents_cuda",),
)

# Rows up to which the kernels run. The widths are those of the sum and of the result.
HEAD_PRODUCT_ROWS = 8
HEAD_PRODUCTS_CUDA = Backend(
    name="head_products_cuda",
    can=Capability(
        ops=frozenset({"absorb_queries", "expand_values"}),
        devices=(Device(frozenset({None}), (8, 0), (13, 0)),),
        platform="cuda",
        extension=_EXTENSION,
        dtypes=frozenset({"bfloat16", "float16"}),
        head_widths=(range(1, 513), range(8, 1025, 8), range(0, 257, 2)),
    ),
    layout=CANONICAL,
    lower={
        "absorb_queries": lower_absorb_queries("nvfp4_absorb_queries_cuda"),
        "expand_values": lower_expand_values("nvfp4_expand_values_cuda"),
    },
    status="executed",
    ffi_targets=("nvfp4_absorb_queries_cuda", "nvfp4_expand_values_cuda"),
)
