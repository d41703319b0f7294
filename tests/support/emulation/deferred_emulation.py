"""Call pairs of kernels that run as one, which `cuda_emulation` compiles for the CPU.

Each function returns all results of the pair, and the number of its launches. If `together`, the
second kernel does the work of the first one.
"""

import ctypes
import functools

import jax.numpy as jnp
import numpy as np
from support.emulation.attention_emulation import _attention_shape, _heads_call
from support.emulation.cuda_emulation import _ENGINES, _TYPES, _array, _ProductShape, _run, _weights
from support.emulation.dense_emulation import _dense_call

from jax_nvfp4_moe.numerics.layouts import find_layout, to_layout

_EPS = ctypes.c_float(1e-6)


def _counted(library, *arguments, **options):
    results = _run(library, *arguments, **options)
    return [array.tobytes() for array in results], library.launch_count()


def norm_and_dense(library, norm, weight, bias, multiprocessors, *, older, together):
    """Normalize the row ``x + added``, and multiply it by plain weights with float32 sums."""
    x, added, norm_weight = norm
    (n, k), bias_size = weight.shape, 0 if bias is None else bias.dtype.itemsize
    sizes = _dense_call(
        (x.dtype, weight.dtype, np.float32), 1, n, k, bias_size=bias_size, older=older
    )
    call = functools.partial(
        library.norm_and_dense,
        *(_TYPES[norm_weight.dtype.name], _EPS, ctypes.byref(sizes), int(together)),
    )
    operands = [x, _array(added), norm_weight, weight, bias]
    return _counted(library, call, operands, [x, x, np.empty(n, np.float32)], 0, multiprocessors)


def norm_and_linear(library, engine, norm, product, multiprocessors, *, older, together):
    """Normalize the row ``x + added``, and multiply it by NVFP4 weights.

    `product` has the operands of `cuda_emulation.grouped_gemm`; its x is not used.
    """
    x, added, norm_weight = norm
    _, packed, block_scale, global_scale, input_scale, bias, _ = product
    n, k = packed.shape[1], x.shape[1]
    packed, block_scale = to_layout(
        jnp.asarray(packed), jnp.asarray(block_scale), find_layout("mma_64x64")
    )
    shape = _ProductShape(1, n, n, k, 1, global_scale.shape[1])
    call = functools.partial(
        library.norm_and_linear,
        *(_TYPES[norm_weight.dtype.name], _EPS, ctypes.byref(shape), _TYPES[x.dtype.name]),
        *(_ENGINES[engine], int(older), int(together)),
    )
    size = library.grouped_gemm_workspace_bytes(ctypes.byref(shape), _ENGINES[engine])
    weights = map(_array, _weights(packed, block_scale, global_scale, input_scale, bias))
    operands = [x, _array(added), norm_weight, *weights]
    return _counted(library, call, operands, [x, x, np.empty(n, x.dtype)], size, multiprocessors)


def combine_and_norm(library, tokens, norm, num_experts, multiprocessors, *, together):
    """Sum the outputs of the experts of each token, and normalize ``x`` plus the sum.

    `tokens` has the outputs, the ids of experts and their weights, and `norm` has x and a weight.
    The sum over experts is not among the results.
    """
    (t, top_k, h), dtype = tokens[0].shape, tokens[0].dtype
    x, weight = norm
    call = functools.partial(
        library.combine_and_norm,
        *(ctypes.c_int64(t), h, top_k, num_experts, _TYPES[dtype.name]),
        *(_TYPES[weight.dtype.name], _EPS, int(together)),
    )
    (_, *results), launches = _counted(
        library, call, [*tokens, x, weight], [x, x, x], 0, multiprocessors
    )
    return results, launches


def gated_and_norm(library, parts, gate, norm, multiprocessors, *, together):
    """Add two parts with a gate, and normalize ``x`` plus the result.

    `gate` is None, the gates of all rows, or the input and the weight of a linear gate. `norm` has
    x and a weight. The gated sum is not among the results.
    """
    (rows, h), dtype = parts[0].shape, parts[0].dtype
    x, weight = norm
    gates = (None, *gate) if isinstance(gate, tuple) else (gate, None, None)
    k = gate[1].size if isinstance(gate, tuple) else 0
    call = functools.partial(
        library.gated_and_norm,
        *(ctypes.c_int64(size) for size in (rows, h, k)),
        *(_TYPES[dtype.name], _TYPES[weight.dtype.name], _EPS, int(together)),
    )
    (_, *results), launches = _counted(
        library, call, [*parts, *map(_array, gates), x, weight], [x, x, x], 0, multiprocessors
    )
    return results, launches


def heads_and_attention(
    library, call, *, older, together, multiprocessors=132, shared_bytes, **options
):
    """Prepare the heads of `head_suite.Call`, and compute their attention.

    Without `together`, the results are those of two calls; otherwise there are no queries, which
    this leaves out in both cases. `options` are those of `ops.attention`.
    """
    sizes, (b, t, n, d) = _heads_call(call)
    shape = _attention_shape(np.empty((b, t, n, d)), call.keys, call.values)
    window, chunk = options.get("window") or 0, options.get("chunk") or 0
    bound = functools.partial(
        library.heads_and_attention,
        *(ctypes.byref(sizes), ctypes.byref(shape), ctypes.c_float(d**-0.5)),
        *(window, chunk, int(older), int(together)),
    )
    weights = (None, None) if call.weights is None else call.weights
    rope = call.options.rope
    frequencies = np.float32(() if rope is None else rope.frequencies)
    operands = [call.qkv, call.positions, *weights, frequencies, _array(options.get("sinks"))]
    likes = [np.empty((b, t, n, d), call.qkv.dtype)] * 2
    size = library.attention_workspace_bytes(ctypes.byref(shape))
    (y, _, *cache), launches = _counted(
        library,
        bound,
        operands,
        likes,
        size,
        multiprocessors,
        shared_bytes,
        in_place=(call.keys, call.values),
    )
    return [y, *cache], launches
