"""Attention on CPUs by the FFI kernel of ffi/cpu/attention_cpu.cc."""

import jax
import jax.numpy as jnp
import numpy as np

from jax_nvfp4_moe.numerics.layouts import CANONICAL
from jax_nvfp4_moe.scheme import Backend, Capability, Device

_MOST_POSITIONS = 1 << 30  # no key has this position or a later one


def _attend(q, k, v, positions, sinks, **options):
    return _call("nvfp4_attention_cpu", q, (k, v), positions, sinks, v.shape[3], **options)


def _attend_to_latents(q, k, positions, sinks, *, value_width, **options):
    return _call("nvfp4_latent_attention_cpu", q, (k,), positions, sinks, value_width, **options)


def _call(target, q, entries, positions, sinks, width, *, scale, window, chunk):
    y = jax.ShapeDtypeStruct((*q.shape[:3], width), q.dtype)
    return jax.ffi.ffi_call(target, y, vmap_method="sequential")(
        q,
        *entries,
        positions,
        jnp.zeros(0, jnp.float32) if sinks is None else sinks.astype(jnp.float32),
        scale=np.float32(scale),
        window=np.int32(min(window or 0, _MOST_POSITIONS)),
        chunk=np.int32(min(chunk or 0, _MOST_POSITIONS)),
    )


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
    ffi_targets=("nvfp4_attention_cpu", "nvfp4_latent_attention_cpu"),
)
