"""Compute expert layers, grouped GEMMs and the quantizer in numpy, on a kernel's own operands.

Tests compare a kernel with these results on the same operands. Weights are bytes, as a kernel reads
them. Activations are rounded only where an op says so, to their dtype or to NVFP4.
"""

import dataclasses
import math
import typing

import ml_dtypes
import numpy as np

E4M3 = ml_dtypes.float8_e4m3fn
CODE_VALUES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
# The two values of each byte. The low nibble is the even element.
_VALUES_OF_BYTE = np.stack([np.tile(CODE_VALUES, 16), np.repeat(CODE_VALUES, 16)], -1)


class Layer(typing.NamedTuple):
    """Operands of an expert layer that do not depend on the tokens; shapes as in ffi/shapes.h."""

    gate_up_packed: np.ndarray
    gate_up_block_scale: np.ndarray
    gate_up_global_scale: np.ndarray
    gate_up_input_scale: np.ndarray
    gate_up_bias: np.ndarray
    down_packed: np.ndarray
    down_block_scale: np.ndarray
    down_global_scale: np.ndarray
    down_input_scale: np.ndarray
    down_bias: np.ndarray


@dataclasses.dataclass(frozen=True)
class Options:
    """Attributes of an expert layer."""

    activation: str = "silu"
    alpha: float = 1.702
    beta: float = 1.0
    limit: float = math.inf
    activation_scale: str = "none"
    weight_on_input: bool = False

    @property
    def gated(self):
        return not (self.activation == "relu2" or self.activation.endswith("_no_mul"))


def random_weight(rng, e, n, k):
    """Return random codes and block scales: every code, and every kind of scale except NaN."""
    packed = rng.integers(0, 256, (e, n, k // 2), np.uint8)
    scale = rng.uniform(0.25, 2.0, (e, n, k // 16)).astype(E4M3).view(np.uint8)
    odd = rng.integers(0, 8, scale.shape)
    special = rng.choice(
        np.array([0x00, 0x01, 0x07, 0x08, 0x80, 0x81, 0xB8], np.uint8), scale.shape
    )
    return packed, np.where(odd == 0, special, scale).astype(np.uint8).view(E4M3)


def random_layer(rng, e, h, i, *, gated=True, bias=False):
    """Return an expert layer whose scales are all distinct. Its outputs are of about unit size."""
    parts = 2 if gated else 1
    gate_up, gate_up_scale = random_weight(rng, e, parts * i, h)
    down, down_scale = random_weight(rng, e, h, i)
    spread = rng.uniform(0.5, 1.0, (4, e, 2)).astype(np.float32)
    none = np.zeros((0, 0), np.float32)
    return Layer(
        gate_up,
        gate_up_scale,
        spread[0, :, :parts] / np.float32(3 * h**0.5),
        spread[1, :, 0] / np.float32(400),
        rng.normal(0, 0.5, (e, parts * i)).astype(np.float32) if bias else none,
        down,
        down_scale,
        spread[2, :, :1] / np.float32(3 * i**0.5),
        spread[3, :, 0] / np.float32(400),
        rng.normal(0, 0.5, (e, h)).astype(np.float32) if bias else none,
    )


def unpack(packed):
    """Return codes [..., k]; the low nibble is the even element."""
    pairs = np.stack([packed & 15, packed >> 4], -1)
    return pairs.reshape(*packed.shape[:-1], 2 * packed.shape[-1])


def dequantize(packed, block_scale, scale=1.0):
    """Return code * block_scale * scale in float64; `scale` broadcasts over [..., n, k]."""
    blocks = _VALUES_OF_BYTE[packed].reshape(*block_scale.shape, 16)
    blocks *= block_scale.astype(np.float64)[..., None]
    values = blocks.reshape(*packed.shape[:-1], 2 * packed.shape[-1])
    values *= scale
    return values


def encode_e2m1(y):
    """Return the codes of float32 values. Ties go to even, 6 is the limit, and NaN becomes 0."""
    a = np.abs(y)
    lower_even = (a[..., None] > np.array([0.25, 1.25, 2.5, 5.0], np.float32)).sum(-1)
    lower_odd = (a[..., None] >= np.array([0.75, 1.75, 3.5], np.float32)).sum(-1)
    codes = (lower_even + lower_odd).astype(np.uint8) | (np.signbit(y).astype(np.uint8) << 3)
    return np.where(np.isnan(y), np.uint8(0), codes)


def quantize(x, g):
    """Quantize rows as `numerics.nvfp4.quantize` does; `g` is float32, a scalar or [m, 1].

    Returns packed uint8 [m, k/2] and block_scale e4m3 [m, k/16].
    """
    with np.errstate(all="ignore"):
        x, g = x.astype(np.float32), np.float32(g)
        blocks = x.reshape(x.shape[0], x.shape[1] // 16, 16)
        amax = np.abs(blocks).max(-1)
        ratio = np.where(amax == 0, np.float32(0), amax / (np.float32(6) * g))
        block_scale = np.minimum(ratio, np.float32(448)).astype(E4M3)
        # ml_dtypes may keep the sign of a NaN; the kernels write 0x7f.
        byte = np.where(np.isnan(ratio), np.uint8(0x7F), block_scale.view(np.uint8))
        block_scale = byte.astype(np.uint8).view(E4M3)
        s = (block_scale.astype(np.float32) * g)[..., None]
        codes = np.where(s == 0, np.uint8(0), encode_e2m1(blocks / s)).reshape(x.shape)
    return codes[:, 0::2] | (codes[:, 1::2] << 4), block_scale


def swizzle_128x4(block_scale):
    """Return the bytes of linear scales [m, k/16] in tiles of 128 rows by 4 blocks, zero-padded."""
    m, blocks = block_scale.shape
    padded = np.zeros((-(-m // 128) * 128, -(-blocks // 4) * 4), np.uint8)
    row, block = np.indices((m, blocks))
    tile = (row // 128) * (padded.shape[1] // 4) + block // 4
    offset = tile * 512 + row % 32 * 16 + row % 128 // 32 * 4 + block % 4
    padded.reshape(-1)[offset] = block_scale.view(np.uint8)
    return padded


def fake_quantize(x, mode, input_scale):
    """Return rows rounded to NVFP4 and back, in float64; `mode` is activation_scale."""
    if mode == "none":
        return x.astype(np.float64)
    g = np.abs(x.astype(np.float32)).max(-1, keepdims=True) / np.float32(2688)
    g = g if mode == "token" else np.float32(input_scale)
    packed, block_scale = quantize(x, g)
    s = block_scale.astype(np.float32) * g
    return CODE_VALUES[unpack(packed)] * np.repeat(s.astype(np.float64), 16, -1)


def _sigmoid(z):
    with np.errstate(over="ignore"):
        return 1 / (1 + np.exp(-z))


def _act(name, g, alpha):
    erf = np.vectorize(math.erf, otypes=[np.float64])
    return {
        "silu": lambda: g * _sigmoid(g),
        "gelu": lambda: 0.5 * g * (1 + erf(g / math.sqrt(2))),
        "gelu_tanh": lambda: (
            0.5 * g * (1 + np.tanh(math.sqrt(2 / math.pi) * (g + 0.044715 * g**3)))
        ),
        "swigluoai": lambda: g * _sigmoid(alpha * g),
        "relu2": lambda: np.maximum(g, 0) ** 2,
    }[name]()


def kind_of(activation):
    """Return the name of the function in an activation: that of the kernels' enumeration."""
    if activation == "swiglustep":
        return "silu"
    return activation.removesuffix("_no_mul").removesuffix("_uninterleave")


def activate(u, options):
    """Return the activation of u [m, n1], in the dtype of u."""
    o, limit = options, u.dtype.type(options.limit)
    kind = kind_of(o.activation)
    if not o.gated:
        return _act(kind, np.minimum(u, limit), o.alpha).astype(u.dtype)
    half = u.shape[1] // 2
    interleaved = o.activation == "swigluoai"
    gate, up = (u[:, 0::2], u[:, 1::2]) if interleaved else (u[:, :half], u[:, half:])
    up = np.clip(up, -limit, limit) + u.dtype.type(o.beta if kind == "swigluoai" else 0)
    if o.activation == "swiglustep":
        return (np.minimum(_act(kind, gate, o.alpha), limit) * up).astype(u.dtype)
    return (_act(kind, np.minimum(gate, limit), o.alpha) * up).astype(u.dtype)


def _rows_by_part(scale, n, interleaved):
    """Return the global scale of each of n weight rows, from scales [parts]."""
    parts = len(scale)
    index = np.arange(n) % parts if interleaved else np.arange(n) * parts // n
    return scale[index].astype(np.float64)[:, None]


def sequential_float32(x, w):
    """Return x @ w.T in float32, one multiply and one add after the other."""
    x, w = np.asarray(x, np.float32), np.ascontiguousarray(np.asarray(w, np.float32).T)
    y = np.zeros((x.shape[0], w.shape[1]), np.float32)
    product = np.empty_like(y)
    for k in range(x.shape[1]):
        np.multiply(x[:, k, None], w[k], out=product)
        y += product
    return y


def exact(x, w):
    """Return x @ w.T in float64."""
    return x.astype(np.float64) @ w.T


def moe(x, layer, ids, weights, options, matmul=exact):
    """Run an expert layer, expert by expert. With `exact` as `matmul`, the result is the truth.

    Another `matmul` makes the result a yardstick: all later steps use the dtype that it returns.
    """
    o, y = options, np.zeros(x.shape, np.float64)
    interleaved = o.activation == "swigluoai"
    for e in np.unique(ids[(ids >= 0) & (ids < len(layer.down_packed))]):
        n1 = layer.gate_up_packed.shape[1]
        w1 = dequantize(
            layer.gate_up_packed[e],
            layer.gate_up_block_scale[e],
            _rows_by_part(layer.gate_up_global_scale[e], n1, interleaved),
        )
        w2 = dequantize(
            layer.down_packed[e],
            layer.down_block_scale[e],
            np.float64(layer.down_global_scale[e, 0]),
        )
        token, j = np.nonzero(ids == e)
        weight = weights[token, j, None]
        rows = x[token]
        if o.weight_on_input:
            rows = (rows.astype(np.float32) * weight).astype(x.dtype)
        rows = fake_quantize(rows, o.activation_scale, layer.gate_up_input_scale[e])
        u = matmul(rows, w1)
        if layer.gate_up_bias.size:
            u = (u + layer.gate_up_bias[e]).astype(u.dtype)
        a = activate(u, o).astype(np.float32).astype(x.dtype)
        a = fake_quantize(a, o.activation_scale, layer.down_input_scale[e])
        d = matmul(a, w2)
        if layer.down_bias.size:
            d = (d + layer.down_bias[e]).astype(d.dtype)
        np.add.at(y, token, d if o.weight_on_input else d * weight.astype(np.float64))
    return y


def grouped_gemm(
    x, packed, block_scale, global_scale, input_scale, bias, sizes, mode, matmul=exact
):
    """Multiply rows that are sorted by group. Rows past the sum of the sizes are zeros.

    Without sizes, one group has all rows.
    """
    n, begin = packed.shape[1], 0
    y = np.zeros((x.shape[0], n), np.float64)
    sizes = sizes if sizes.size else [x.shape[0]] * len(packed)
    for e, size in enumerate(sizes):
        end = min(begin + max(int(size), 0), x.shape[0])
        scale = _rows_by_part(global_scale[e], n, interleaved=False)
        w = dequantize(packed[e], block_scale[e], scale)
        rows = fake_quantize(x[begin:end], mode, input_scale[e] if mode == "static" else 1.0)
        y[begin:end] = matmul(rows, w) + (bias[e] if bias.size else 0)
        begin = end
    return y
