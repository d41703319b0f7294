"""Layers for the W4A4 kernels for compute capability 10.x, and their expected outputs.

A GEMM returns its sums in bfloat16, as plain XLA does. After that rounding, an activation may take
the next FP4 code. The truth of a layer therefore rounds the sums of the first GEMM too, so that
both multiply the same codes in the second GEMM. If scales are powers of two, sums may be rounded
before or after they are scaled.
"""

import dataclasses
import functools

import numpy as np
import pytest
from support.kernels import float64_layer
from support.kernels.axes import axis
from support.kernels.kernel_cases import BF16, PRODUCTS, LayerCall, ProductCall, make_layer, uniform
from support.kernels.kernel_suite import bits, combinations

MODES = ("static", "token")


class RoundedCall(LayerCall):
    """A layer whose truth rounds the sums of the first GEMM."""

    @functools.cached_property
    def truth(self):
        return self.rounded_truth(products=1)

    def rounded_truth(self, products):
        """Return the layer in float64, with the sums of the first `products` GEMMs in bfloat16."""
        first = self.layer.gate_up_packed.shape[1], self.x.shape[1]

        def product(x, w):
            sums = float64_layer.exact(x, w)
            rounded = products == 2 or w.shape == first
            return sums.astype(BF16).astype(np.float64) if rounded else sums

        return float64_layer.moe(*self.operands, matmul=product)


def _power_of_two(scale):
    return np.exp2(np.round(np.log2(scale))).astype(np.float32)


@functools.cache
def make(case, dtype, options, *, bias=False):
    """Return a layer whose global, input and token scales and expert weights are powers of two."""
    call = make_layer(case, dtype, options, bias=bias)
    scales = call.layer._asdict().items()
    ends = "global_scale", "input_scale"
    changed = {name: _power_of_two(scale) for name, scale in scales if name.endswith(ends)}
    largest = 2688 * 2.0**-10  # the largest of each row, whose token scale is then 2^-10
    x = np.clip(call.x.astype(np.float32), -largest, largest).astype(BF16)
    x[:, 0] = largest
    layer = call.layer._replace(**changed)
    return RoundedCall(x, layer, call.ids, _power_of_two(call.weights), options)


def make_exact():
    """Return a layer whose sums are exact in float32 in any order.

    Its block scales differ by a factor of at most 4. Each token has one expert and the activation
    is a square, so that the kernel has the bits of `rounded_truth(2)`.
    """
    options = float64_layer.Options(activation="relu2", activation_scale="static")
    call = make((45, 1, 3, 208, 80, uniform(45, 1, 3)), BF16, options)
    rng = np.random.default_rng(3)

    def scales(old):
        return rng.choice([0.5, 1.0, 2.0], old.shape).astype(old.dtype)

    call = call.with_layer(
        gate_up_block_scale=scales(call.layer.gate_up_block_scale),
        down_block_scale=scales(call.layer.down_block_scale),
    )
    return dataclasses.replace(call, weights=np.ones_like(call.weights))


def make_exact_product(mode):
    """Return a grouped GEMM with exact sums; the scales of its rows are powers of two."""
    call = make_exact()
    layer, empty = call.layer, np.zeros((0, 0), np.float32)
    sizes = np.array([20, 0, 22], np.int32)
    weight = layer.gate_up_packed, layer.gate_up_block_scale, layer.gate_up_global_scale
    return ProductCall((call.x, *weight, layer.gate_up_input_scale, empty, sizes), mode)


class Sm100Layers:
    """Axes of `kernel_suite.LayerSuite` for these kernels, and a test of exact sums."""

    make = staticmethod(make)
    numbers = axis(*combinations(("bf16",), MODES))
    case_numbers = axis(*combinations(("bf16",), MODES))
    activation_numbers = axis(*combinations(("bf16",), MODES))

    def test_exact_sums_have_the_bits_of_numpy(self, run):
        call = make_exact()
        want = call.rounded_truth(products=2).astype(np.float32).astype(BF16)
        assert np.count_nonzero(want.astype(np.float32)) > want.size / 2
        assert bits(run, call) == want.tobytes()


class Sm100Products:
    """Axes of `kernel_suite.ProductSuite` for these kernels, and a test of exact sums."""

    case = axis(*(name for name, (_, n, *_) in PRODUCTS.items() if n % 8 == 0))
    numbers = axis(*combinations(("bf16",), MODES))
    case_numbers = axis(*combinations(("bf16",), MODES))
    exact_dtype = axis("bf16")

    @pytest.mark.parametrize("mode", MODES)
    def test_exact_product_has_the_bits_of_numpy(self, run, mode):
        call = make_exact_product(mode)
        want = call.truth.astype(np.float32).astype(BF16)
        assert bits(run, call) == want.tobytes()
