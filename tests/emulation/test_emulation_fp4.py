"""The engine on FP4 tensor cores, its one instruction emulated, run on a CPU.

As `test_emulation`, with the cases of `test_cuda_fp4`; what cannot be seen here is the instruction
itself, and how fast it is.
"""

import cuda_emulation
import float64_layer
import ml_dtypes
import numpy as np
import pytest
import test_cuda_fp4 as fp4
import test_cuda_kernel as gpu
from float64_layer import Options

from jax_nvfp4_moe.testing import assert_as_accurate_as

pytestmark = [pytest.mark.cuda_build, pytest.mark.slow]

BF16, F16 = ml_dtypes.bfloat16, np.float16
modes = pytest.mark.parametrize("mode", fp4.MODES)
# Blocks of threads: one computes all output tiles; few have several each; many split each tile.
multiprocessors = pytest.mark.parametrize("count", [1, 3, 20])
LARGER = {
    "sorted_by_two_blocks": (2100, 1, 5, 32, 16, gpu.uniform(2100, 1, 5)),
    "odd_steps": (30, 2, 3, 208, 336, gpu.uniform(30, 2, 3)),
    "rows_of_every_tile": (430, 1, 1, 64, 32, lambda rng: np.zeros((430, 1))),
}


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    return cuda_emulation.build(tmp_path_factory.mktemp("emulation"))


def run(library, call, count=3):
    operands = (call.x, call.layer, call.ids, call.weights, call.options)
    return cuda_emulation.moe(library, "sm120", *operands, count)


def run_product(library, operands, mode, count=3):
    return cuda_emulation.grouped_gemm(library, "sm120", operands, mode, count)


def assert_accurate(library, call, count=3):
    assert_as_accurate_as(run(library, call, count), call.yardstick(), call.truth())


@multiprocessors
@pytest.mark.parametrize("case", gpu.CASES)
def test_layer_matches_float64(library, count, case):
    options = Options(activation_scale="static")
    assert_accurate(library, gpu.make(case, BF16, options, bias=True), count)


@pytest.mark.parametrize("case", gpu.CASES)
def test_layer_with_token_scales_matches_float64(library, case):
    assert_accurate(library, gpu.make(case, F16, Options(activation_scale="token"), bias=True))


@pytest.mark.parametrize("case", LARGER)
def test_larger_layer_matches_float64(library, case):
    assert_accurate(library, gpu.make(LARGER[case], F16, Options(activation_scale="static")))


@modes
@pytest.mark.parametrize("activation", gpu.ACTIVATIONS)
def test_activation_matches_float64(library, activation, mode):
    options = Options(activation=activation, limit=0.5, activation_scale=mode)
    assert_accurate(library, gpu.make("fills_no_tile", F16, options, bias=True))


@modes
def test_weight_on_input_matches_float64(library, mode):
    options = Options(activation="relu2", weight_on_input=True, activation_scale=mode)
    assert_accurate(library, gpu.make("out_of_range", BF16, options))


@multiprocessors
@modes
@pytest.mark.parametrize("case", gpu.PRODUCTS)
def test_product_matches_float64(library, count, case, mode):
    operands = gpu.make_product(case, BF16, parts=2, bias=True)
    x, sizes = operands[0], operands[-1]
    actual = run_product(library, operands, mode, count)
    yardstick = float64_layer.grouped_gemm(*operands, mode, matmul=gpu.xla(BF16)).astype(BF16)
    assert_as_accurate_as(actual, yardstick, float64_layer.grouped_gemm(*operands, mode))
    rows = int(np.clip(np.cumsum(np.clip(sizes.astype(np.int64), 0, None)), 0, len(x))[-1])
    assert not actual[rows:].astype(np.float32).any()


@multiprocessors
@pytest.mark.parametrize("dtype", [BF16, F16])
@pytest.mark.parametrize("case", fp4.EXACT_PRODUCTS)
def test_order_independent_product_is_exact(library, case, dtype, count):
    def product(operands, mode):
        return run_product(library, operands, mode, count)

    fp4.check_exact_product(product, case, dtype)


@pytest.mark.parametrize("case", fp4.FUSED_CASES)
@pytest.mark.parametrize("activation", ["silu", "relu2", "gelu"])
def test_fused_quantization_is_that_of_the_quantizer(library, case, activation):
    def sixteen_bits(call):
        operands = (call.x, call.layer, call.ids, call.weights, call.options)
        return cuda_emulation.moe(library, "sm80", *operands, 3)

    fp4.check_fused(lambda call: run(library, call), sixteen_bits, case, activation)


@modes
@pytest.mark.parametrize("activation", ["silu", "relu2"])
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_non_finite_token_stays_alone(library, activation, value, mode):
    fp4.check_non_finite_token(lambda call: run(library, call), activation, value, mode)


@modes
def test_bound_catches_wrong_block_scales(library, mode):
    fp4.check_bound_of_layers(lambda call: run(library, call), mode)
    fp4.check_bound_of_products(lambda operands, mode: run_product(library, operands, mode), mode)
