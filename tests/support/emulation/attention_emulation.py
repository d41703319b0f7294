"""Call the kernels of attention, and of what prepares it, that `cuda_emulation` compiles."""

import ctypes
import functools
from typing import ClassVar

import numpy as np
from support.emulation.cuda_emulation import (
    _LEAST_SHARED_BYTES,
    _TYPES,
    HOPPER_SHARED_BYTES,
    _array,
    _run,
)

from jax_nvfp4_moe.ops.causal_attention.cuda import (
    attention_workspace_bytes,
    latent_attention_workspace_bytes,
)


class _AttentionShape(ctypes.Structure):
    _fields_: ClassVar = [(name, ctypes.c_int64) for name in ("b", "t", "n", "m", "s", "d", "dv")]


class _LatentsCall(ctypes.Structure):
    _fields_: ClassVar = [
        *((name, ctypes.c_int32) for name in ("b", "t", "s", "r", "k", "e", "half")),
        *((name, ctypes.c_int) for name in ("type", "weight_type")),
        *((name, ctypes.c_float) for name in ("eps", "rotation_scale")),
        ("interleaved", ctypes.c_bool),
        ("starts_next", ctypes.c_bool),
    ]


class _HeadProductCall(ctypes.Structure):
    _fields_: ClassVar = [
        *((name, ctypes.c_int32) for name in ("rows", "n", "k", "outputs", "e", "half")),
        ("type", ctypes.c_int),
        ("rotation_scale", ctypes.c_float),
        ("interleaved", ctypes.c_bool),
        ("expands", ctypes.c_bool),
    ]


class _HeadsCall(ctypes.Structure):
    _fields_: ClassVar = [
        *((name, ctypes.c_int32) for name in ("b", "t", "s", "n", "m", "d", "half")),
        *((name, ctypes.c_int) for name in ("type", "weight_type")),
        *((name, ctypes.c_float) for name in ("eps", "rotation_scale")),
        ("rotates_first", ctypes.c_bool),
        ("gated", ctypes.c_bool),
        ("multiply_by_reciprocal", ctypes.c_bool),
        ("starts_next", ctypes.c_bool),
    ]


def attention(
    library,
    q,
    k,
    v,
    positions,
    *,
    window=None,
    chunk=None,
    sinks=None,
    scale=None,
    k_scale=None,
    v_scale=None,
    sm90=False,
    older=False,
    multiprocessors=1,
    shared_bytes=None,
):
    """Return the attention ``[b, t, n, dv]`` of 16-bit queries, as `ops.attention` does.

    If `sm90`, the kernel for prefills on Hopper computes it, also where others would be faster. If
    `older`, the positions are older than the preceding kernel.
    `shared_bytes` is the shared memory that a block may have. Its default is what the kernel needs.
    """
    (b, t, n, d), (m, s), dv = q.shape, k.shape[1:3], v.shape[3]
    shape = _attention_shape(q, k, v)
    call = functools.partial(
        library.attention,
        ctypes.byref(shape),
        _TYPES[q.dtype.name],
        ctypes.c_float(d**-0.5 if scale is None else scale),
        window or 0,
        chunk or 0,
        int(sm90),
        int(older),
    )
    size = library.attention_workspace_bytes(ctypes.byref(shape))
    assert size == attention_workspace_bytes(b, t, n, m, s, dv)
    operands = [q, k, v, positions, *map(_array, (sinks, k_scale, v_scale))]
    y = np.empty((b, t, n, dv), q.dtype)
    if shared_bytes is None:
        shared_bytes = HOPPER_SHARED_BYTES if sm90 else _LEAST_SHARED_BYTES
    return _run(library, call, operands, [y], size, multiprocessors, shared_bytes)[0]


def latent_attention(
    library,
    q,
    k,
    positions,
    *,
    value_width,
    window=None,
    chunk=None,
    sinks=None,
    scale=None,
    sm90=False,
    shared_bytes=_LEAST_SHARED_BYTES,
):
    """Return the attention to keys whose first channels are the values, as `ops.attention` does.

    `shared_bytes` is the shared memory that a block may have. More of it gives larger tiles. If
    `sm90`, the kernels are those that Hopper takes.
    """
    (b, t, n, d), (m, s) = q.shape, k.shape[1:3]
    shape = _AttentionShape(b, t, n, m, s, d, value_width)
    call = functools.partial(
        library.latent_attention,
        ctypes.byref(shape),
        _TYPES[q.dtype.name],
        ctypes.c_float(d**-0.5 if scale is None else scale),
        window or 0,
        chunk or 0,
        int(sm90),
    )
    size = library.latent_attention_workspace_bytes(ctypes.byref(shape))
    assert size == latent_attention_workspace_bytes(b, t, n, m, s, value_width)
    operands = [q, k, positions, _array(sinks)]
    y = np.empty((b, t, n, value_width), q.dtype)
    return _run(library, call, operands, [y], size, 1, shared_bytes)[0]


def attention_fills_sm90(library, q, k, v):
    """Return whether a Hopper GPU takes its own kernel for operands of these shapes."""
    return bool(library.attention_fills_sm90(ctypes.byref(_attention_shape(q, k, v))))


def _attention_shape(q, k, v):
    (b, t, n, d), (m, s), dv = q.shape, k.shape[1:3], v.shape[3]
    return _AttentionShape(b, t, n, m, s, d, dv)


def prepare_heads(library, call):
    """Return queries, keys and values, as `ops.heads.meaning` does.

    The kernel gets a cache of 0xff bytes. They are what it leaves alone, and become the bytes of
    the cache in `call` here. The kernel writes no number that has these bytes.
    """
    sizes, queries = _heads_call(call)
    rope = call.options.rope
    frequencies = np.float32(() if rope is None else rope.frequencies)
    weights = (None, None) if call.weights is None else call.weights
    likes = [np.empty(queries, call.qkv.dtype), call.keys, call.values]
    operands = [call.qkv, call.positions, *weights, frequencies, *(call.scales or (None, None))]
    bound = functools.partial(library.prepare_heads, ctypes.byref(sizes))
    q, *entries = _run(library, bound, operands, likes, 0, multiprocessors=1)
    kept = (call.keys, call.values)
    words = np.uint16 if call.scales is None else np.uint8
    return q, *(
        np.where(entry.view(words) == np.iinfo(words).max, old, entry)
        for entry, old in zip(entries, kept, strict=True)
    )


def _heads_call(call):
    """Return the sizes of a `head_suite.Call` for the driver, and the shape of its queries."""
    (b, t, width), (_, m, s, d) = call.qkv.shape, call.keys.shape
    n, rope = call.options.count_queries(width, m, d), call.options.rope
    weight_type = call.qkv.dtype if call.weights is None else call.weights[0].dtype
    sizes = _HeadsCall(
        *(b, t, s, n, m, d, 0 if rope is None else len(rope.frequencies)),
        *(_TYPES[dtype.name] for dtype in (call.qkv.dtype, weight_type)),
        *(call.options.eps, 1 if rope is None else rope.scale),
        *(call.options.rotates_first, call.options.gated, call.options.multiply_by_reciprocal),
    )
    return sizes, (b, t, n, d)


def prepare_latents(library, call):
    """Return queries and the cache, as `ops.latents.meaning` does.

    As in `prepare_heads`, the kernel gets a cache of 0xff bytes.
    """
    (b, t, width), (_, _, s, own) = call.down.shape, call.cache.shape
    rank, rope = len(call.kv_weight), call.options.rope
    frequencies = np.float32(() if rope is None else rope.frequencies)
    sizes = _LatentsCall(
        *(b, t, s, width - own, rank, own - rank, len(frequencies)),
        *(_TYPES[dtype.name] for dtype in (call.down.dtype, call.kv_weight.dtype)),
        *(call.options.eps, 1 if rope is None else rope.scale, call.options.interleaved),
    )
    likes = [np.empty((b, t, width - own), call.down.dtype), call.cache]
    operands = [call.down, call.positions, call.q_weight, call.kv_weight, frequencies]
    bound = functools.partial(library.prepare_latents, ctypes.byref(sizes))
    q, cache = _run(library, bound, operands, likes, 0, multiprocessors=1)
    return q, np.where(cache.view(np.uint16) == 0xFFFF, call.cache, cache)


def absorb_queries(library, q, keys, positions, *, rope, interleaved):
    """Return queries in the space of the latents, as `ops.head_products` does."""
    (b, t, n, width), (_, k, outputs) = q.shape, keys.shape
    frequencies = np.float32(() if rope is None else rope.frequencies)
    scale = 1 if rope is None else rope.scale
    sizes = _HeadProductCall(b * t, n, k, outputs, width - k, len(frequencies))
    sizes.type, sizes.rotation_scale = _TYPES[q.dtype.name], scale
    sizes.interleaved = interleaved
    call = functools.partial(library.head_product, ctypes.byref(sizes))
    y = np.empty((b, t, n, outputs + width - k), q.dtype)
    return _run(library, call, [q, keys, positions, frequencies], [y], 0, multiprocessors=1)[0]


def expand_values(library, x, values):
    """Return values of heads, as `ops.head_products` does."""
    (b, t, n, k), outputs = x.shape, values.shape[1]
    sizes = _HeadProductCall(b * t, n, k, outputs, type=_TYPES[x.dtype.name], expands=True)
    call = functools.partial(library.head_product, ctypes.byref(sizes))
    y = np.empty((b, t, n, outputs), x.dtype)
    return _run(library, call, [x, values, None, None], [y], 0, multiprocessors=1)[0]
