"""Attention on CPUs by the FFI kernels of ffi/cpu/attention_cpu.cc."""

import functools

import jax

from jax_nvfp4_moe.backends.attention_calls import encode_options, encode_sinks
from jax_nvfp4_moe.numerics.layouts import CANONICAL
from jax_nvfp4_moe.scheme import Backend, Capability, Device


def _attend(q, k, v, positions, sinks, *, target, scale, window, chunk, width=None):
    y = jax.ShapeDtypeStruct((*q.shape[:3], width or v.shape[3]), q.dtype)
    return jax.ffi.ffi_call(target, y, vmap_method="sequential")(
        q,
        k,
        v,
        positions,
        encode_sinks(sinks),
        **encode_options(scale, window, chunk),
    )


def _attend_to_latents(q, k, positions, sinks, *, value_width, **options):
    return _attend(q, k, k, positions, sinks, width=value_width, **options)


def _record(isa):
    """Return the record of the kernel that has its products from the instruction set `isa`."""
    target = f"nvfp4_attention_{isa}"
    return Backend(
        name=f"attention_{isa}",
        can=Capability(
            ops=frozenset({"attention", "latent_attention"}),
            devices=(Device(frozenset({None})),),
            platform="cpu",
            extension=f"_nvfp4_cpu.attention_{isa}",
            dtypes=frozenset({"bfloat16"}),
            head_widths=range(1, 1025),
        ),
        layout=CANONICAL,
        lower={
            "attention": functools.partial(_attend, target=target),
            "latent_attention": functools.partial(_attend_to_latents, target=target),
        },
        status="executed, measured",
        ffi_targets=(target,),
    )


ATTENTION_AMX = _record("amx")
ATTENTION_AVX512 = _record("avx512")
