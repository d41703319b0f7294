"""Run a norm and a product of its result in one chain, on kernels compiled for the CPU."""

import ctypes
import functools

import jax.numpy as jnp
import numpy as np
from cuda_emulation import (
    _ENGINES,
    _LEAST_SHARED_BYTES,
    _TYPES,
    _array,
    _ProductShape,
    _run,
    _weights,
)
from dense_emulation import _dense_call

from jax_nvfp4_moe.numerics.layouts import find_layout, to_layout

EPS = ctypes.c_float(1e-6)


def norm_and_product(library, engine, operands, weights, multiprocessors):
    """Run `ops.add_rms_norm` and a linear layer of its result.

    Args:
      library: the compiled kernels.
      engine: name of the engine of the linear layer.
      operands: x and the addend ``[rows, k]``, which may be None, and the weight of the norm.
      weights: canonical weights of the layer: ``(packed, block_scale, global_scale, input_scale,
        bias)``.
      multiprocessors: number of multiprocessors of the device.

    Returns:
      The sum, the normalized rows and the result, and the number of launches.
    """
    x, added, norm_weight = operands
    (m, k), (e, n, _), parts = x.shape, weights[0].shape, weights[2].shape[1]
    layout = find_layout("mma_64x64")
    packed, block_scale = to_layout(jnp.asarray(weights[0]), jnp.asarray(weights[1]), layout)
    shape, code = _ProductShape(m, n, n, k, e, parts), _ENGINES[engine]
    types = _TYPES[x.dtype.name], _TYPES[norm_weight.dtype.name]
    call = functools.partial(library.norm_and_product, ctypes.byref(shape), *types, code, EPS)
    size = library.grouped_gemm_workspace_bytes(ctypes.byref(shape), code)
    inputs = [x, added, norm_weight, *_weights(packed, block_scale, *weights[2:])]
    outputs = [np.empty_like(x), np.empty_like(x), np.empty((m, n), x.dtype)]
    found = _run(library, call, [_array(a) for a in inputs], outputs, size, multiprocessors)
    return found, library.launch_count()


def norm_and_dense(library, operands, weight, scale, multiprocessors):
    """Likewise for plain weights ``[n, k]``; E4M3 weights have a `scale` for each of their rows."""
    x, added, norm_weight = operands
    (rows, k), n = x.shape, weight.shape[0]
    sizes = _dense_call((x.dtype, weight.dtype, "float32"), rows, n, k)
    types = (_TYPES[norm_weight.dtype.name], EPS)
    call = functools.partial(library.norm_and_dense, ctypes.byref(sizes), *types)
    inputs = [x, _array(added), norm_weight, weight, scale]
    outputs = [np.empty_like(x), np.empty_like(x), np.empty((rows, n), np.float32)]
    found = _run(library, call, inputs, outputs, 0, multiprocessors, _LEAST_SHARED_BYTES)
    return found, library.launch_count()
