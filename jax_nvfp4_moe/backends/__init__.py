"""The backends: one ordered tuple of records. `resolution` chooses among them."""

import copyreg

from jax_nvfp4_moe.backends.attention import ATTENTION_CPU
from jax_nvfp4_moe.backends.attention_cpu import ATTENTION_AMX, ATTENTION_AVX512
from jax_nvfp4_moe.backends.call_chain import CALL_CHAIN_CPU, CALL_CHAIN_CUDA
from jax_nvfp4_moe.backends.cpu import DENSE_CPU, MOE_W4A16_CPU, QUANTIZE_CPU
from jax_nvfp4_moe.backends.cuda import (
    ATTENTION_CUDA,
    DENSE_CUDA,
    GATING_CUDA,
    HEAD_PRODUCTS_CUDA,
    HEADS_CUDA,
    LATENT_ATTENTION_CUDA,
    LATENTS_CUDA,
    MOE_W4A4_SM120,
    MOE_W4A16_SM80,
    MOE_W4A16_SM90,
    NORM_CUDA,
    QUANTIZE_CUDA,
    ROUTE_CUDA,
)
from jax_nvfp4_moe.backends.heads_cpu import HEADS_CPU
from jax_nvfp4_moe.backends.moves import MOVES_CPU
from jax_nvfp4_moe.backends.recurrent import (
    CONVOLUTION_CUDA,
    DELTA_RULE_CUDA,
    MAMBA2_SCAN_CUDA,
    RECURRENT_CUDA,
)
from jax_nvfp4_moe.backends.reference import REFERENCE
from jax_nvfp4_moe.backends.sm100 import MOE_W4A4_SM100
from jax_nvfp4_moe.scheme import Backend

# In order of preference. The reference comes last, because it runs everywhere and is slow.
BACKENDS = (
    MOE_W4A4_SM120,
    MOE_W4A4_SM100,
    MOE_W4A16_SM90,
    MOE_W4A16_SM80,
    QUANTIZE_CUDA,
    ROUTE_CUDA,
    ATTENTION_CUDA,
    LATENT_ATTENTION_CUDA,
    NORM_CUDA,
    HEADS_CUDA,
    LATENTS_CUDA,
    HEAD_PRODUCTS_CUDA,
    RECURRENT_CUDA,
    DENSE_CUDA,
    GATING_CUDA,
    CALL_CHAIN_CUDA,
    DELTA_RULE_CUDA,
    MAMBA2_SCAN_CUDA,
    CONVOLUTION_CUDA,
    MOE_W4A16_CPU,
    QUANTIZE_CPU,
    DENSE_CPU,
    MOVES_CPU,
    HEADS_CPU,
    ATTENTION_AMX,
    ATTENTION_AVX512,
    ATTENTION_CPU,
    CALL_CHAIN_CPU,
    REFERENCE,
)


def find_backend(name: str) -> Backend:
    """Return the record called `name`.

    Raises:
      ValueError: if there is no such backend; the message lists the known ones.
    """
    for record in BACKENDS:
        if record.name == name:
            return record
    known = ", ".join(record.name for record in BACKENDS)
    raise ValueError(f"backend: expected one of {known}; got {name!r}")


# `copy.deepcopy` and `pickle` of a module store the names of its records. Copied records would be
# unequal static fields, and JAX would compile every program again for them.
copyreg.pickle(Backend, lambda record: (find_backend, (record.name,)))
