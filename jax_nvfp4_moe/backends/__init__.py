"""Backends: the one ordered tuple of records, and the choice among them."""

from jax_nvfp4_moe.backends.cpu import MOE_W4A16_CPU, QUANTIZE_CPU
from jax_nvfp4_moe.backends.cuda import (
    MOE_W4A4_SM120,
    MOE_W4A16_SM80,
    MOE_W4A16_SM90,
    QUANTIZE_CUDA,
    ROUTE_CUDA,
)
from jax_nvfp4_moe.backends.reference import REFERENCE
from jax_nvfp4_moe.backends.sm100 import MOE_W4A4_SM100

# In order of preference. The reference is last: it runs everywhere and is slow.
BACKENDS = (
    MOE_W4A4_SM120,
    MOE_W4A4_SM100,
    MOE_W4A16_SM90,
    MOE_W4A16_SM80,
    QUANTIZE_CUDA,
    ROUTE_CUDA,
    MOE_W4A16_CPU,
    QUANTIZE_CPU,
    REFERENCE,
)
