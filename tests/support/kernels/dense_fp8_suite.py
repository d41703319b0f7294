"""Test the CUDA kernel for FP8 weights and few rows, on a GPU and compiled for the CPU."""

import dataclasses
import functools

import ml_dtypes
import numpy as np
import pytest
from support.kernels.axes import axis
from support.kernels.dense_few_suite import check_biases, sum_by_xla, sum_in_order

from jax_nvfp4_moe.testing import assert_as_accurate_as

E4M3 = ml_dtypes.float8_e4m3fn
# Rows, n, k. The sizes cross every boundary inside the kernel, as those of `dense_few_suite` do. k
# is a multiple of 16.
SIZES = {
    "smallest": (1, 1, 16),
    "one_row": (1, 200, 1040),
    "one_long_row": (1, 24, 4176),
    "router": (1, 128, 2048),
    "odd_width": (3, 77, 48),
    "eight_rows": (8, 264, 592),
    "nine_rows": (9, 77, 1040),
    "sixteen_rows": (16, 130, 2064),
    "seventeen_rows": (17, 45, 144),
    "thirty_two_rows": (32, 300, 592),
    "thirty_three_rows": (33, 77, 80),
    "sixty_four_rows": (64, 200, 848),
    # At least 512 outputs, for which devices of 9.0 have a kernel of their own.
    "wide_row": (1, 777, 1040),
    "wide": (16, 530, 592),
    "wide_sixty_four_rows": (64, 777, 592),
}
X_TYPES = ("bfloat16", "float16")
# What the scales of weights belong to.
SCALES = ("rows", "groups")
GROUP = 128
# How many scales the rows of x have: none, one, or one for each.
ROW_SCALES = ("none", "one", "each")
# Calls whose rows run in one form of the kernel: their number, and how many they are alone.
SHARED_FORMS = ((8, 1), (16, 9), (64, 33))
NAN_CODES = (0x7F, 0xFF)
# Calls that get NaNs: each form of each kernel.
WITH_NAN = ("one_row", "nine_rows", "sixteen_rows", "sixty_four_rows")
WITH_NAN += ("wide_row", "wide", "wide_sixty_four_rows")


@dataclasses.dataclass(frozen=True)
class Operands:
    """The operands of a call; `row_scale` may be None."""

    x: np.ndarray
    weight: np.ndarray
    scale: np.ndarray
    row_scale: np.ndarray | None = None


@dataclasses.dataclass(frozen=True)
class Call:
    """Operands, the exact result in float64, and a result with the error of plain XLA."""

    operands: Operands
    truth: np.ndarray
    yardstick: np.ndarray


def in_float64(call: Operands):
    x, weight, scale = (np.asarray(a, np.float64) for a in (call.x, call.weight, call.scale))
    scale = scale[:, None] if scale.ndim == 1 else scale.repeat(GROUP, 1)[:, : weight.shape[1]]
    return x @ (weight * scale).T * _column(call.row_scale)


def _column(row_scale):
    return 1 if row_scale is None else np.asarray(row_scale, np.float64)[:, None]


def _multiply(sum_products, call: Operands):
    """Return the float32 result whose groups of k are summed by ``sum_products(x, weight)``."""
    x, weight, scale = call.x, call.weight.astype(call.x.dtype), call.scale
    groups = [slice(None)]
    if scale.ndim == 2:
        groups = [slice(first, first + GROUP) for first in range(0, x.shape[1], GROUP)]
    total = np.zeros((x.shape[0], weight.shape[0]), np.float32)
    for index, group in enumerate(groups):
        sums = np.asarray(sum_products(x[:, group], weight[:, group]))
        total += sums * (scale if scale.ndim == 1 else scale[:, index])
    return total if call.row_scale is None else total * call.row_scale[:, None]


@functools.cache
def make(case, x_type, row_scales="none", scales="rows"):
    """Return the `Call` for a name in SIZES, or for sizes.

    Weights have all magnitudes of E4M3, subnormal ones too. The scales make all results about
    equally large. The yardstick has the larger error of two orders, as in `dense_few_suite`.
    """
    rows, n, k = SIZES[case] if isinstance(case, str) else case
    rng = np.random.default_rng((rows, n, k))
    groups = 1 if scales == "rows" else -(-k // GROUP)
    magnitude = np.exp2(rng.uniform(-7, 6, (n, groups)))
    each = magnitude.repeat(k if groups == 1 else GROUP, axis=1)[:, :k]
    weight = rng.normal(0, 1, (n, k)) * each
    scale = (rng.uniform(0.5, 1, magnitude.shape) / magnitude).astype(np.float32)
    count = {"none": None, "one": 1, "each": rows}[row_scales]
    operands = Operands(
        rng.normal(0, 1, (rows, k)).astype(x_type),
        np.clip(weight, -448, 448).astype(E4M3),
        scale[:, 0] if scales == "rows" else scale,
        None if count is None else rng.uniform(0.5, 2, count).astype(np.float32),
    )
    truth = in_float64(operands)
    results = [_multiply(sums, operands) for sums in (sum_by_xla, sum_in_order)]
    return Call(operands, truth, max(results, key=lambda y: np.abs(y - truth).max()))


def assert_accurate(y, call):
    assert (y.shape, y.dtype) == (call.truth.shape, np.float32)
    assert_as_accurate_as(y, call.yardstick, call.truth)


def swap(call, **changes):
    return dataclasses.replace(call.operands, **changes)


class DenseFp8Suite:
    """Subclasses have a fixture `run(operands, dtype, bias)`, which returns the result in `dtype`.

    The defaults are float32 and no bias.
    """

    x_type = axis(*X_TYPES)
    scales = axis(*SCALES)
    width = axis(77)  # of outputs, where a test has no sizes of its own

    @pytest.fixture
    def run(self):
        raise NotImplementedError("a subclass says how to call its kernels")

    @pytest.mark.parametrize("row_scales", ROW_SCALES)
    @pytest.mark.parametrize("case", SIZES)
    def test_matches_float64(self, run, case, x_type, row_scales, scales):
        call = make(case, x_type, row_scales, scales)
        assert_accurate(np.asarray(run(call.operands)), call)

    @pytest.mark.parametrize("fault", ["last", "neighbor", "row", "low bits", "scale", "row scale"])
    @pytest.mark.parametrize("case", ["nine_rows", "sixteen_rows", "sixty_four_rows", "wide"])
    def test_bound_catches_a_fault(self, run, case, fault, x_type, scales):
        """A weight or a scale is left out, or is that of a neighbor."""
        call = make(case, x_type, "each", scales)
        wrong, changes = call.operands.weight.copy(), {}
        if fault == "last":
            wrong[:, -1] = 0
        elif fault == "neighbor":
            wrong[:, [8, 9]] = wrong[:, [9, 8]]
        elif fault == "row":
            wrong = np.roll(wrong, 1, axis=0)
        elif fault == "low bits":
            wrong.view(np.uint8)[...] &= 0xFE
        elif fault == "scale":
            changes["scale"] = np.roll(call.operands.scale, 1, axis=-1)
        else:
            changes["row_scale"] = np.roll(call.operands.row_scale, 1)
        with pytest.raises(AssertionError, match="yardstick"):
            assert_accurate(np.asarray(run(swap(call, weight=wrong, **changes))), call)

    @pytest.mark.parametrize(
        "sizes", [(64, 254, 64), (16, 254, 16), (8, 254, 16), (64, 762, 64), (8, 762, 16)], ids=str
    )
    def test_all_numbers_of_e4m3_are_exact(self, run, sizes, x_type, scales):
        """Rows that are unit vectors pick single weights."""
        rows, n, k = sizes
        x = np.eye(rows, k, dtype=x_type)
        codes = np.add.outer(np.arange(n), 5 * np.arange(k)) % 254
        codes = (codes + (codes >= NAN_CODES[0])).astype(np.uint8)
        weight = codes.view(E4M3)
        scale = np.ones(n if scales == "rows" else (n, 1), np.float32)
        y = np.asarray(run(Operands(x, weight, scale)))
        np.testing.assert_array_equal(y, weight.T[:rows].astype(np.float32))
        assert np.abs(y).max() == 448
        assert np.abs(y[y != 0]).min() == 2.0**-9

    @pytest.mark.parametrize("code", NAN_CODES)
    @pytest.mark.parametrize("case", WITH_NAN)
    def test_nan_stays_nan_and_alone(self, run, case, code, x_type, scales):
        call = make(case, x_type, scales=scales)
        n, k = call.operands.weight.shape
        places = {(0, 0), (9, k - 1), (n // 2, k // 2), (n // 2 + 8, 3), (n - 1, 14)}
        weight, without = call.operands.weight.copy(), call.operands.weight.copy()
        for row, column in places:
            weight.view(np.uint8)[row, column] = code
            without[row, column] = 0
        found, expected = (np.asarray(run(swap(call, weight=w))) for w in (weight, without))
        spoiled = np.isin(np.arange(n), [row for row, _ in places])
        assert np.isnan(found[:, spoiled]).all()
        assert found[:, ~spoiled].tobytes() == expected[:, ~spoiled].tobytes()

    @pytest.mark.parametrize("case", ["odd_width", "sixteen_rows", "sixty_four_rows", "wide"])
    def test_a_narrow_result_is_the_float32_one_rounded(self, run, case, x_type, scales):
        call = make(case, x_type, "each", scales).operands
        wide, narrow = (np.asarray(run(call, dtype)) for dtype in (np.float32, call.x.dtype))
        assert narrow.dtype == call.x.dtype
        assert narrow.tobytes() == wide.astype(call.x.dtype).tobytes()

    @pytest.mark.parametrize("case", ["odd_width", "thirty_three_rows", "wide"])
    def test_a_bias_is_added_before_the_result_is_rounded(self, run, case, x_type, scales):
        call = make(case, x_type, "each", scales).operands
        check_biases(np.asarray(run(call)), call.x.dtype, lambda *how: run(call, *how))

    @pytest.mark.parametrize(("many", "few"), SHARED_FORMS)
    def test_rows_have_the_bits_that_they_have_alone(self, run, many, few, x_type, scales, width):
        call = make((many, width, 592), x_type, scales=scales)
        alone = np.asarray(run(swap(call, x=call.operands.x[:few])))
        assert alone.tobytes() == np.asarray(run(call.operands))[:few].tobytes()

    @pytest.mark.parametrize("rows", [3, 12, 20])
    def test_a_row_that_is_not_finite_stays_alone(self, run, rows, x_type, scales, width):
        call = make((rows, width, 144), x_type, scales=scales)
        x = call.operands.x.copy()
        x[1] = np.array([np.inf, np.nan, -np.inf] * 48, x.dtype)
        found, expected = (np.asarray(run(swap(call, x=one))) for one in (x, call.operands.x))
        others = np.arange(rows) != 1
        assert found[others].tobytes() == expected[others].tobytes()
        assert np.isnan(found[1]).all()

    def test_scales_multiply_in_their_order(self, run, x_type, width):
        """Sums are multiplied by the scale of the row first, which may overflow or be rounded."""
        call = make((4, width, 144), x_type)
        rng = np.random.default_rng(3)
        sums = np.asarray(run(swap(call, scale=np.ones(width, np.float32))))
        row_scale = (rng.uniform(1, 2, 4) * np.exp2([0, 40, 120, -40])).astype(np.float32)
        scale = (call.operands.scale * np.float32(2.0**-100)).astype(np.float32)
        found = np.asarray(run(swap(call, row_scale=row_scale, scale=scale)))
        with np.errstate(all="ignore"):
            expected = sums * row_scale[:, None] * scale
        np.testing.assert_array_equal(found, expected)

    def test_groups_with_equal_scales_are_rows_with_a_scale(self, run, x_type, width):
        """Groups of the same scale are as accurate as one scale for their row."""
        call = make((20, width, 592), x_type)
        scale = np.exp2(np.arange(width) % 9 - 4).astype(np.float32)
        found, expected = (
            np.asarray(run(swap(call, scale=one)))
            for one in (np.tile(scale[:, None], (1, 5)), scale)
        )
        call = dataclasses.replace(
            call,
            operands=swap(call, scale=scale),
            truth=in_float64(swap(call, scale=scale)),
            yardstick=expected,
        )
        assert_accurate(found, call)

    def test_small_rows_keep_their_values(self, run, x_type, scales, width):
        """Powers of two in the scales make up for those in x, so that no bit may change."""
        call = make((4, width, 144), x_type, scales=scales)
        exponent = 90 if x_type == "bfloat16" else 4
        # Smaller numbers would lose bits as subnormal numbers of float16.
        kept = np.where(np.abs(call.operands.x) >= 2.0**-10, call.operands.x, 0).astype(x_type)
        small = (kept * np.array(2.0**-exponent, x_type)).astype(x_type)
        row_scale = np.full(4, 2.0**exponent, np.float32)
        found = np.asarray(run(swap(call, x=small, row_scale=row_scale)))
        np.testing.assert_array_equal(found, np.asarray(run(swap(call, x=kept))))
