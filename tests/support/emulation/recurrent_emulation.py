"""Call the recurrent kernels that `cuda_emulation` compiles for the CPU."""

import ctypes
import functools
from typing import ClassVar

import numpy as np
from support.emulation.cuda_emulation import (
    _TYPES,
    HOPPER_SHARED_BYTES,
    _Activation,
    _activation,
    _run,
)
from support.kernels.float64_layer import Options

from jax_nvfp4_moe.ops.recurrent.delta_rule import delta_rule_workspace_bytes
from jax_nvfp4_moe.ops.recurrent.mamba2_scan import mamba2_scan_workspace_bytes

_LARGE = 132  # multiprocessors of a device with room for all blocks of a step


class _DeltaStepCall(ctypes.Structure):
    _fields_: ClassVar = [
        ("b", ctypes.c_int64),
        *((name, ctypes.c_int32) for name in ("key_heads", "shared", "d", "e", "taps")),
        ("type", ctypes.c_int),
        ("interleaved", ctypes.c_bool),
        ("scale", ctypes.c_float),
        ("eps", ctypes.c_float),
        ("channel_decays", ctypes.c_bool),
        ("lower_bound", ctypes.c_float),
        ("state_is_unchanged", ctypes.c_bool),
    ]


class _Mamba2StepCall(ctypes.Structure):
    _fields_: ClassVar = [
        ("b", ctypes.c_int64),
        *((name, ctypes.c_int32) for name in ("heads", "groups", "p", "n", "taps")),
        ("type", ctypes.c_int),
        ("activation", _Activation),
        ("smallest_step", ctypes.c_float),
        ("largest_step", ctypes.c_float),
        ("eps", ctypes.c_float),
        ("state_is_unchanged", ctypes.c_bool),
    ]


class _DeltaRuleCall(ctypes.Structure):
    _fields_: ClassVar = [
        *((name, ctypes.c_int64) for name in ("b", "t")),
        *((name, ctypes.c_int32) for name in ("key_heads", "shared", "d", "e")),
        ("normalize", ctypes.c_bool),
        ("scale", ctypes.c_float),
        ("channel_decays", ctypes.c_bool),
    ]


class _Mamba2ScanCall(ctypes.Structure):
    _fields_: ClassVar = [
        *((name, ctypes.c_int64) for name in ("b", "t")),
        *((name, ctypes.c_int32) for name in ("heads", "groups", "p", "n")),
    ]


class _ConvolutionCall(ctypes.Structure):
    _fields_: ClassVar = [
        *((name, ctypes.c_int64) for name in ("b", "t", "columns")),
        *((name, ctypes.c_int32) for name in ("channels", "first", "heads", "stride")),
        ("widths", ctypes.c_int32 * 3),
        ("taps", ctypes.c_int32),
        ("type", ctypes.c_int),
    ]


def causal_convolution(
    library,
    x,
    positions,
    inputs,
    *,
    weight,
    bias,
    widths,
    first,
    heads,
    stride,
    multiprocessors=1,
):
    """Return the parts and the new inputs, as `ops.causal_convolution` does."""
    (b, t, columns), (channels, taps) = x.shape, weight.shape
    own = (ctypes.c_int32 * 3)(*widths)
    sizes = b, t, columns, channels, first, heads, stride, own, taps
    call = _ConvolutionCall(*sizes, _TYPES[x.dtype.name])
    bound = functools.partial(library.causal_convolution, ctypes.byref(call))
    parts = [np.empty((b, t, heads * width), np.float32) for width in widths]
    missing = [np.empty(0, np.float32)] * (3 - len(parts))
    operands = [x, positions, weight, bias]
    results = _run(
        library, bound, operands, [*parts, *missing], 0, multiprocessors, in_place=(inputs,)
    )
    return tuple(results[: len(parts)]), results[-1]


def gated_delta_rule(
    library,
    *operands,
    lengths=None,
    normalize=False,
    multiprocessors=1,
    shared_bytes=HOPPER_SHARED_BYTES,
):
    """Return the results and the new state, as `ops.gated_delta_rule` does."""
    *tokens, state = (np.asarray(x) for x in operands)
    v, channel_decays = tokens[2], tokens[3].ndim == 5
    b, t, m, r, e = v.shape
    d = state.shape[3]
    call = _DeltaRuleCall(b, t, m, r, d, e, normalize, d**-0.5, channel_decays)
    size = delta_rule_workspace_bytes(b, t, m, r, channel_decays)
    if library.delta_rule_workspace_bytes(ctypes.byref(call)) != size:
        raise RuntimeError("Python and C++ disagree on the size of the workspace")
    bound = functools.partial(library.delta_rule, ctypes.byref(call))
    operands = [*tokens, lengths]
    return _run(library, bound, operands, [v], size, multiprocessors, shared_bytes, (state,))


def mamba2_scan(
    library,
    *operands,
    lengths=None,
    multiprocessors=1,
    shared_bytes=HOPPER_SHARED_BYTES,
):
    """Return the results and the new state, as `ops.mamba2_scan` does."""
    *tokens, state = (np.asarray(x) for x in operands)
    x, B = tokens[0], tokens[3]
    (b, t, h, p), (g, n) = x.shape, B.shape[2:]
    call = _Mamba2ScanCall(b, t, h, g, p, n)
    size = mamba2_scan_workspace_bytes(b, t, g, h // g)
    if library.mamba2_scan_workspace_bytes(ctypes.byref(call)) != size:
        raise RuntimeError("Python and C++ disagree on the size of the workspace")
    bound = functools.partial(library.mamba2_scan, ctypes.byref(call))
    operands = [*tokens, lengths]
    return _run(library, bound, operands, [x], size, multiprocessors, shared_bytes, (state,))


def gated_delta_step(library, *tokens, interleaved, eps, rates=None, older=False, **weights):
    """Return y, the new inputs and the new state, as `ops.gated_delta_step` does.

    If `older`, all but the token is older than the preceding kernel, on a large device.
    """
    projected, positions, inputs, state = tokens
    b, m, r, d, e = state.shape
    sizes = b, m, r, d, e, weights["conv_weight"].shape[1]
    kind = _TYPES[inputs.dtype.name]
    call = _DeltaStepCall(*sizes, kind, interleaved, d**-0.5, eps, False, 0.0, older)
    return _delta_step(
        library, call, (projected, positions, rates, None, None), inputs, state, weights
    )


def kimi_delta_step(
    library,
    projected,
    *,
    positions,
    inputs,
    state,
    decays,
    gates,
    eps,
    lower_bound=None,
    rates=None,
    older=False,
    **weights,
):
    """Return y, the new inputs and the new state, as `ops.kimi_delta_step` does.

    `older` is as for `gated_delta_step`.
    """
    b, n, d, e = state.shape
    sizes = b, n, 1, d, e, weights["conv_weight"].shape[1]
    kind = _TYPES[inputs.dtype.name]
    call = _DeltaStepCall(*sizes, kind, False, d**-0.5, eps, True, lower_bound or 0.0, older)
    tokens = projected, positions, rates, decays, gates
    return _delta_step(library, call, tokens, inputs, state, weights)


def _delta_step(library, call, tokens, inputs, state, weights):
    """Run a step. The tokens are projected, positions, rates, decays and gates, or None."""
    bound = functools.partial(library.delta_step, ctypes.byref(call))
    names = ("conv_weight", "A_log", "dt_bias", "norm")
    operands = [*tokens[:2], *(weights[name] for name in names), *tokens[2:]]
    y = np.empty((call.b, 1, call.key_heads * call.shared * call.e), inputs.dtype)
    multiprocessors = _LARGE if call.state_is_unchanged else 1
    return _run(library, bound, operands, [y], 0, multiprocessors, in_place=(inputs, state))


def mamba2_step(library, *tokens, activation, step_limits, eps, older=False, **weights):
    """Return y, the new inputs and the new state, as `ops.mamba2_step` does.

    `older` is as for `gated_delta_step`.
    """
    projected, positions, inputs, state = tokens
    (b, heads, p, n), (channels, taps) = state.shape, weights["conv_weight"].shape
    sizes = b, heads, (channels - heads * p) // (2 * n), p, n, taps
    kind = _activation(Options(activation=activation.name, limit=activation.limit))
    call = _Mamba2StepCall(*sizes, _TYPES[inputs.dtype.name], kind, *step_limits, eps, older)
    bound = functools.partial(library.mamba2_step, ctypes.byref(call))
    names = ("conv_weight", "conv_bias", "A_log", "dt_bias", "D", "norm")
    operands = [projected, positions, *(weights[name] for name in names)]
    y, scratch = np.empty((b, 1, heads * p), inputs.dtype), 4 * b * heads * p
    multiprocessors = _LARGE if older else 1
    return _run(library, bound, operands, [y], scratch, multiprocessors, in_place=(inputs, state))
