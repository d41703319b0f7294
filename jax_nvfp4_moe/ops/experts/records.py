"""The backends of expert layers and grouped GEMMs, in order of preference."""

from jax_nvfp4_moe.ops.experts.cpu import MOE_W4A16_CPU, TRANSPOSED_GEMM_CPU
from jax_nvfp4_moe.ops.experts.cuda import (
    MOE_W4A4_SM120,
    MOE_W4A16_SM80,
    MOE_W4A16_SM90,
    TRANSPOSED_GEMM_SM90,
)
from jax_nvfp4_moe.ops.experts.meaning import grouped_gemm, moe_mlp, transposed_gemm
from jax_nvfp4_moe.ops.experts.sm100 import MOE_W4A4_SM100

BACKENDS = (
    MOE_W4A4_SM120,
    MOE_W4A4_SM100,
    MOE_W4A16_SM90,
    MOE_W4A16_SM80,
    MOE_W4A16_CPU,
    TRANSPOSED_GEMM_SM90,
    TRANSPOSED_GEMM_CPU,
)
MEANINGS = {
    "moe_mlp": moe_mlp,
    "grouped_gemm": grouped_gemm,
    "transposed_gemm": transposed_gemm,
}
