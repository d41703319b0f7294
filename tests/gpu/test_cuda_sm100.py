"""The W4A4 kernels of compute capability 10.x on a GPU: one of that kind, or one that emulates.

A build with ``NVFP4_EMULATE_BLACKWELL`` runs everything but CUTLASS's product on any GPU, and that
as plain arithmetic on the arrays that it reads. Cases and truth are those of `sm100_cases`.
"""

import dataclasses

import cuda_calls
import float64_layer
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import test_cuda_kernel as gpu
from float64_layer import Options
from sm100_cases import BF16, CASES, MODES, make, make_exact, make_exact_product, truth

from jax_nvfp4_moe.testing import assert_as_accurate_as

pytestmark = pytest.mark.fp4_sm100

SUFFIX = "w4a4_sm100"
modes = pytest.mark.parametrize("mode", MODES)


@pytest.fixture(scope="module", autouse=True)
def _targets():
    cuda_calls.register()


def assert_accurate(call):
    assert_as_accurate_as(call.run(SUFFIX), call.yardstick(), truth(call))


@modes
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("case", CASES)
def test_layer_matches_float64(case, bias, mode):
    assert_accurate(make(case, Options(activation_scale=mode), bias))


@modes
@pytest.mark.parametrize("activation", gpu.ACTIVATIONS)
def test_activation_matches_float64(activation, mode):
    options = Options(activation=activation, limit=0.5, activation_scale=mode)
    assert_accurate(make("fills_no_tile", options, bias=True))


@modes
@pytest.mark.parametrize("activation", ["silu", "swigluoai", "relu2"])
def test_weight_on_input_matches_float64(activation, mode):
    options = Options(activation=activation, weight_on_input=True, activation_scale=mode)
    assert_accurate(make("out_of_range", options, bias=True))


def test_exact_sums_have_the_bits_of_numpy():
    call = make_exact()
    want = truth(call, products=2).astype(np.float32).astype(BF16)
    assert np.asarray(call.run(SUFFIX)).tobytes() == want.tobytes()


@modes
def test_exact_product_has_the_bits_of_numpy(mode):
    operands = make_exact_product()
    want = float64_layer.grouped_gemm(*operands, mode).astype(np.float32).astype(BF16)
    assert np.asarray(gpu.run_product(operands, mode, SUFFIX)).tobytes() == want.tobytes()


@modes
def test_bound_catches_wrong_block_scales(mode):
    call = make("fills_no_tile", Options(activation_scale=mode))
    actual = gpu.with_wrong_block_scales(call).run(SUFFIX)
    with pytest.raises(AssertionError, match=r"over 2\.0 x"):
        assert_as_accurate_as(actual, call.yardstick(), truth(call))


@modes
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_non_finite_token_stays_alone(value, mode):
    call = make("several_tiles", Options(activation_scale=mode))
    clean = np.asarray(call.run(SUFFIX), np.float64)
    x = call.x.copy()
    x[70, 33] = value
    actual = np.asarray(dataclasses.replace(call, x=x).run(SUFFIX), np.float64)
    assert not np.isfinite(actual[70]).any()
    others = np.arange(len(x)) != 70
    np.testing.assert_array_equal(actual[others], clean[others])


@modes
def test_same_bits_twice_and_alone(mode):
    call = make("several_tiles", Options(activation_scale=mode), bias=True)
    first, second = (np.asarray(call.run(SUFFIX)) for _ in range(2))
    assert first.tobytes() == second.tobytes()
    rows = slice(77, 97)
    alone = dataclasses.replace(
        call, x=call.x[rows], ids=call.ids[rows], weights=call.weights[rows]
    )
    assert np.asarray(alone.run(SUFFIX)).tobytes() == first[rows].tobytes()


@pytest.mark.slow
@modes
def test_many_tokens_equal_few(mode):
    """65536 tokens go through in chunks; each token's output is that of a short call."""
    call = make((65536, 3, 8, 64, 32, gpu.uniform(65536, 3, 8)), Options(activation_scale=mode))
    actual = np.asarray(call.run(SUFFIX))
    for first in (0, 21845 - 8, 43690 - 8, 65536 - 16):
        rows = slice(first, first + 16)
        few = dataclasses.replace(
            call, x=call.x[rows], ids=call.ids[rows], weights=call.weights[rows]
        )
        assert np.asarray(few.run(SUFFIX)).tobytes() == actual[rows].tobytes()


@modes
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.parametrize("case", gpu.PRODUCTS)
def test_product_matches_float64(case, parts, bias, mode):
    operands = gpu.make_product(case, BF16, parts=parts, bias=bias)
    gpu.assert_product_accurate(operands, mode, SUFFIX)


@modes
def test_rows_past_the_groups_are_zero(mode):
    operands = gpu.make_product("padding_rows", BF16, bias=True)
    assert not np.asarray(gpu.run_product(operands, mode, SUFFIX), np.float32)[67:].any()


@pytest.mark.parametrize(("mode", "dtype"), [("none", BF16), ("static", np.float16)])
def test_what_it_cannot_do_is_said(mode, dtype):
    operands = gpu.make_product("one_row", dtype)
    named = "activation_scale" if mode == "none" else "x"
    with pytest.raises(jax.errors.JaxRuntimeError, match=rf"{named}: expected .*got"):
        jnp.asarray(gpu.run_product(operands, mode, SUFFIX)).block_until_ready()


def test_graph_replay_follows_the_routing(tmp_path):
    gpu.assert_graph_follows_the_routing(tmp_path, SUFFIX, "token")
