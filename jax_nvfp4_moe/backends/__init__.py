"""Backends: the one ordered tuple of records, and the choice among them."""

import copyreg

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
from jax_nvfp4_moe.scheme import Backend

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


def find_backend(name: str) -> Backend:
    """Return the record called `name`.

    Raises:
      ValueError: there is none.
    """
    for record in BACKENDS:
        if record.name == name:
            return record
    known = ", ".join(record.name for record in BACKENDS)
    raise ValueError(f"backend: expected one of {known}; got {name!r}")


# A copy of a module, by `copy.deepcopy` or `pickle`, names its records: a copy of a record would be
# another static part, and compile every program again.
copyreg.pickle(Backend, lambda record: (find_backend, (record.name,)))
