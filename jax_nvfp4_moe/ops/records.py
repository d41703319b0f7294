"""The ordered tuple of backends, from which `backends.resolution.resolve` chooses."""

import copyreg
import functools
import itertools
import operator

from jax_nvfp4_moe.backends.chains import emission
from jax_nvfp4_moe.backends.record import Backend
from jax_nvfp4_moe.ops import (
    all_reduce,
    convolution,
    dense,
    gating,
    head_products,
    heads,
    latents,
    moves,
    norms,
    quantize,
    routing,
)
from jax_nvfp4_moe.ops.causal_attention import op as causal_attention
from jax_nvfp4_moe.ops.experts import records as experts
from jax_nvfp4_moe.ops.recurrent import delta_rule, mamba2_scan, steps

# The modules of all ops. Each has `BACKENDS`, in order of preference, and `MEANINGS`, which are its
# ops as they are defined; or `OF_XLA`, which are operations of XLA.
_ROOMS = (
    experts,
    quantize,
    routing,
    causal_attention,
    norms,
    heads,
    latents,
    head_products,
    steps,
    dense,
    gating,
    emission,
    delta_rule,
    mamba2_scan,
    convolution,
    all_reduce,
    moves,
)


def _join(name):
    """Return the union of the tables of all rooms that have one of this name."""
    return functools.reduce(operator.or_, (getattr(room, name, {}) for room in _ROOMS))


# Operations of XLA, which also shards them.
XLA = Backend("xla", _join("OF_XLA"), dtypes=None, sharded_by_xla=True)
# Every other op as it is defined, in plain JAX. It runs on any device.
REFERENCE = Backend(
    "reference",
    _join("MEANINGS"),
    max_experts=1 << 30,
    max_top_k=1 << 30,
    # Where no kernel is, it runs the other ops as fast as anything else does.
    slow=frozenset({"moe_mlp", "grouped_gemm", "quantize_nvfp4"}),
)
# In order of preference. The last record of an op is its definition, and the source of gradients.
RECORDS = (*itertools.chain(*(room.BACKENDS for room in _ROOMS)), XLA, REFERENCE)


def find_backend(name: str) -> Backend:
    """Return the record called `name`.

    Raises:
      ValueError: if there is no such backend; the message lists the known ones.
    """
    for record in RECORDS:
        if record.name == name:
            return record
    known = ", ".join(record.name for record in RECORDS)
    raise ValueError(f"backend: expected one of {known}; got {name!r}")


# `copy.deepcopy` and `pickle` of a module store the names of its records. Copied records would be
# unequal static fields, and JAX would compile every program again for them.
copyreg.pickle(Backend, lambda record: (find_backend, (record.name,)))
