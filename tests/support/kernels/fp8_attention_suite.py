"""Tests that attention must pass with keys and values in FP8, and those for a kernel alone."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest
from support.kernels.attention_suite import (
    CASES,
    SINKS,
    Case,
    check_padding,
    in_float64,
    plain,
    worst,
)
from support.kernels.axes import axis

from jax_nvfp4_moe.ops.causal_attention.cuda import takes_fp8_kernel

FP8 = jnp.dtype("float8_e4m3fn")
# In some heads, most numbers of the cache are subnormal, or many are the largest one.
SCALES = (0.02, 60.0, 1.0, 0.0125, 0.3, 7.0, 0.001)


def takes_kernel(case: Case) -> bool:
    """Return whether the kernel for FP8 runs a case on a GPU."""
    rows = case.t * (case.heads[0] // case.heads[1])
    return takes_fp8_kernel(rows, *case.widths)


# Those of the other suite, and more for the kernel: it needs widths that are multiples of 16.
FP8_CASES = CASES | {
    "one key of sixteen channels": Case(1, (1, 1), 1, (16, 16), (0,)),
    "parts and sinks of FP8": Case(2, (8, 1), 600, (64, 48), (540,), {"sinks": SINKS}),
    "a full cache": Case(1, (8, 2), 512, (128, 128), (511, 511)),
    "windows of FP8": Case(5, (4, 2), 400, (96, 32), (380, 0), {"window": 130}),
    "chunks of FP8": Case(3, (7, 1), 300, (48, 80), (290, 128), {"chunk": 129}),
    "eight tokens of eight heads": Case(8, (8, 1), 700, (128, 128), (690,), {"window": 600}),
    "17 rows of the widest": Case(17, (1, 1), 300, (256, 240), (280,), {"scale": 0.02}),
    "64 rows with sinks": Case(32, (4, 2), 200, (192, 128), (168, 3), {"sinks": SINKS[:4]}),
}
KERNEL_CASES = [name for name, case in FP8_CASES.items() if takes_kernel(case)]
WIDTHS = ((64, 64), (128, 128), (192, 128), (256, 256))
OPTIONS = {
    "causal": {},
    "window": {"window": 60},
    "chunk": {"chunk": 129},
    "sinks": {"sinks": SINKS},
    "all": {"window": 70, "chunk": 100, "sinks": SINKS, "scale": 0.05},
}


@dataclasses.dataclass(frozen=True)
class Operands:
    """Queries, keys and values in FP8, positions and scales."""

    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    positions: np.ndarray
    k_scale: np.ndarray
    v_scale: np.ndarray

    def widened(self):
        """Return the operands of attention in float64, whose keys and values have no scales."""
        k, v = (
            x.astype(np.float64) * scale.astype(np.float64)[:, None, None]
            for x, scale in ((self.k, self.k_scale), (self.v, self.v_scale))
        )
        return self.q, k, v, self.positions

    def given(self):
        """Return the operands and the scales by name, as `ops.attention` takes them."""
        scales = {"k_scale": self.k_scale, "v_scale": self.v_scale}
        return (self.q, self.k, self.v, self.positions), scales


def make_fp8(case: Case, dtype) -> Operands:
    """Return the operands of a case. Keys that no query sees are NaN."""
    rng = np.random.default_rng(case.keys)
    b, (n, m), (d, dv) = len(case.starts), case.heads, case.widths
    k_scale, v_scale = (np.resize(np.float32(x), m) for x in (SCALES, SCALES[::-1]))
    positions = np.asarray(case.starts, np.int32)[:, None] + np.arange(case.t, dtype=np.int32)

    def rounded(width, scale):
        x = rng.normal(size=(b, m, case.keys, width)).astype(np.float32) * 1.5
        x[..., 0] *= 30  # some of them saturate
        y = np.clip(x / scale[None, :, None, None], -448, 448).astype(FP8)
        for row, last in enumerate(positions[:, -1]):
            y[row, :, last + 1 :] = np.nan
        return y

    k, v = rounded(d, k_scale), rounded(dv, v_scale)
    q = np.asarray(rng.normal(size=(b, case.t, n, d)) * 1.5, dtype)
    q[..., 0] /= 30
    return Operands(q, k, v, positions, k_scale, v_scale)


def plain_fp8(x: Operands, **options):
    """Return the result of plain XLA, which widens keys and values to the dtype of the queries."""
    k, v = (np.where(np.isnan(e.astype(np.float32)), 0, e).astype(FP8) for e in (x.k, x.v))
    return plain(x.q, k, v, x.positions, **options, k_scale=x.k_scale, v_scale=x.v_scale)


def find_bound(x: Operands, **options):
    """Return the exact result of a call, and twice the error of plain XLA."""
    expected = in_float64(*x.widened(), **options)
    return expected, 2 * worst(plain_fp8(x, **options), expected)


def codes(shape):
    """Return an array that has all finite E4M3 numbers."""
    every = np.arange(256, dtype=np.uint8)
    return np.resize(every[(every & 0x7F) != 0x7F], shape).view(FP8)


def codes_by_exponent():
    """Return E4M3 numbers ``[16, 12]`` that have one exponent, for each exponent.

    The first and the last mantissa are missing, because they may be zero and NaN.
    """
    mantissas = np.arange(1, 7, dtype=np.uint8)
    magnitudes = np.arange(16, dtype=np.uint8)[:, None] * 8 + mantissas
    return np.concatenate([magnitudes, magnitudes | 0x80], axis=1).view(FP8)


class Fp8AttentionSuite:
    """Subclasses have the axes `dtype` and `case`, and a fixture `run(q, k, v, positions, ...)`.

    Kernels are compiled for some widths. A subclass whose code is the same for all takes fewer.
    """

    widths = axis(*WIDTHS)
    widths_of_nan = axis((64, 64), (192, 128), (256, 256))
    width = axis(64, 128, 256)

    def assert_accurate(self, run, case, dtype, options):
        x = make_fp8(case, jnp.dtype(dtype))
        (expected, bound), (operands, scales) = find_bound(x, **options), x.given()
        y = run(*operands, **scales, **options)
        assert y.dtype == dtype
        assert worst(y, expected) <= bound

    def test_matches_float64(self, run, case, dtype):
        self.assert_accurate(run, FP8_CASES[case], dtype, FP8_CASES[case].options)

    @pytest.mark.parametrize("options", OPTIONS)
    def test_each_width_and_option(self, run, widths, options, dtype):
        case = Case(2, (8, 2), 400, widths, (300, 90))
        self.assert_accurate(run, case, dtype, OPTIONS[options])

    @pytest.mark.parametrize("name", ["k_scale", "v_scale"])
    @pytest.mark.parametrize("fault", ["one", "another head"])
    def test_a_wrong_scale_is_found(self, run, dtype, name, fault):
        x = make_fp8(FP8_CASES["seven key heads"], jnp.dtype(dtype))
        (expected, bound), (operands, scales) = find_bound(x), x.given()
        assert worst(run(*operands, **scales), expected) <= bound
        right = scales[name]
        scales[name] = np.ones_like(right) if fault == "one" else np.roll(right, 1)
        assert worst(run(*operands, **scales), expected) > 5 * bound

    def test_a_wrong_window_is_found(self, run, dtype):
        x = make_fp8(FP8_CASES["windows of FP8"], jnp.dtype(dtype))
        (expected, bound), (operands, scales) = find_bound(x, window=130), x.given()
        assert worst(run(*operands, **scales, window=129), expected) > 2 * bound

    @pytest.mark.parametrize("t", [1, 40])
    def test_every_number_is_exact(self, run, dtype, width, t):
        """A query that sees one key returns its value, to the bit."""
        q = np.ones((1, t, 1, width), jnp.dtype(dtype))
        v = codes((1, 1, 40, width))
        k, one = np.ones_like(v), np.ones(1, np.float32)
        positions = np.arange(t, dtype=np.int32)[None]
        y = run(q, k, v, positions, window=1, k_scale=one, v_scale=one)
        np.testing.assert_array_equal(np.asarray(y)[0, :, 0], v[0, 0, :t].astype(y.dtype))

    @pytest.mark.parametrize("byte", [0x7F, 0xFF])
    @pytest.mark.parametrize("t", [1, 40])
    def test_nan_stays_nan(self, run, dtype, byte, widths_of_nan, t):
        x = make_fp8(Case(t, (2, 2), 300, widths_of_nan, (250,)), jnp.dtype(dtype))
        nan = np.uint8(byte).view(FP8)
        (q, k, v, at), scales = x.given()
        k, v = k.copy(), v.copy()
        k[0, 0, 77, 5] = nan
        v[0, 1, 201, 43] = nan
        y = np.asarray(run(q, k, v, at, **scales), np.float32)
        assert np.isnan(y[:, :, 0]).all()
        channels = np.isnan(y[:, :, 1])
        assert channels[..., 43].all()
        assert channels.sum() == channels[..., 43].sum()


class Fp8KernelSuite(Fp8AttentionSuite):
    """What a kernel that reads FP8 passes besides, and plain XLA does not."""

    @pytest.mark.parametrize("d", [64, 192])
    def test_every_number_of_a_key_counts(self, run, dtype, d):
        """A head has the numbers of one exponent, and returns the weight of each of its keys."""
        numbers = codes_by_exponent().astype(np.float64)  # [heads, keys]
        heads, keys = numbers.shape
        k = np.zeros((1, heads, keys, d), FP8)
        k[0, :, :, 37] = codes_by_exponent()
        v = np.broadcast_to(np.eye(keys, 16), (1, heads, keys, 16)).astype(FP8)
        q = np.zeros((1, 1, heads, d), jnp.dtype(dtype))
        q[..., 37] = 1
        k_scale = np.float32(3 / abs(numbers).max(axis=1))
        scales = {"k_scale": k_scale, "v_scale": np.ones(heads, np.float32)}
        y = run(q, k, v, np.full((1, 1), keys - 1, np.int32), scale=1.0, **scales)
        weights = np.exp(numbers * k_scale.astype(np.float64)[:, None])
        expected = weights / weights.sum(axis=1, keepdims=True)
        # Weights are rounded before their product, and so is the result. Plain XLA rounds keys too.
        rounding = 2.0**-8 if jnp.dtype(dtype) == jnp.bfloat16 else 2.0**-11
        error = abs(np.asarray(y, np.float64)[0, 0, :, :keys] - expected) / expected
        assert error.max() < 4 * rounding
        assert (np.diff(np.sort(numbers)) * k_scale[:, None]).min() > 12 * 2.0**-8

    @pytest.mark.parametrize("options", [{}, {"window": 7}, {"chunk": 16}])
    def test_padding_is_finite_and_changes_nothing(self, run, options, dtype):
        x = make_fp8(FP8_CASES["eight tokens of eight heads"], jnp.dtype(dtype))
        operands, scales = x.given()
        check_padding(run, *operands, **scales, **options)
