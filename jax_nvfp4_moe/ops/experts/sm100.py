"""The record of W4A4 kernels for compute capability 10.x.

The kernels are in ``ffi/cuda/layers/moe_w4a4_sm100.cu`` and ``grouped_gemm_w4a4_sm100.cu``. The
GEMM itself is CUTLASS's. A build contains these kernels only if it found the headers of CUTLASS.
"""

from jax_nvfp4_moe.backends.record import Backend, Device, Kernel
from jax_nvfp4_moe.ops.experts.lowering import lower_grouped_gemm, lower_moe
from jax_nvfp4_moe.scheme import W4A4_SCHEMES

MOE_W4A4_SM100 = Backend(
    "moe_w4a4_sm100",
    {
        "moe_mlp": Kernel(lower_moe, "nvfp4_moe_w4a4_sm100"),
        "grouped_gemm": Kernel(lower_grouped_gemm, "nvfp4_grouped_gemm_w4a4_sm100"),
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
