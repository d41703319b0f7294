"""Records and lowerings of the CPU kernels; the kernels themselves are in ``ffi/cpu``."""

from jax_nvfp4_moe.backends.record import Backend, Device, Kernel
from jax_nvfp4_moe.ops.experts.lowering import (
    lower_grouped_gemm,
    lower_moe,
    lower_transposed_gemm,
)
from jax_nvfp4_moe.scheme import Scheme

MOE_W4A16_CPU = Backend(
    "moe_w4a16_cpu",
    {
        "moe_mlp": Kernel(lower_moe, "nvfp4_moe_w4a16_cpu"),
        "grouped_gemm": Kernel(lower_grouped_gemm, "nvfp4_grouped_gemm_w4a16_cpu"),
    },
    (Device("cpu", schemes=frozenset(Scheme)),),
    max_top_k="MAX_TOP_K",
    layout="cpu_16x16",
    status="executed, measured",
)
TRANSPOSED_GEMM_CPU = Backend(
    "transposed_gemm_cpu",
    {"transposed_gemm": Kernel(lower_transposed_gemm, "nvfp4_transposed_gemm_cpu")},
    (Device("cpu"),),
    layout="cpu_16x16",
    status="executed, measured",
)
