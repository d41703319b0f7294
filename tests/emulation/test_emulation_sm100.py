"""The W4A4 layer of compute capability 10.x on a CPU, its one foreign product emulated.

Sorting, packing, quantization, activation and combination are the sources that a Blackwell GPU
runs; the product of CUTLASS's collectives is plain arithmetic on the arrays that they read.
"""

import dataclasses

import cuda_emulation
import float64_layer
import numpy as np
import pytest
import test_cuda_kernel as gpu
from float64_layer import Options
from sm100_cases import BF16, CASES, MODES, make, make_exact, make_exact_product, truth

from jax_nvfp4_moe.testing import assert_as_accurate_as

pytestmark = [pytest.mark.cuda_build, pytest.mark.slow]

modes = pytest.mark.parametrize("mode", MODES)


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    return cuda_emulation.build(tmp_path_factory.mktemp("emulation"))


def run(library, call):
    operands = (call.x, call.layer, call.ids, call.weights, call.options)
    return cuda_emulation.moe(library, "sm100", *operands, multiprocessors=2)


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


def test_exact_sums_have_the_bits_of_numpy(library):
    call = make_exact()
    want = truth(call, products=2).astype(np.float32).astype(BF16)
    assert np.count_nonzero(want.astype(np.float32)) > want.size / 2
    assert run(library, call).tobytes() == want.tobytes()


@modes
def test_exact_product_has_the_bits_of_numpy(library, mode):
    operands = make_exact_product()
    actual = cuda_emulation.grouped_gemm(library, "sm100", operands, mode, multiprocessors=2)
    want = float64_layer.grouped_gemm(*operands, mode).astype(np.float32).astype(BF16)
    assert actual.tobytes() == want.tobytes()


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
    actual = cuda_emulation.grouped_gemm(library, "sm100", operands, mode, multiprocessors=2)
    yardstick = float64_layer.grouped_gemm(*operands, mode, matmul=gpu.xla(BF16)).astype(BF16)
    assert_as_accurate_as(actual, yardstick, float64_layer.grouped_gemm(*operands, mode))
    rows = int(np.clip(np.cumsum(np.clip(sizes.astype(np.int64), 0, None)), 0, len(x))[-1])
    assert not actual[rows:].astype(np.float32).any()
