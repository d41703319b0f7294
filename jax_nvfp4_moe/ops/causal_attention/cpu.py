"""Attention on CPUs by the FFI kernels of ffi/cpu/attention_cpu.cc.

The kernels read keys and values in bfloat16. A few tokens that attend to a cache in FP8 take the
blocks of `meaning` instead, which widen only what the tokens see.
"""

import functools

import jax

from jax_nvfp4_moe.backends.kernel_call import kernel_call
from jax_nvfp4_moe.backends.record import CPU, Backend, Kernel
from jax_nvfp4_moe.ops.causal_attention.cuda import encode_options, encode_sinks
from jax_nvfp4_moe.ops.causal_attention.meaning import attend_to_blocks, attend_to_latents, widen
from jax_nvfp4_moe.scheme import Problem

# Tokens of a row up to which XLA attends to a cache in FP8. More tokens pay for widening the cache.
_FEW_TOKENS = 8


def _attend(
    target,
    q,
    k,
    v,
    positions,
    sinks,
    k_scale=None,
    v_scale=None,
    *,
    scale,
    window,
    chunk,
    width=None,
):
    tokens = q.shape[1]  # a symbol in an exported program may stand for many
    if k_scale is not None and isinstance(tokens, int) and tokens <= _FEW_TOKENS:
        options = {"scale": scale, "window": window, "chunk": chunk}
        return attend_to_blocks(q, k, v, positions, sinks, k_scale, v_scale, **options)
    k, v = widen(k, k_scale, q.dtype), widen(v, v_scale, q.dtype)
    y = jax.ShapeDtypeStruct((*q.shape[:3], width or v.shape[3]), q.dtype)
    return kernel_call(target, y)(
        q,
        k,
        v,
        positions,
        encode_sinks(sinks),
        **encode_options(scale, window, chunk),
    )


def _attend_to_latents(target, q, k, positions, sinks, *, value_width, **options):
    return _attend(target, q, k, k, positions, sinks, width=value_width, **options)


def _notes(problem: Problem) -> tuple[str, ...]:
    """Say which calls with keys and values in FP8 take the kernel."""
    if problem.cache_dtype is None:
        return ()
    return (f"with keys and values in FP8, up to {_FEW_TOKENS} tokens run as plain XLA",)


def _record(isa):
    """Return the record of the kernel that has its products from the instruction set `isa`."""
    target = f"nvfp4_attention_{isa}"
    return Backend(
        f"attention_{isa}",
        {
            "attention": Kernel(_attend, target),
            "latent_attention": Kernel(_attend_to_latents, target),
        },
        (CPU,),
        part=f"attention_{isa}",
        dtypes=("bfloat16",),
        limits={"key width": range(1, 1025), "value width": range(1, 1025)},
        status="executed, measured",
        notes=_notes,
    )


ATTENTION_AMX = _record("amx")
ATTENTION_AVX512 = _record("avx512")


ATTENTION_CPU = Backend(
    "attention_cpu",
    {
        "attention": attend_to_blocks,
        "latent_attention": functools.partial(attend_to_latents, attend=attend_to_blocks),
    },
    (CPU,),
    status="executed, measured",
)
