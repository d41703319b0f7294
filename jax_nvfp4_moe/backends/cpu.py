"""The CPU kernels: records and lowerings. The kernels are in ``ffi/cpu``."""

from jax_nvfp4_moe.backends.custom_call import lower_grouped_gemm, lower_moe, lower_quantize
from jax_nvfp4_moe.layouts import CANONICAL
from jax_nvfp4_moe.scheme import Backend, Capability, Device, Scheme

_EXTENSION = "_nvfp4_cpu"


def moe_workspace_bytes(
    tokens: int, top_k: int, num_experts: int, hidden: int, intermediate: int, *, gated: bool, dtype
) -> int:
    """Return the bytes of scratch memory that one call of the expert layer needs."""
    return 256 + 4 * tokens * top_k * (hidden + (3 if gated else 2) * intermediate)


def grouped_gemm_workspace_bytes(rows: int, num_experts: int, n: int, k: int, *, dtype) -> int:
    """Return the bytes of scratch memory that one grouped product needs."""
    return 256 + 4 * rows * k


MOE_W4A16_CPU = Backend(
    name="moe_w4a16_cpu",
    can=Capability(
        ops=frozenset({"moe_mlp", "grouped_gemm"}),
        devices=(Device(frozenset(Scheme)),),
        platform="cpu",
        extension=_EXTENSION,
    ),
    layout="cpu_16x16",
    lower={
        "moe_mlp": lower_moe("moe_w4a16_cpu", moe_workspace_bytes),
        "grouped_gemm": lower_grouped_gemm("grouped_gemm_w4a16_cpu", grouped_gemm_workspace_bytes),
    },
    status="executed, measured",
)

QUANTIZE_CPU = Backend(
    name="quantize_cpu",
    can=Capability(
        ops=frozenset({"quantize_nvfp4"}),
        devices=(Device(frozenset({None})),),
        platform="cpu",
        extension=_EXTENSION,
    ),
    layout=CANONICAL,
    lower={"quantize_nvfp4": lower_quantize("quantize_cpu")},
    status="executed",
)
