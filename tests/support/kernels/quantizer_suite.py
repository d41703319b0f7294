"""Tests that every quantizer must pass: values that are hard to quantize, and the exact bytes.

A test module subclasses the suites and defines the fixture `run`, which calls its quantizer.
"""

import functools

import ml_dtypes
import numpy as np
import pytest
from support.kernels import float64_layer
from support.kernels.axes import axis
from support.kernels.float64_layer import E4M3

BF16, F16, F32 = ml_dtypes.bfloat16, np.float16, np.float32
DTYPES = {"bf16": BF16, "f16": F16, "f32": F32}
LAYOUTS = ("linear", "swizzle_128x4")
# Global scales: ordinary ones, and those at which block scales underflow or overflow.
SCALES = (1.0, 0.3, 1 / 2688, 3.7e-5, 1e-20, 1e-30, 1e-38, 1e30, 1e36, 0.0, None)
SHAPES = ((0, 64), (1, 16), (1, 48), (3, 8192), (128, 64), (129, 80), (300, 336))


@functools.cache
def finite(dtype):
    """Return every finite value of a 16-bit dtype, once, in random order, as rows of 16."""
    values = np.arange(65536, dtype=np.uint16).view(dtype)
    values = values[np.isfinite(values.astype(np.float32))]
    values = np.random.default_rng(2).permutation(values)
    return np.resize(values, (len(values) // 16 + 1, 16))


@functools.cache
def beside_six(dtype):
    """Return all finite values up to 6, in blocks that start with a 6.

    The block scale is 1 if the global scale is 1.
    """
    values = finite(dtype).reshape(-1)
    values = values[np.abs(values.astype(np.float32)) <= 6]
    rows = np.resize(values, (len(values) // 15 + 1, 15))
    return np.concatenate([np.full((len(rows), 1), 6, dtype), rows], axis=1)


@functools.cache
def alone(dtype):
    """Return one block for each finite value, in which that value sets the scale."""
    values = finite(dtype).reshape(-1)
    rows = np.zeros((len(values), 16), dtype)
    rows[:, 3] = values
    rows[:, 5] = -values // 3
    return rows


@functools.cache
def awkward(dtype):
    """Return rows of ties, zeros of both signs, subnormals, NaN and infinities."""
    ties = np.array([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 0.0], np.float32)
    ties = np.concatenate([ties, -ties])
    rows = [ties, np.roll(ties, 5) * 4, ties * np.float32(2.0**-9), ties * np.float32(448 / 5)]
    rows += [np.zeros(16), -np.zeros(16), np.full(16, 1e-7), np.full(16, 6e4)]
    tiny = np.float32(ml_dtypes.finfo(dtype).smallest_subnormal)
    rows += [np.arange(16) * tiny, np.full(16, -tiny)]
    for value in (np.nan, -np.nan, np.inf, -np.inf):
        rows += [np.where(np.arange(16) == 3, value, ties), np.full(16, value)]
    with np.errstate(over="ignore"):
        return np.stack(rows).astype(np.float32).astype(dtype)


@functools.cache
def numbers(dtype):
    """Return the awkward rows without NaN and infinities, which have a joint global scale."""
    rows = awkward(dtype)
    return rows[np.isfinite(rows.astype(np.float32)).all(-1)]


def random(dtype, rows, seed):
    """Return rows of 1024 normal values, each row with a magnitude of its own."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((rows, 1024), np.float32)
    return (x * np.exp2(rng.uniform(-12, 8, (rows, 1)).astype(np.float32))).astype(dtype)


@functools.cache
def of_shape(dtype, shape):
    """Return normal values."""
    return np.random.default_rng(4).normal(0, 1, shape).astype(dtype)


@functools.cache
def random_rows(dtype, rows, seed):
    """Return `random` for the tests of all instruction sets."""
    return random(dtype, rows, seed)


@functools.cache
def expected(make, arguments, g):
    """Return packed and block_scale of numpy, which layouts and instruction sets share."""
    x = make(*arguments)
    return float64_layer.quantize(x, joint_scale(x) if g is None else np.float32(g))


def joint_scale(x):
    """Return the global scale of x if none is given."""
    return np.abs(x.astype(np.float32)).max(initial=0) / np.float32(2688)


def differing_bytes(x, g, scale_layout, quantized, expected=None):
    """Count bytes of packed, block_scale and global_scale that differ from numpy's IEEE results.

    Args:
      x: ``[m, k]``.
      g: the global scale that was asked for, or None.
      scale_layout: "linear" or "swizzle_128x4".
      quantized: packed, block_scale and global_scale.
      expected: packed and block_scale from numpy. None, the default, computes them.
    """
    packed, block_scale, scale = (np.asarray(a) for a in quantized)
    if g is None:
        g = joint_scale(x)
    want_packed, want_scale = expected or float64_layer.quantize(x, np.float32(g))
    if scale_layout == "swizzle_128x4":
        want_scale = float64_layer.swizzle_128x4(want_scale.view(E4M3))
    want_scale, block_scale = want_scale.view(np.uint8), block_scale.view(np.uint8)
    assert packed.shape == want_packed.shape
    assert block_scale.shape == want_scale.shape
    same_scale = np.array_equal(scale, np.float32(g), equal_nan=True)
    return int((packed != want_packed).sum() + (block_scale != want_scale).sum()) + (not same_scale)


def assert_exact(run, x, g, layout="linear", expected=None):
    scale = None if g is None else np.float32(g)
    assert differing_bytes(x, g, layout, run(x, scale, layout), expected) == 0


def assert_exact_on(run, make, *arguments, g, layout="linear"):
    """Check the quantizer on ``make(*arguments)``, a function above that is called once."""
    want = expected(make, arguments, g)
    assert_exact(run, make(*arguments), g, layout, want)


class QuantizerSuite:
    """Test that every byte is that of numpy.

    ``run(x, g, layout)`` returns packed, block_scale and global_scale; g is float32 or None.
    """

    dtype = axis(*DTYPES)
    layout = axis(*LAYOUTS)
    random_rows = 500

    @pytest.fixture
    def run(self):
        raise NotImplementedError("a subclass says how to call its quantizer")

    @pytest.mark.parametrize("g", SCALES)
    def test_quantizer_on_awkward_values(self, run, dtype, layout, g):
        assert_exact_on(run, awkward, DTYPES[dtype], g=g, layout=layout)
        assert_exact_on(run, numbers, DTYPES[dtype], g=g, layout=layout)

    @pytest.mark.parametrize("g", SCALES)
    @pytest.mark.parametrize("dtype_of_16_bits", [BF16, F16], ids=["bf16", "f16"])
    def test_quantizer_on_every_finite_value(self, run, dtype_of_16_bits, g):
        assert_exact_on(run, finite, dtype_of_16_bits, g=g)

    @pytest.mark.parametrize("dtype_of_16_bits", [BF16, F16], ids=["bf16", "f16"])
    def test_quantizer_on_every_value_beside_six(self, run, dtype_of_16_bits):
        assert_exact_on(run, beside_six, dtype_of_16_bits, g=1.0)

    @pytest.mark.parametrize("shape", SHAPES)
    def test_quantizer_on_any_shape(self, run, dtype, layout, shape):
        for g in (1 / 2688, None):
            assert_exact_on(run, of_shape, DTYPES[dtype], shape, g=g, layout=layout)

    def test_quantizer_on_random_values(self, run, dtype):
        for seed, g in ((3, 0.0173), (4, None)):
            assert_exact_on(run, random_rows, DTYPES[dtype], self.random_rows, seed, g=g)

    def test_comparison_catches_round_half_up(self, run):
        x = numbers(F32)[:4]
        quantized = run(np.nextafter(x, np.float32(np.inf)), np.float32(1), "linear")
        assert differing_bytes(x, 1.0, "linear", quantized) > 0


class EveryScaleSuite:
    """Add to `QuantizerSuite`: every finite value sets the scale of a block."""

    @pytest.mark.parametrize("g", SCALES)
    @pytest.mark.parametrize("dtype_of_16_bits", [BF16, F16], ids=["bf16", "f16"])
    def test_quantizer_on_every_value_alone(self, run, dtype_of_16_bits, g):
        assert_exact_on(run, alone, dtype_of_16_bits, g=g)
