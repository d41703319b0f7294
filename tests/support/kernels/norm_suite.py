"""Tests that every kernel of `add_rms_norm` must pass: the error of plain XLA, and equal sums."""

import functools

import jax.numpy as jnp
import numpy as np
import pytest

from jax_nvfp4_moe.ops.norms import meaning
from jax_nvfp4_moe.testing import assert_as_accurate_as

EPS = 1e-6
# Rows and length. The lengths cover rows that a thread keeps in one piece and in several pieces,
# rows that are no multiple of 16 bytes, and rows that are too long for registers.
CASES = {
    "one row": (1, 2048),
    "shortest": (3, 16),
    "one value": (2, 1),
    "odd": (5, 16 * 27),
    "no multiple of 16 bytes": (3, 1037),
    "several pieces": (2, 7168),
    "last piece": (2, 16 * 521),
    "long": (2, 16384),
    "too long": (1, 40000),
    "no rows": (0, 64),
}
PAIRS = ("bfloat16-bfloat16", "bfloat16-float32", "float16-float16", "float32-float32")
MIXED_PAIRS = ("bfloat16-float16", "float16-float32", "float16-bfloat16", "float32-bfloat16")


@functools.cache
def make(case, pair):
    """Return x, the addend and the weight. Rows differ in size by factors of up to 1000."""
    rows, h = CASES[case]
    dtype, weight_dtype = (jnp.dtype(name) for name in pair.split("-"))
    rng = np.random.default_rng(h)
    size = 10.0 ** rng.uniform(-2, 1, (rows, 1))
    x, added = (np.asarray(rng.normal(0, 1, (rows, h)) * size, dtype) for _ in range(2))
    return x, added, np.asarray(rng.normal(1, 0.3, h), weight_dtype)


def in_float64(x, added, weight):
    """Return the normalized sum in float64; the sum has the dtype of `x`."""
    total = np.asarray(x if added is None else x + added, np.float64)
    mean = np.mean(total**2, axis=-1, keepdims=True)
    return total / np.sqrt(mean + EPS) * np.asarray(weight, np.float64)


def plain(x, added, weight):
    """Return the sum and the normalized sum by plain XLA, operation by operation."""
    operands = (None if array is None else jnp.asarray(array) for array in (x, added, weight))
    return tuple(map(np.asarray, meaning(*operands, eps=EPS)))


class NormSuite:
    """Subclasses have the axes `case` and `pair`, and a fixture `run(x, added, weight, *, eps)`."""

    def test_matches_float64(self, run, case, pair):
        x, added, weight = make(case, pair)
        for addend in (added, None):
            total, y = map(np.asarray, run(x, addend, weight, eps=EPS))
            np.testing.assert_array_equal(total, x if addend is None else x + added)
            assert (y.shape, y.dtype) == (x.shape, x.dtype)
            assert_as_accurate_as(y, plain(x, addend, weight)[1], in_float64(x, addend, weight))

    def test_bits_repeat(self, run, pair):
        operands = make("several pieces", pair)
        first, second = (run(*operands, eps=EPS) for _ in range(2))
        for a, b in zip(first, second, strict=True):
            assert np.asarray(a).tobytes() == np.asarray(b).tobytes()

    @pytest.mark.parametrize("fault", ["addend", "eps", "weight", "channel"])
    def test_bound_catches_a_fault(self, run, pair, fault):
        x, added, weight = make("odd", pair)
        truth, yardstick = in_float64(x, added, weight), plain(x, added, weight)[1]
        eps = 1e-2 if fault == "eps" else EPS
        if fault == "addend":
            added = None
        if fault == "weight":
            weight = np.roll(weight, 1)
        if fault == "channel":  # the mean is taken over one channel less
            x, added = x.copy(), added.copy()
            x[:, -1] = added[:, -1] = 0
        _, y = run(x, added, weight, eps=eps)
        with pytest.raises(AssertionError, match="yardstick"):
            assert_as_accurate_as(np.asarray(y), yardstick, truth)

    def test_a_row_that_is_not_finite_stays_alone(self, run, pair):
        x, added, weight = make("odd", pair)
        _, expected = run(x, added, weight, eps=EPS)
        wrong = x.copy()
        wrong[1, 3] = np.nan
        wrong[2, 5] = np.inf
        _, y = (np.asarray(each) for each in run(wrong, added, weight, eps=EPS))
        assert np.isnan(y[1].astype(np.float32)).all()
        assert not np.isfinite(y[2, 5].astype(np.float32))
        alone = [0, 3, 4]
        assert y[alone].tobytes() == np.asarray(expected)[alone].tobytes()

    def test_a_row_of_zeros_gives_zeros(self, run, pair):
        x, _, weight = make("odd", pair)
        _, y = run(np.zeros_like(x), None, weight, eps=EPS)
        assert not np.asarray(y).astype(np.float32).any()
