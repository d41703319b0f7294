"""Emit one XLA FFI call for attention, and for what prepares its queries, keys and values."""

import jax
import jax.numpy as jnp
import numpy as np

from jax_nvfp4_moe.backends.attention import PADDING, widen
from jax_nvfp4_moe.backends.kernel_call import kernel_call
from jax_nvfp4_moe.scheme import Problem

# The kernel for keys and values in FP8 runs for up to FP8_ROWS rows of a key head, and for heads
# whose width is a multiple of FP8_FACTOR.
FP8_ROWS, FP8_FACTOR = 64, 16


def lower_prepare_heads(ffi_target, fp8_target):
    """Return the function that lowers `prepare_heads` to an FFI target.

    The kernel writes the new keys and values into the memory of the cache.

    Args:
      ffi_target: name under which the extension registers the target.
      fp8_target: name of the target for a cache in FP8.
    """

    def lower(qkv, positions, keys, values, weights, k_scale=None, v_scale=None, *, options):
        (b, t, width), (_, m, _, d) = qkv.shape, keys.shape
        outputs = (
            jax.ShapeDtypeStruct((b, t, options.count_queries(width, m, d), d), qkv.dtype),
            jax.ShapeDtypeStruct(keys.shape, keys.dtype),
            jax.ShapeDtypeStruct(values.shape, values.dtype),
        )
        call = kernel_call(
            ffi_target if k_scale is None else fp8_target,
            outputs,
            input_output_aliases={2: 1, 3: 2},
        )
        # The kernel reads weights of the dtype of the heads, or of float32.
        own = [
            weight if weight.dtype == qkv.dtype else weight.astype(jnp.float32)
            for weight in weights or (jnp.zeros(0, qkv.dtype),) * 2
        ]
        rope = options.rope
        frequencies = () if rope is None else rope.frequencies
        scales, rounding = (), {}
        if k_scale is not None:
            scales = k_scale, v_scale
            rounding = {"multiply_by_reciprocal": options.multiply_by_reciprocal}
        return call(
            qkv,
            positions,
            keys,
            values,
            *own,
            jnp.asarray(frequencies, jnp.float32),
            *scales,
            eps=np.float32(options.eps),
            rotation_scale=np.float32(1 if rope is None else rope.scale),
            rotates_first=options.rotates_first,
            gated=options.gated,
            **rounding,
        )

    return lower


def lower_prepare_latents(ffi_target):
    """Return the function that lowers `prepare_latents` to an FFI target.

    The kernel writes the new latents and keys into the memory of the cache.

    Args:
      ffi_target: name under which the extension registers the target.
    """

    def lower(down, positions, cache, q_weight, kv_weight, *, options):
        (b, t, width), own = down.shape, cache.shape[3]
        outputs = (
            jax.ShapeDtypeStruct((b, t, width - own), down.dtype),
            jax.ShapeDtypeStruct(cache.shape, cache.dtype),
        )
        call = kernel_call(
            ffi_target,
            outputs,
            input_output_aliases={2: 1},
        )
        # The kernel reads both weights in the dtype of the tokens, or both in float32.
        given = [w for w in (q_weight, kv_weight) if w is not None]
        kept = all(weight.dtype == down.dtype for weight in given)
        weight_dtype = down.dtype if kept else jnp.float32
        rope = options.rope
        return call(
            down,
            positions,
            cache,
            jnp.zeros(0, weight_dtype) if q_weight is None else q_weight.astype(weight_dtype),
            kv_weight.astype(weight_dtype),
            jnp.asarray(() if rope is None else rope.frequencies, jnp.float32),
            eps=np.float32(options.eps),
            rotation_scale=np.float32(1 if rope is None else rope.scale),
            interleaved=options.interleaved,
        )

    return lower


def lower_absorb_queries(ffi_target):
    """Return the function that lowers `head_products.absorb_queries` to an FFI target.

    Args:
      ffi_target: name under which the extension registers the target.
    """

    def lower(q, keys, positions, *, rope, interleaved):
        b, t, n, width = q.shape
        output = jax.ShapeDtypeStruct((b * t, n, width - keys.shape[1] + keys.shape[2]), q.dtype)
        y = kernel_call(ffi_target, output)(
            q.reshape(b * t, n, width),
            keys,
            positions.reshape(-1),
            jnp.asarray(() if rope is None else rope.frequencies, jnp.float32),
            rotation_scale=np.float32(1 if rope is None else rope.scale),
            interleaved=interleaved,
        )
        return y.reshape(b, t, n, y.shape[2])

    return lower


def lower_expand_values(ffi_target):
    """Return the function that lowers `head_products.expand_values` to an FFI target.

    Args:
      ffi_target: name under which the extension registers the target.
    """

    def lower(x, values):
        b, t, n, k = x.shape
        output = jax.ShapeDtypeStruct((b * t, n, values.shape[1]), x.dtype)
        call = kernel_call(ffi_target, output)
        return call(x.reshape(b * t, n, k), values).reshape(b, t, n, values.shape[1])

    return lower


def takes_fp8_kernel(rows: int, *widths: int) -> bool:
    """Return whether attention to keys and values in FP8 takes the kernel for them.

    With more rows, each thread block would decode all keys again, and with other widths, rows of
    the cache are not aligned.

    Args:
      rows: number of queries that share a key head: those of all new tokens.
      *widths: widths of the keys and of the values.
    """
    return rows <= FP8_ROWS and not any(width % FP8_FACTOR for width in widths)


def note_fp8_attention(problem: Problem) -> tuple[str, ...]:
    """Say which calls with keys and values in FP8 take the kernel for them."""
    if problem.cache_dtype is None:
        return ()
    return (
        f"up to {FP8_ROWS} queries for each key head, with widths that are multiples of "
        f"{FP8_FACTOR}, take the kernel for FP8; for others, XLA widens all keys and values first",
    )


def lower_attention(ffi_target, workspace_bytes, fp8_target):
    """Return the function that lowers `attention` to an FFI target.

    The kernel needs a scale above 0. Another sign or a scale of 0 is moved into the queries.

    Args:
      ffi_target: name under which the extension registers the target.
      workspace_bytes: ``(b, t, n, m, s, dv) -> int``, the size of the scratch result; the handler
        checks it.
      fp8_target: name of the target for keys and values in FP8. If `takes_fp8_kernel` is False,
        XLA widens all keys and values to the dtype of the queries instead.
    """

    def lower(q, k, v, positions, sinks, k_scale=None, v_scale=None, *, scale, window, chunk):
        target, entries, (_, t, n, d) = ffi_target, (k, v), q.shape
        if k_scale is not None:
            if isinstance(t, int) and takes_fp8_kernel(t * (n // k.shape[1]), d, v.shape[3]):
                target, entries = fp8_target, (k, v, k_scale, v_scale)
            else:
                entries = widen(k, k_scale, q.dtype), widen(v, v_scale, q.dtype)
        visible, operands = (scale, window, chunk), (q, entries, positions, sinks)
        return _call_attention(target, workspace_bytes, operands, v.shape[3], *visible)

    return lower


def lower_latent_attention(ffi_target, workspace_bytes):
    """Return the function that lowers attention without separate values to an FFI target.

    Args:
      ffi_target: name under which the extension registers the target.
      workspace_bytes: see `lower_attention`.
    """

    def lower(q, k, positions, sinks, *, value_width, scale, window, chunk):
        visible, operands = (scale, window, chunk), (q, (k,), positions, sinks)
        return _call_attention(ffi_target, workspace_bytes, operands, value_width, *visible)

    return lower


def _call_attention(ffi_target, workspace_bytes, operands, dv, scale, window, chunk):
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
        jax.ShapeDtypeStruct((workspace_bytes(b, t, n, m, s, dv),), jnp.uint8),
    )
    call = kernel_call(ffi_target, outputs)
    return call(
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
