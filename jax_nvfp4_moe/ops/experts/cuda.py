"""Records and lowerings of the CUDA kernels; the kernels themselves are in ``ffi/cuda``.

A slot is a pair of a token and one of its experts. "Engines" are the fast GEMM kernels for 16-bit
activations. "Plain kernels" are the ones for everything that the engines do not accept.
"""

from jax_nvfp4_moe.backends.record import HALVES, Backend, Device, Kernel
from jax_nvfp4_moe.ops.experts.cuda_notes import note_engines
from jax_nvfp4_moe.ops.experts.lowering import (
    lower_grouped_gemm,
    lower_moe,
    lower_transposed_gemm,
)
from jax_nvfp4_moe.scheme import W4A4_SCHEMES, Scheme


def _record(name, devices, status, *, layout="mma_64x64", **limits):
    """Return the record of an expert layer and of a grouped GEMM.

    Args:
      name: name of the record.
      devices: where the kernels implement which schemes.
      status: on which hardware they were executed, emulated or only compiled.
      layout: name of the layout of the weights.
      limits: further fields of `Backend`.
    """
    suffix = name.removeprefix("moe_")
    return Backend(
        name,
        {
            "moe_mlp": Kernel(lower_moe, f"nvfp4_moe_{suffix}"),
            "grouped_gemm": Kernel(lower_grouped_gemm, f"nvfp4_grouped_gemm_{suffix}"),
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
    layout="fp4_64x64",
    dtypes=HALVES,
    max_extent="MAX_ENGINE_EXTENT",
    shared_bytes="SHARED_BYTES_SM120",
)
MOE_W4A16_SM90 = _record(
    "moe_w4a16_sm90",
    (Device("cuda", (9, 0), (10, 0), _ALL),),
    "wgmma and mma.sync in 16 bits, plain kernels for float32: executed",
    notes=note_engines,
    shared_bytes="SHARED_BYTES_SM90",
)
# The sm_80 kernels are also the weight-only path of Blackwell. They also run whatever the Blackwell
# records above do not accept: float32, and devices of 10.x to 12.x that no record names.
MOE_W4A16_SM80 = _record(
    "moe_w4a16_sm80",
    (Device("cuda", (8, 0), (9, 0), _ALL), Device("cuda", (10, 0), (13, 0), _ALL)),
    "mma.sync in 16 bits, plain kernels for float32: executed on Hopper",
    notes=note_engines,
    shared_bytes="SHARED_BYTES_SM80",
)
# For gradients. Other GPUs differentiate expert by expert, in plain XLA.
TRANSPOSED_GEMM_SM90 = Backend(
    "transposed_gemm_sm90",
    {"transposed_gemm": Kernel(lower_transposed_gemm, "nvfp4_transposed_gemm_w4a16_sm90")},
    (Device("cuda", (9, 0), (10, 0)),),
    status="wgmma in 16 bits: executed",
    dtypes=HALVES,
    layout="mma_64x64",
    max_extent="MAX_ENGINE_EXTENT",
    shared_bytes="SHARED_BYTES_SM90",
)
