"""The W4A4 layer of compute capability 10.x on a CPU, its one foreign product emulated.

Sorting, packing, quantization, activation and combination are the sources that a Blackwell GPU
runs; the product of CUTLASS's collectives is plain arithmetic on the arrays that they read.

Sums leave a product in bfloat16, as they do in plain XLA. After that rounding an activation may
take the next FP4 code, so the truth of a layer rounds the sums of its first product, too: then both
multiply the same codes in the second one. With scales that are powers of two it does not matter
whether sums are rounded before or after they are scaled.
"""

import dataclasses

import cuda_emulation
import float64_layer
import ml_dtypes
import numpy as np
import pytest
import test_cuda_kernel as gpu
from float64_layer import Options

from jax_nvfp4_moe.testing import assert_as_accurate_as

pytestmark = [pytest.mark.cuda_build, pytest.mark.slow]

BF16 = ml_dtypes.bfloat16
ENGINE = "sm100"
SIZES = {
    "odd_sizes": (37, 3, 5, 320, 112, gpu.uniform(37, 3, 5)),
    "two_scale_tiles": (300, 2, 3, 144, 48, gpu.uniform(300, 2, 3)),
    "no_tokens": (0, 2, 4, 64, 48, gpu.uniform(0, 2, 4)),
}
CASES = {**gpu.CASES, **SIZES}
modes = pytest.mark.parametrize("mode", gpu.MODES[1:])


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    return cuda_emulation.build(tmp_path_factory.mktemp("emulation"))


def power_of_two(scale):
    return np.exp2(np.round(np.log2(scale))).astype(np.float32)


def make(case, options, bias=False):
    """A call in which every scale that a kernel can meet before the last product is 2^n."""
    call = gpu.make(CASES.get(case, case), BF16, options, bias=bias)
    scales = call.layer._asdict().items()
    changed = {n: power_of_two(s) for n, s in scales if n.endswith(("global_scale", "input_scale"))}
    layer = call.layer._replace(**changed)
    largest = 2688 * 2.0**-10  # of each row, so that its own scale is 2^-10
    x = np.clip(call.x.astype(np.float32), -largest, largest).astype(BF16)
    x[:, 0] = largest
    return dataclasses.replace(call, x=x, layer=layer, weights=power_of_two(call.weights))


def truth(call):
    """The layer in float64, but for the rounding of the first product's sums."""
    first = call.layer.gate_up_packed.shape[1], call.x.shape[1]

    def product(x, w):
        sums = float64_layer.exact(x, w)
        return sums.astype(BF16).astype(np.float64) if w.shape == first else sums

    operands = (call.x, call.layer, call.ids, call.weights, call.options)
    return float64_layer.moe(*operands, matmul=product)


def run(library, call, count=2):
    operands = (call.x, call.layer, call.ids, call.weights, call.options)
    return cuda_emulation.moe(library, ENGINE, *operands, count)


def assert_accurate(library, call):
    assert_as_accurate_as(run(library, call), call.yardstick(), truth(call))


@modes
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("case", CASES)
def test_layer_matches_float64(library, case, bias, mode):
    assert_accurate(library, make(case, Options(activation_scale=mode), bias))


@modes
@pytest.mark.parametrize("activation", gpu.ACTIVATIONS)
def test_activation_matches_float64(library, activation, mode):
    options = Options(activation=activation, limit=0.5, activation_scale=mode)
    assert_accurate(library, make("fills_no_tile", options, bias=True))


@modes
@pytest.mark.parametrize("activation", ["swigluoai", "relu2"])
def test_weight_on_input_matches_float64(library, activation, mode):
    options = Options(activation=activation, weight_on_input=True, activation_scale=mode)
    assert_accurate(library, make("out_of_range", options, bias=True))


@modes
def test_bound_catches_wrong_block_scales(library, mode):
    call = make("fills_no_tile", Options(activation_scale=mode))
    actual = run(library, gpu.with_wrong_block_scales(call))
    with pytest.raises(AssertionError, match=r"over 2\.0 x"):
        assert_as_accurate_as(actual, call.yardstick(), truth(call))


@modes
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_non_finite_token_stays_alone(library, value, mode):
    call = make("fills_no_tile", Options(activation_scale=mode))
    clean = run(library, call).astype(np.float64)
    x = call.x.copy()
    x[2, 33] = value
    actual = run(library, dataclasses.replace(call, x=x)).astype(np.float64)
    assert not np.isfinite(actual[2]).any()
    others = np.arange(len(x)) != 2
    np.testing.assert_array_equal(actual[others], clean[others])


@modes
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.parametrize("case", gpu.PRODUCTS)
def test_product_matches_float64(library, case, parts, bias, mode):
    operands = gpu.make_product(case, BF16, parts=parts, bias=bias)
    x, sizes = operands[0], operands[-1]
    actual = cuda_emulation.grouped_gemm(library, ENGINE, operands, mode, 2)
    yardstick = float64_layer.grouped_gemm(*operands, mode, matmul=gpu.xla(BF16)).astype(BF16)
    assert_as_accurate_as(actual, yardstick, float64_layer.grouped_gemm(*operands, mode))
    rows = int(np.clip(np.cumsum(np.clip(sizes.astype(np.int64), 0, None)), 0, len(x))[-1])
    assert not actual[rows:].astype(np.float32).any()
