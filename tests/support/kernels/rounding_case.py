"""A W4A4 layer with exact sums, whose outputs are the rounded activations to the bit.

NVFP4 represents x exactly, and the second GEMM is the identity. The outputs are Q(a), where a is
the activation of exact sums. Gates are so large that their sigmoid is 1.
"""

import numpy as np
from support.kernels.float64_layer import E4M3, Layer, Options, encode_e2m1, moe

HIDDEN, EXPERTS, TOKENS = 144, 5, 70
# Activations that the epilogues round. The limit of swigluoai, 7, would keep the sigmoids below 1.
ACTIVATIONS = ("silu", "gelu", "gelu_tanh", "relu2", "gelu_tanh_no_mul")
# Input scales for activations up to a few hundred. Block scales are within range, clamped at 448,
# or subnormal.
_INPUT_SCALES = np.array([2.0**-3 * 1.37, 0.031, 1.7, 40.0, 250.0], np.float32)
_GRID = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)


def _pack(values):
    """Return the packed codes of E2M1 values, with block scales of 1."""
    codes = encode_e2m1(values.astype(np.float32))
    packed = codes[..., 0::2] | codes[..., 1::2] << 4
    return packed, np.ones((*values.shape[:-1], values.shape[-1] // 16), E4M3)


def _tokens(rng):
    """Return rows with a few E2M1 values. The largest of every nonzero block is 6."""
    x = np.zeros((TOKENS, HIDDEN // 16, 16), np.float32)
    for row in x[1:]:  # the first row stays zero
        for block in rng.choice(HIDDEN // 16, 3, replace=False):
            row[block, rng.choice(16, 2, replace=False)] = 6, rng.choice(_GRID)
    return x.reshape(TOKENS, HIDDEN)


def make(activation: str, dtype, seed=0):
    """Return the operands of `moe` and the outputs ``[t, h]`` that its kernel must give.

    `float64_layer.moe` computes the outputs. Its GEMMs are exact, so that only the layer rounds.
    """
    rng, options = np.random.default_rng(seed), Options(activation, activation_scale="static")
    up = rng.choice([-4.0, -1.0, -0.5, 0.0, 0.5, 1.0, 3.0], (EXPERTS, HIDDEN, HIDDEN))
    gate_up = np.concatenate([np.full_like(up, 6), up], 1) if options.gated else up
    parts = 2 if options.gated else 1
    down = np.broadcast_to(np.eye(HIDDEN, dtype=np.float32), (EXPERTS, HIDDEN, HIDDEN))
    none = np.zeros((0, 0), np.float32)
    layer = Layer(
        *_pack(gate_up),
        np.tile(np.array([[1, 0.125]] if options.gated else [[0.5]], np.float32), (EXPERTS, 1)),
        np.ones(EXPERTS, np.float32),
        none,
        *_pack(down),
        np.ones((EXPERTS, 1), np.float32),
        _INPUT_SCALES,
        none,
    )
    assert layer.gate_up_global_scale.shape == (EXPERTS, parts)
    ids = rng.integers(-1, EXPERTS, (TOKENS, 1)).astype(np.int32)
    operands = _tokens(rng).astype(dtype), layer, ids, np.ones((TOKENS, 1), np.float32), options
    outputs = moe(*operands).astype(np.float32).astype(dtype)
    assert len(np.unique(np.abs(outputs[outputs != 0]))) > 30  # outputs show many codes and scales
    return operands, outputs
