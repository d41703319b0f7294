"""Attention on CPUs by the FFI kernel of ffi/cpu/attention_cpu.cc."""

import jax

from jax_nvfp4_moe.backends.attention_calls import encode_options, encode_sinks
from jax_nvfp4_moe.numerics.layouts import CANONICAL
from jax_nvfp4_moe.scheme import Backend, Capability, Device

_TARGET = "nvfp4_attention_cpu"


def _attend(q, k, v, positions, sinks, *, scale, window, chunk, width=None):
    y = jax.ShapeDtypeStruct((*q.shape[:3], width or v.shape[3]), q.dtype)
    return jax.ffi.ffi_call(_TARGET, y, vmap_method="sequential")(
        q,
        k,
        v,
        positions,
        encode_sinks(sinks),
        **encode_options(scale, window, chunk),
    )


def _attend_to_latents(q, k, positions, sinks, *, value_width, **options):
    return _attend(q, k, k, positions, sinks, width=value_width, **options)


ATTENTION_AVX512 = Backend(
    name="attention_avx512",
    can=Capability(
        ops=frozenset({"attention", "latent_attention"}),
        devices=(Device(frozenset({None})),),
        platform="cpu",
        extension="_nvfp4_cpu.attention",
        dtypes=frozenset({"bfloat16"}),
        head_widths=range(1, 1025),
    ),
    layout=CANONICAL,
    lower={"attention": _attend, "latent_attention": _attend_to_latents},
    status="executed, measured",
    ffi_targets=(_TARGET,),
)
