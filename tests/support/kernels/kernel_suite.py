"""Tests that every kernel of expert layers and grouped GEMMs must pass.

A test module subclasses `LayerSuite` and `ProductSuite`. It defines the fixture `run`, which calls
the kernel, and the axes, which say what the kernel supports. An `axis` is a fixture of names that a
subclass can replace.
"""

import dataclasses
import functools

import numpy as np
import pytest
from support.kernels import kernel_cases as cases
from support.kernels import rounding_case
from support.kernels.axes import axis
from support.kernels.float64_layer import CODE_VALUES, E4M3, Options
from support.kernels.kernel_cases import (
    ACTIVATIONS,
    CUDA_LAYERS,
    DTYPES,
    EMPTY,
    FAULTS,
    FAULTS_OF_W4A16,
    LAYERS,
    PRODUCTS,
)

from jax_nvfp4_moe.testing import assert_as_accurate_as


def combinations(dtypes, modes=cases.MODES):
    """Return names of all combinations of dtypes and activation scales."""
    return [f"{dtype}-{mode}" for dtype in dtypes for mode in modes]


def split(numbers):
    """Return the dtype and the activation scale of a name such as "bf16-static"."""
    dtype, mode = numbers.split("-")
    return DTYPES[dtype], mode


def assert_accurate(run, call):
    actual = np.asarray(run(call))
    assert actual.dtype == call.x.dtype
    assert actual.shape == call.truth.shape
    assert_as_accurate_as(actual, call.yardstick, call.truth, tolerated=cases.tolerated(call.mode))
    return actual


def assert_inaccurate(actual, call):
    with pytest.raises(AssertionError, match=r"over 2\.0 x"):
        assert_as_accurate_as(
            np.asarray(actual), call.yardstick, call.truth, tolerated=cases.tolerated(call.mode)
        )


def assert_zeros(y):
    assert not np.asarray(y).astype(np.float32).any()


def bits(run, call):
    return np.asarray(run(call)).tobytes()


class LayerSuite:
    """Test expert layers.

    `run` calls a `kernel_cases.LayerCall`. The axes are dtypes with activation scales: `numbers`
    are all that the kernel supports, `case_numbers` run all sizes, and `activation_numbers` run all
    activations.
    """

    numbers = axis(*combinations(DTYPES))
    case_numbers = axis(*combinations(DTYPES))
    activation_numbers = axis("bf16-none", "f16-none", "f32-none", "f16-static")
    case = axis(*LAYERS, *CUDA_LAYERS)
    make = staticmethod(cases.make_layer)

    @pytest.fixture
    def run(self):
        raise NotImplementedError("a subclass says how to call its kernels")

    def call(self, case, numbers, *, bias=False, **options):
        dtype, mode = split(numbers)
        return self.make(case, dtype, Options(activation_scale=mode, **options), bias=bias)

    def test_layer_matches_float64(self, run, case, case_numbers):
        assert_accurate(run, self.call(case, case_numbers, bias=True))

    @pytest.mark.parametrize("case", ["fills_no_tile", "several_tiles", "thirty_three_rows"])
    def test_layer_without_biases_matches_float64(self, run, case, numbers):
        assert_accurate(run, self.call(case, numbers))

    @pytest.mark.parametrize("case", EMPTY)
    def test_layer_without_choices_or_experts_gives_zeros(self, run, case, case_numbers):
        assert_zeros(run(self.call(case, case_numbers, bias=True)))

    @pytest.mark.parametrize("limit", [np.inf, 0.5])
    @pytest.mark.parametrize("activation", ACTIVATIONS)
    def test_activation_matches_float64(self, run, activation, limit, activation_numbers):
        options = {"activation": activation, "alpha": 1.25, "beta": 0.75, "limit": limit}
        assert_accurate(run, self.call("several_tiles", activation_numbers, bias=True, **options))

    @pytest.mark.parametrize("activation", ACTIVATIONS)
    def test_activation_of_few_slots_matches_float64(self, run, activation, activation_numbers):
        options = {"activation": activation, "alpha": 1.25, "beta": 0.75, "limit": 0.5}
        case = "few_slots_out_of_range"
        assert_accurate(run, self.call(case, activation_numbers, bias=True, **options))

    @pytest.mark.parametrize("activation", ["silu", "swigluoai", "relu2"])
    def test_weight_on_input_matches_float64(self, run, activation, numbers):
        options = {"activation": activation, "weight_on_input": True}
        assert_accurate(run, self.call("out_of_range", numbers, bias=True, **options))

    def test_input_scale_shared_by_all_experts(self, run, numbers):
        assert_accurate(run, cases.with_input_scale(self.call("fills_no_tile", numbers), 2.0**-9))

    def test_tokens_of_zeros_give_zeros(self, run, numbers):
        call = self.call("fills_no_tile", numbers)
        assert_zeros(run(dataclasses.replace(call, x=np.zeros_like(call.x))))

    @pytest.mark.parametrize("activation", ["silu", "relu2"])
    def test_non_finite_token_stays_alone(self, run, activation, numbers):
        """All other tokens keep their bits."""
        call = self.call("several_tiles", numbers, activation=activation)
        clean, others = np.asarray(run(call)), np.arange(len(call.x)) != 70
        for value in (np.nan, np.inf, -np.inf):
            spoiled = np.asarray(run(call.with_value(70, 33, value)))
            assert not np.isfinite(spoiled[70].astype(np.float32)).any()
            assert spoiled[others].tobytes() == clean[others].tobytes()

    @pytest.mark.parametrize("fault", FAULTS)
    def test_bound_catches_a_fault(self, run, fault, case_numbers):
        case, change = FAULTS[fault]
        call = self.call(case, case_numbers)
        assert_inaccurate(run(change(call)), call)


class UnroundedSuite:
    """Add to `LayerSuite` for kernels that leave activations as they are."""

    unrounded_numbers = axis("bf16-none", "f16-none", "f32-none")

    @pytest.mark.parametrize("fault", FAULTS_OF_W4A16)
    def test_bound_catches_a_small_fault(self, run, fault, unrounded_numbers):
        case, change = FAULTS_OF_W4A16[fault]
        call = self.call(case, unrounded_numbers)
        assert_inaccurate(run(change(call)), call)


@functools.cache
def rounding_call(activation, dtype):
    """Return a layer with exact sums and the outputs that its kernel must give."""
    operands, expected = rounding_case.make(activation, dtype)
    return cases.LayerCall(*operands), expected


class RoundingSuite:
    """Test layers with exact sums, whose outputs are the rounded activations.

    `run` is that of `LayerSuite`.
    """

    dtype = axis("bf16", "f16")

    @pytest.mark.parametrize("activation", rounding_case.ACTIVATIONS)
    def test_activations_are_rounded_as_the_format_says(self, run, activation, dtype):
        call, expected = rounding_call(activation, DTYPES[dtype])
        actual = run(call)
        np.testing.assert_array_equal(np.asarray(actual), expected)


# The sums of this data are exact, so that they have the same bits in every order. Block scales are
# multiples of 1/8 in [1, 2), so that products are multiples of 2^-8. Sums of their magnitudes are
# below 2^16, so that 24 bits hold them. Each entry is m, n, k, group sizes.
EXACT_PRODUCTS = {
    "one_block": (1, 16, 16, [1]),
    "fills_no_tile": (11, 40, 80, [3, 0, 8]),
    "every_rest_of_k": (40, 72, 112, [19, 21]),
    "long_k": (7, 24, 464, [7]),
    "tiles": (150, 200, 192, [130, 20]),
}


def exact_weight(rng, e, n, k):
    """Return random codes, and block scales in [1, 2) and (-2, -1]."""
    packed = rng.integers(0, 256, (e, n, k // 2), np.uint8)
    scale = rng.choice(np.array([0x38, 0xB8], np.uint8), (e, n, k // 16))
    return packed, (scale + rng.integers(0, 8, scale.shape, np.uint8)).view(E4M3)


def exact_rows(rng, m, k, g, dtype):
    """Return rows that NVFP4 holds exactly, with the global scale g, which is a power of two.

    The block scales are in [1, 2).
    """
    values = CODE_VALUES[rng.integers(0, 16, (m, k // 16, 16))]
    values[..., 0] = rng.choice([-6, 6], values.shape[:-1])
    scale = 1 + rng.integers(0, 8, (m, k // 16, 1)) / 8
    return (values * scale * g).reshape(m, k).astype(dtype)


@functools.cache
def exact_product(case, dtype):
    """Return the product of an entry of EXACT_PRODUCTS."""
    m, n, k, sizes = EXACT_PRODUCTS[case]
    assert k * 36 * 1.875**2 <= 2**16
    rng, e, g = np.random.default_rng(k), len(sizes), 2.0**-5
    operands = (
        exact_rows(rng, m, k, g, dtype),
        *exact_weight(rng, e, n, k),
        np.exp2(rng.integers(-4, 0, (e, 2))).astype(np.float32),
        np.full(e, g, np.float32),
        np.zeros((0, 0), np.float32),
        np.array(sizes, np.int32),
    )
    return cases.ProductCall(operands, "static")


class ProductSuite:
    """Test grouped GEMMs; `run` calls a `kernel_cases.ProductCall`."""

    case = axis(*PRODUCTS)
    numbers = axis(*combinations(DTYPES))
    case_numbers = axis(*combinations(DTYPES))
    exact_dtype = axis(*DTYPES)

    @pytest.fixture
    def run(self):
        raise NotImplementedError("a subclass says how to call its kernels")

    def assert_accurate(self, run, call):
        assert_zeros(assert_accurate(run, call)[call.rows :])

    def test_product_matches_float64(self, run, case, case_numbers):
        """Rows that no group owns are zeros."""
        parts = 1 if PRODUCTS[case][1] % 2 else 2
        call = cases.make_product(case, *split(case_numbers), parts=parts, bias=True)
        self.assert_accurate(run, call)

    @pytest.mark.parametrize(
        ("parts", "bias"), [(1, False), (1, True), (2, False), (None, False), (None, True)]
    )
    def test_product_of_every_form_matches_float64(self, run, parts, bias, numbers):
        call = cases.make_product("padding_rows", *split(numbers), parts=parts, bias=bias)
        self.assert_accurate(run, call)

    @pytest.mark.parametrize("case", ["one_row", "odd_width", "full_tiles"])
    def test_each_row_has_its_global_scale(self, run, case, numbers):
        """The scales of other rows give a large error."""
        call = cases.make_product(case, *split(numbers), parts=None)
        self.assert_accurate(run, call)
        assert_inaccurate(run(cases.with_global_scales_of_other_rows(call)), call)

    def test_product_without_experts_gives_zeros(self, run, case_numbers):
        assert_zeros(run(cases.make_product(cases.NO_EXPERTS, *split(case_numbers))))

    def test_bound_catches_wrong_block_scales(self, run, case_numbers):
        call = cases.make_product("padding_rows", *split(case_numbers))
        assert_inaccurate(run(cases.with_wrong_row_of_scales(call)), call)

    @pytest.mark.parametrize("exact_case", EXACT_PRODUCTS)
    def test_order_independent_product_is_exact(self, run, exact_case, exact_dtype):
        """Every bit equals that of numpy."""
        call = exact_product(exact_case, DTYPES[exact_dtype])
        assert np.asarray(run(call)).tobytes() == call.truth.astype(call.x.dtype).tobytes()


class ChunkedProductSuite:
    """Test grouped GEMMs with more rows than a kernel takes at once.

    `run` is that of `ProductSuite`.
    """

    numbers = axis(*combinations(("bf16", "f16")))

    def test_product_of_several_chunks_matches_float64(self, run, numbers):
        call = cases.make_product(cases.CHUNKED, *split(numbers), parts=2, bias=True)
        assert_zeros(assert_accurate(run, call)[call.rows :])
