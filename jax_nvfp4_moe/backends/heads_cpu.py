"""`prepare_heads` on CPUs by the FFI kernels of ffi/cpu/heads_cpu.cc."""

from jax_nvfp4_moe.backends.attention_calls import lower_prepare_heads
from jax_nvfp4_moe.numerics.layouts import CANONICAL
from jax_nvfp4_moe.scheme import Backend, Capability, Device

HEADS_CPU = Backend(
    name="heads_cpu",
    can=Capability(
        ops=frozenset({"prepare_heads"}),
        devices=(Device(frozenset({None})),),
        platform="cpu",
        extension="_nvfp4_cpu",
        dtypes=frozenset({"bfloat16", "float16"}),
        head_widths=range(257),
    ),
    layout=CANONICAL,
    lower={
        "prepare_heads": lower_prepare_heads(
            "nvfp4_prepare_heads_cpu", "nvfp4_prepare_heads_fp8_cpu"
        )
    },
    status="executed",
    ffi_targets=("nvfp4_prepare_heads_cpu", "nvfp4_prepare_heads_fp8_cpu"),
)
