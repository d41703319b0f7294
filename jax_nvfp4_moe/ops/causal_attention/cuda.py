"""Attention on NVIDIA GPUs by the FFI kernels of ffi/cuda/attention."""

import jax
import jax.numpy as jnp
import numpy as np

from jax_nvfp4_moe.backends.kernel_call import kernel_call, scratch
from jax_nvfp4_moe.backends.launch_facts import facts, workspace_bytes
from jax_nvfp4_moe.backends.record import CUDA, HALVES, Backend, Kernel
from jax_nvfp4_moe.ops.causal_attention.cudnn import attend_with_cudnn
from jax_nvfp4_moe.ops.causal_attention.meaning import widen
from jax_nvfp4_moe.ops.positions import PADDING
from jax_nvfp4_moe.scheme import Problem


def takes_fp8_kernel(rows: int, *widths: int) -> bool:
    """Return whether attention to keys and values in FP8 takes the kernel for them.

    With more rows, each thread block would decode all keys again, and with other widths, rows of
    the cache are not aligned.

    Args:
      rows: number of queries that share a key head: those of all new tokens.
      *widths: widths of the keys and of the values.
    """
    factor = facts().E4M3_HEAD_WIDTHS.step
    return rows <= facts().E4M3_ATTENTION_ROWS[-1] and not any(width % factor for width in widths)


def note_fp8_attention(problem: Problem) -> tuple[str, ...]:
    """Say which calls with keys and values in FP8 take the kernel for them."""
    if problem.cache_dtype is None:
        return ()
    return (
        f"up to {facts().E4M3_ATTENTION_ROWS[-1]} queries for each key head, with widths that are "
        f"multiples of {facts().E4M3_HEAD_WIDTHS.step}, take the kernel for FP8; for others, XLA "
        "widens all keys and values first",
    )


def lower_attention(
    ffi_target,
    fp8_target,
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
):
    """Lower `attention` to an FFI target.

    The kernel needs a scale above 0. Another sign or a scale of 0 is moved into the queries.

    Args:
      fp8_target: name of the target for keys and values in FP8. If `takes_fp8_kernel` is False,
        XLA widens all keys and values to the dtype of the queries instead.
    """
    target, entries, (_, t, n, d) = ffi_target, (k, v), q.shape
    if k_scale is not None:
        if isinstance(t, int) and takes_fp8_kernel(t * (n // k.shape[1]), d, v.shape[3]):
            target, entries = fp8_target, (k, v, k_scale, v_scale)
        else:
            entries = widen(k, k_scale, q.dtype), widen(v, v_scale, q.dtype)
    visible, operands = (scale, window, chunk), (q, entries, positions, sinks)
    return _call_attention(target, operands, v.shape[3], *visible)


def lower_latent_attention(
    ffi_target, q, k, positions, sinks, *, value_width, scale, window, chunk
):
    """Lower attention without separate values to an FFI target."""
    visible, operands = (scale, window, chunk), (q, (k,), positions, sinks)
    return _call_attention(ffi_target, operands, value_width, *visible)


def _call_attention(ffi_target, operands, dv, scale, window, chunk):
    """Call a kernel of attention; see `lower_attention`.

    `operands` are the queries, a tuple of the keys and perhaps the values and their scales,
    positions and sinks.
    """
    q, entries, positions, sinks = operands
    (b, t, n, _), (m, s) = q.shape, entries[0].shape[1:3]
    _check_known_sizes(ffi_target, {"b": b, "t": t, "s": s})
    if scale <= 0:
        q, scale = q * jnp.asarray(np.sign(scale), q.dtype), abs(scale) or 1.0
    outputs = (
        jax.ShapeDtypeStruct((b, t, n, dv), q.dtype),
        scratch(workspace_bytes(ffi_target, b, t, n, m, s, dv)),
    )
    return kernel_call(ffi_target, outputs)(
        q,
        *entries,
        positions,
        encode_sinks(sinks),
        **encode_options(scale, window, chunk),
    )[0]


def encode_sinks(sinks):
    """Return the operand `sinks` of a kernel of attention, which is empty if there are none."""
    return jnp.zeros(0, jnp.float32) if sinks is None else sinks.astype(jnp.float32)


def encode_options(scale, window, chunk):
    """Return the attributes of a kernel of attention, in which 0 means no window or chunk."""
    return {
        "scale": np.float32(scale),
        "window": np.int32(min(window or 0, PADDING)),
        "chunk": np.int32(min(chunk or 0, PADDING)),
    }


def _check_known_sizes(ffi_target, sizes):
    """Check that all `sizes` are numbers.

    Raises:
      ValueError: if one is a symbol of `jax.export.symbolic_shape`.
    """
    for name, size in sizes.items():
        if not isinstance(size, int):
            raise ValueError(
                f"q, k: expected a known size {name}, because the kernel {ffi_target} computes "
                f"the size of its workspace from it; got the symbolic size {size}. Export the "
                "program once for each size, or with backend='reference'"
            )


ATTENTION_CUDA = Backend(
    "attention_cuda",
    {
        "attention": Kernel(
            lower_attention,
            "nvfp4_attention_cuda",
            "nvfp4_attention_fp8_cuda",
        )
    },
    (CUDA,),
    dtypes=HALVES,
    limits={"key width": "HEAD_WIDTHS", "value width": "HEAD_WIDTHS"},
    notes=note_fp8_attention,
    derivatives={"attention": attend_with_cudnn},
)


LATENT_ATTENTION_CUDA = Backend(
    "latent_attention_cuda",
    {
        "latent_attention": Kernel(
            lower_latent_attention,
            "nvfp4_latent_attention_cuda",
        )
    },
    (CUDA,),
    dtypes=HALVES,
    limits={"key width": "LATENT_WIDTHS", "value width": "LATENT_VALUE_WIDTHS"},
    shared_bytes="SHARED_BYTES_LATENT_ATTENTION",
)
