"""Test the CUDA kernel for plain weights and few rows, on a GPU and compiled for the CPU."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.kernels.axes import axis

from jax_nvfp4_moe.testing import assert_as_accurate_as

# Rows, n, k. The sizes cross every boundary inside the kernel. They take all numbers of fragments.
# Some n and k fill no tile and no piece. Some blocks of a cluster have no piece, and some have more
# pieces than stages.
SIZES = {
    "smallest": (1, 1, 8),
    "one_row": (1, 200, 1048),
    "one_long_row": (1, 24, 4176),
    "router": (1, 128, 2048),
    "odd_width": (3, 77, 48),
    "eight_rows": (8, 264, 600),
    "nine_rows": (9, 77, 1040),
    "sixteen_rows": (16, 130, 2056),
    "seventeen_rows": (17, 45, 144),
    "thirty_two_rows": (32, 300, 592),
    "thirty_three_rows": (33, 77, 88),
    "sixty_four_rows": (64, 200, 840),
}
# The dtypes of x and of the weights.
PAIRS = ("bfloat16-bfloat16", "float16-float16", "bfloat16-float32")
# Exponents by which x and weights are shifted. The smallest numbers stay normal.
SHIFTS = {
    "bfloat16-bfloat16": (100, -100),
    "float16-float16": (3, -3),
    "bfloat16-float32": (80, -80),
}
# Calls with a bias. They take all tiles on the devices of the emulation, and have partial tiles.
BIASED = ("smallest", "nine_rows", "thirty_three_rows")
# Calls whose rows run in one form of the kernel: their number, and how many they are alone.
SHARED_FORMS = ((8, 2), (16, 9), (64, 33))


@dataclasses.dataclass(frozen=True)
class Call:
    """Operands, the exact result in float64, and a result with the error of plain float32 sums."""

    x: np.ndarray
    weight: np.ndarray
    truth: np.ndarray
    yardstick: np.ndarray


def in_float64(x, weight):
    return np.asarray(x, np.float64) @ np.asarray(weight, np.float64).T


@jax.jit
def sum_by_xla(x, weight):
    return jax.lax.dot(x, weight.T, preferred_element_type=jnp.float32)


def sum_in_order(x, weight):
    """Add the products in float32, one after the other along k."""
    x, weight = x.astype(np.float32), weight.astype(np.float32)
    sums = np.zeros((x.shape[0], weight.shape[0]), np.float32)
    for first in range(0, weight.shape[0], 1024):  # these sums stay in the processor's cache
        own, along = sums[:, first : first + 1024], weight[first : first + 1024].T.copy()
        for i in range(x.shape[1]):
            own += x[:, i, None] * along[i]  # of 16-bit numbers, the product is exact
    return sums


@functools.cache
def make(case, pair):
    """Return the `Call` for a name in SIZES, or for sizes.

    The order in which XLA adds depends on its version, on the device and on the sizes, and the
    errors of these orders differ by a factor of up to seven. On a CPU, some products are added in
    the order of k. The yardstick has that error, or the one of this XLA if it is larger.

    XLA has no product of 16-bit rows and float32 weights with exact products. The yardstick for
    float32 weights is therefore the error of its product with weights in the dtype of x, whose
    sums have as many terms of the same sizes.
    """
    rows, n, k = SIZES[case] if isinstance(case, str) else case
    dtype, weight_dtype = (jnp.dtype(name) for name in pair.split("-"))
    rng = np.random.default_rng((rows, n, k))
    x, weight = rng.normal(0, 1, (rows, k)).astype(dtype), rng.normal(0, 1, (n, k))
    weight = weight.astype(weight_dtype)
    truth, rounded = in_float64(x, weight), weight.astype(dtype)
    exact = in_float64(x, rounded)
    errors = [
        np.asarray(sums(x, rounded), np.float64) - exact for sums in (sum_by_xla, sum_in_order)
    ]
    return Call(x, weight, truth, truth + max(errors, key=lambda error: np.abs(error).max()))


def assert_accurate(y, call):
    assert (y.shape, y.dtype) == (call.truth.shape, np.float32)
    assert_as_accurate_as(y, call.yardstick, call.truth)


def check_biases(sums, dtype, run):
    """Check the bits of ``run(result dtype, bias)`` for biases in `dtype` and in float32.

    They are those of the float32 `sums` without a bias, plus the bias, rounded once.
    """
    drawn = np.random.default_rng(7).normal(0, 4, sums.shape[1])
    for bias in (drawn.astype(dtype), drawn.astype(np.float32)):
        exact = sums + bias.astype(np.float32)
        for result in (np.dtype(np.float32), dtype):
            found = np.asarray(run(result, bias))
            assert found.dtype == result
            assert found.tobytes() == exact.astype(result).tobytes()
            neighbor = sums + np.roll(bias, 1).astype(np.float32)
            assert bias.size == 1 or found.tobytes() != neighbor.astype(result).tobytes()
    twice = (sums.astype(dtype).astype(np.float32) + bias).astype(dtype)
    assert sums.size == 1 or found.tobytes() != twice.tobytes()  # rounding twice would be seen


class DenseFewSuite:
    """Subclasses have a fixture `run(x, weight, dtype, bias)`, which calls their kernel.

    It returns ``x @ weight.T + bias`` in `dtype`. The defaults are float32 and no bias.
    """

    pair = axis(*PAIRS)
    width = axis(77)  # of outputs, where a test has no sizes of its own

    @pytest.fixture
    def run(self):
        raise NotImplementedError("a subclass says how to call its kernels")

    @pytest.mark.parametrize("case", SIZES)
    def test_matches_float64(self, run, case, pair):
        call = make(case, pair)
        assert_accurate(np.asarray(run(call.x, call.weight)), call)

    @pytest.mark.parametrize("fault", ["last", "neighbor", "row", "low bits"])
    @pytest.mark.parametrize("case", ["one_row", "sixteen_rows", "sixty_four_rows"])
    def test_bound_catches_a_fault(self, run, case, fault, pair):
        """The last of k is left out, two of k are exchanged, or weights are those of a neighbor."""
        call = make(case, pair)
        wrong = call.weight.copy()
        if fault == "last":
            wrong[:, -1] = 0
        elif fault == "neighbor":
            wrong[:, [8, 9]] = wrong[:, [9, 8]]
        elif fault == "row":
            wrong = np.roll(wrong, 1, axis=0)
        else:  # float32 weights lose the last of their three parts, or 16-bit weights some bits
            bits = wrong.view(np.uint32 if wrong.itemsize == 4 else np.uint16)
            bits &= ~np.array(0xFF if wrong.itemsize == 4 else 1, bits.dtype)
        with pytest.raises(AssertionError, match="yardstick"):
            assert_accurate(np.asarray(run(call.x, wrong)), call)

    @pytest.mark.parametrize("case", ["odd_width", "sixteen_rows", "sixty_four_rows"])
    def test_a_narrow_result_is_the_float32_one_rounded(self, run, case, pair):
        call = make(case, pair)
        wide, narrow = (np.asarray(run(call.x, call.weight, t)) for t in (np.float32, call.x.dtype))
        assert narrow.dtype == call.x.dtype
        assert narrow.tobytes() == wide.astype(call.x.dtype).tobytes()

    @pytest.mark.parametrize("case", BIASED)
    def test_a_bias_is_added_before_the_result_is_rounded(self, run, case, pair):
        call = make(case, pair)
        sums = np.asarray(run(call.x, call.weight))
        check_biases(sums, call.x.dtype, lambda *how: run(call.x, call.weight, *how))

    @pytest.mark.parametrize(("many", "few"), SHARED_FORMS)
    def test_rows_have_the_bits_that_they_have_alone(self, run, many, few, pair, width):
        call = make((many, width, 592), pair)
        alone = np.asarray(run(call.x[:few], call.weight))
        assert alone.tobytes() == np.asarray(run(call.x, call.weight))[:few].tobytes()

    @pytest.mark.parametrize("rows", [3, 12, 20])
    def test_a_row_that_is_not_finite_stays_alone(self, run, rows, pair, width):
        call = make((rows, width, 144), pair)
        x = call.x.copy()
        x[1] = np.array([np.inf, np.nan, -np.inf] * 48, x.dtype)
        found, expected = (np.asarray(run(one, call.weight)) for one in (x, call.x))
        others = np.arange(rows) != 1
        assert found[others].tobytes() == expected[others].tobytes()
        assert np.isnan(found[1]).all()

    def test_small_weights_keep_their_values(self, run, pair):
        """Powers of two in x make up for those in the weights, so that no bit may change."""
        call = make((4, 40, 136), pair)
        large, small = (np.array(2.0**e, call.x.dtype) for e in SHIFTS[pair])
        weight = (call.weight * small.astype(call.weight.dtype)).astype(call.weight.dtype)
        shifted = np.asarray(run(call.x * large, weight))
        factor = np.float32(large) * np.float32(small)
        expected = np.asarray(run(call.x, call.weight)) * factor
        assert np.abs(expected).max() > 0
        np.testing.assert_array_equal(shifted, expected)
