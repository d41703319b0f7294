"""Call the kernel for plain weights and few rows that `cuda_emulation` compiles for the CPU."""

import ctypes
import functools
from typing import ClassVar

import numpy as np
from support.emulation.cuda_emulation import _LEAST_SHARED_BYTES, _TYPES, HOPPER_SHARED_BYTES, _run


class _DenseFewCall(ctypes.Structure):
    _fields_: ClassVar = [
        *((name, ctypes.c_int64) for name in ("rows", "n", "k")),
        *((name, ctypes.c_int) for name in ("type", "weight_type", "output_type")),
        *((name, ctypes.c_int64) for name in ("row_scales", "scale_groups", "bias_size")),
        ("weight_is_unchanged", ctypes.c_bool),
    ]


class DenseFewCut(ctypes.Structure):
    """How the kernel for plain weights and few rows cuts a layer (dense_few.cuh)."""

    _fields_: ClassVar = [
        (name, ctypes.c_int32) for name in ("tile", "ranks", "rank_pieces", "shared_bytes")
    ]


def _dense_call(types, rows, n, k, row_scales=0, groups=0, bias_size=0, older=False):
    names = (_TYPES[np.dtype(name).name] for name in types)
    return _DenseFewCall(rows, n, k, *names, row_scales, groups, bias_size, older)


def cut_dense_few(library, sizes, x_type, weight_type, multiprocessors, *, clusters=True):
    """Return how the kernel for plain weights cuts a layer of ``sizes = (rows, n, k)``.

    The layer has a bias in float32, which takes the most shared memory.
    """
    library.configure(multiprocessors, HOPPER_SHARED_BYTES, 0)
    types = x_type, weight_type, "float32"
    cut, call = DenseFewCut(), _dense_call(types, *sizes, bias_size=4)
    library.cut_dense_few(ctypes.byref(call), int(clusters), ctypes.byref(cut))
    return cut


def dense_few(
    library,
    x,
    weight,
    dtype,
    multiprocessors,
    *,
    scale=None,
    row_scale=None,
    bias=None,
    clusters=True,
    older=False,
    sm90=False,
):
    """Return ``x @ weight.T + bias`` in `dtype` for few rows of plain weights.

    E4M3 weights have a `scale` for each of their rows, or for each 128 weights of a row. Rows of x
    have one or none. If `older`, the weights are older than the preceding kernel. If `sm90`, the
    kernel for 9.0 runs.
    """
    (rows, k), n = x.shape, weight.shape[0]
    row_scales = 0 if row_scale is None else row_scale.size
    groups = scale.shape[1] if scale is not None and scale.ndim == 2 else 0
    bias_size = 0 if bias is None else bias.dtype.itemsize
    types = x.dtype, weight.dtype, dtype
    sizes = _dense_call(types, rows, n, k, row_scales, groups, bias_size, older)
    if sm90:
        call = functools.partial(library.dense_sm90, ctypes.byref(sizes))
        shared_bytes = HOPPER_SHARED_BYTES
    else:
        call = functools.partial(library.dense_few, ctypes.byref(sizes), int(clusters))
        shared_bytes = _LEAST_SHARED_BYTES
    y = np.empty((rows, n), dtype)
    operands = [x, weight, scale, row_scale, bias]
    arrays = _run(library, call, operands, [y], 0, multiprocessors, shared_bytes)
    return arrays[0]
