"""Test the CUDA kernel for linear layers with few rows, on a GPU and compiled for the CPU."""

import dataclasses

import numpy as np
import pytest
from support.kernels import kernel_cases as cases
from support.kernels.axes import axis
from support.kernels.kernel_suite import assert_accurate, assert_inaccurate, split

# Rows, n, k. The sizes cross every boundary inside the kernel. They take one, four and eight slabs,
# and all numbers of fragments. Some n and k fill no tile, and some output tiles have one weight
# tile. Some teams and blocks have no weight tile, and some have more than they keep in flight.
LINEARS = {
    "smallest": (1, 16, 16),
    "one_row": (1, 200, 1040),
    "one_long_row": (1, 24, 4176),
    "odd_width": (3, 77, 48),
    "four_rows": (4, 136, 2064),
    "five_rows": (5, 77, 592),
    "eight_rows": (8, 200, 80),
    "nine_rows": (9, 77, 1040),
    "sixteen_rows": (16, 128, 2064),
    "seventeen_rows": (17, 45, 144),
    "thirty_two_rows": (32, 72, 592),
    "thirty_three_rows": (33, 77, 80),
    "sixty_four_rows": (64, 136, 1040),
    "sixteen_long_rows": (16, 24, 16400),
    "sixty_four_long_rows": (64, 200, 8208),
}
# Calls whose rows run in one form of the kernel: their number, and how many they are alone.
SHARED_FORMS = ((4, 2), (8, 5), (32, 9), (64, 33))


def make_linear(case, numbers, *, parts=1, bias=True):
    """Return a `kernel_cases.ProductCall` of one group, for a name in LINEARS or for sizes."""
    rows, n, k = LINEARS[case] if isinstance(case, str) else case
    return cases.make_product((rows, n, k, None), *split(numbers), parts=parts, bias=bias)


def of_rows(call, rows):
    """Return the call for some of its rows."""
    return dataclasses.replace(call, operands=(call.x[rows], *call.operands[1:]))


class LinearFewSuite:
    """Test linear layers in W4A16; `run` calls a `kernel_cases.ProductCall`."""

    numbers = axis("bf16-none", "f16-none")

    @pytest.fixture
    def run(self):
        raise NotImplementedError("a subclass says how to call its kernels")

    @pytest.mark.parametrize("case", LINEARS)
    def test_linear_matches_float64(self, run, case, numbers):
        assert_accurate(run, make_linear(case, numbers))

    @pytest.mark.parametrize(("parts", "bias"), [(1, False), (2, True), (None, False)])
    @pytest.mark.parametrize("case", ["one_row", "sixteen_rows"])
    def test_linear_of_every_form_matches_float64(self, run, case, parts, bias, numbers):
        assert_accurate(run, make_linear(case, numbers, parts=parts, bias=bias))

    @pytest.mark.parametrize("case", ["odd_width", "thirty_three_rows"])
    def test_each_row_has_its_global_scale(self, run, case, numbers):
        """The scales of other rows give a large error."""
        call = make_linear(case, numbers, parts=None, bias=False)
        assert_accurate(run, call)
        assert_inaccurate(run(cases.with_global_scales_of_other_rows(call)), call)

    @pytest.mark.parametrize("case", ["one_row", "five_rows", "sixty_four_rows"])
    def test_bound_catches_the_block_scales_of_another_tile(self, run, case, numbers):
        call = make_linear(case, numbers)
        wrong = call.operands[2].copy()
        wrong[0, 17] = np.roll(wrong[0, 17], 4)
        operands = (*call.operands[:2], wrong, *call.operands[3:])
        assert_inaccurate(run(dataclasses.replace(call, operands=operands)), call)

    @pytest.mark.parametrize(("many", "few"), SHARED_FORMS)
    def test_rows_have_the_bits_that_they_have_alone(self, run, many, few, numbers):
        call = make_linear((many, 77, 592), numbers)
        alone = np.asarray(run(of_rows(call, slice(0, few))))
        assert alone.tobytes() == np.asarray(run(call))[:few].tobytes()

    @pytest.mark.parametrize("rows", [3, 7, 20])
    def test_a_row_that_is_not_finite_stays_alone(self, run, rows, numbers):
        call = make_linear((rows, 77, 144), numbers)
        x = call.x.copy()
        x[1] = np.array([np.inf, np.nan, -np.inf] * 48, x.dtype)
        changed = dataclasses.replace(call, operands=(x, *call.operands[1:]))
        found, expected = (np.asarray(run(one)) for one in (changed, call))
        others = np.arange(rows) != 1
        assert found[others].tobytes() == expected[others].tobytes()
        assert np.isnan(found[1].astype(np.float32)).all()
