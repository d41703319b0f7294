"""Call the kernels of gated operations that `cuda_emulation` compiles for the CPU."""

import ctypes
import functools

import numpy as np
from support.emulation.cuda_emulation import _TYPES, _activation, _array, _run


def activate(library, gate_up, options):
    """Return the activation ``[rows, i]`` of ``gate_up [rows, 2 i]``, as `ops.activate` does."""
    rows, width = gate_up.shape
    parameters = _activation(options)
    sizes = ctypes.c_int64(rows), ctypes.c_int64(width // 2)
    call = functools.partial(
        library.activate, *sizes, _TYPES[gate_up.dtype.name], ctypes.byref(parameters)
    )
    y = np.empty((rows, width // 2), gate_up.dtype)
    return _run(library, call, [gate_up], [y], 0, multiprocessors=1)[0]


def add_gated(library, x, gate, z):
    """Return ``x + sigmoid(gate) * z``, as `ops.add_gated` does."""
    sizes = (ctypes.c_int64(size) for size in x.shape)
    call = functools.partial(library.add_gated, *sizes, _TYPES[x.dtype.name])
    return _run(library, call, [x, _array(gate), z], [x], 0, multiprocessors=1)[0]


def add_linear_gated(library, x, gate_input, gate_weight, z):
    """Return ``x + sigmoid(gate_input @ gate_weight) * z``, as `ops.add_linear_gated` does."""
    sizes = (ctypes.c_int64(size) for size in (*x.shape, len(gate_weight)))
    call = functools.partial(library.add_linear_gated, *sizes, _TYPES[x.dtype.name])
    return _run(library, call, [x, gate_input, gate_weight, z], [x], 0, multiprocessors=1)[0]


def gate_heads(library, x, gates):
    """Return ``x * sigmoid(gate)``, as `ops.gate_heads` does."""
    sizes = (ctypes.c_int64(size) for size in (*x.shape, gates.shape[1]))
    call = functools.partial(library.gate_heads, *sizes, _TYPES[x.dtype.name])
    return _run(library, call, [x, gates], [x], 0, multiprocessors=1)[0]
