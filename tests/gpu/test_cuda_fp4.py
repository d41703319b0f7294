"""The engine on FP4 tensor cores: the target w4a4_sm120 on a GPU, by emulation on one of 9.0.

A build with the CMake option NVFP4_EMULATE_BLACKWELL runs it on a Hopper GPU: the same kernel, but
for one instruction. Cases, truth and yardstick are those of `test_cuda_kernel`; the checks of this
module also run on a CPU, in `test_emulation_fp4`.
"""

import dataclasses
import importlib

import cuda_calls
import float64_layer
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import test_cuda_kernel as gpu
from float64_layer import E4M3, Options

from jax_nvfp4_moe.testing import assert_as_accurate_as

BF16, F16 = ml_dtypes.bfloat16, np.float16
DTYPES = {"bf16": BF16, "f16": F16}
SUFFIX = "w4a4_sm120"
MODES = ("static", "token")

dtypes = pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES.keys())
modes = pytest.mark.parametrize("mode", MODES)


@pytest.fixture(scope="module", autouse=True)
def _targets(request):
    if any(item.get_closest_marker("fp4") for item in request.session.items):
        cuda_calls.register()


# Data whose sums have the same bits in every order: block scales s of [1, 2), multiples of 1/8, so
# that products are multiples of 2^-8, and sums of their magnitudes below 2^16: 24 bits hold them.
# m, n, k, group sizes
EXACT_PRODUCTS = {
    "one_block": (1, 16, 16, [1]),
    "fills_no_tile": (11, 40, 80, [3, 0, 8]),
    "every_rest_of_k": (40, 72, 112, [19, 21]),
    "long_k": (7, 24, 464, [7]),
    "tiles": (150, 200, 192, [130, 20]),
}


def exact_weight(rng, e, n, k):
    """Random codes, and block scales of [1, 2) and [-2, -1)."""
    packed = rng.integers(0, 256, (e, n, k // 2), np.uint8)
    scale = rng.choice(np.array([0x38, 0xB8], np.uint8), (e, n, k // 16))
    return packed, (scale + rng.integers(0, 8, scale.shape, np.uint8)).view(E4M3)


def exact_rows(rng, m, k, g, dtype):
    """Rows that NVFP4 with global scale g, a power of two, holds with scales of [1, 2)."""
    values = float64_layer.CODE_VALUES[rng.integers(0, 16, (m, k // 16, 16))]
    values[..., 0] = rng.choice([-6, 6], values.shape[:-1])
    scale = 1 + rng.integers(0, 8, (m, k // 16, 1)) / 8
    return (values * scale * g).reshape(m, k).astype(dtype)


def check_exact_product(product, case, dtype):
    """Compare every bit of ``product(operands, mode)`` with numpy."""
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
    want = float64_layer.grouped_gemm(*operands, "static")
    actual = np.asarray(product(operands, "static"))
    np.testing.assert_array_equal(actual.view(np.uint16), want.astype(dtype).view(np.uint16))


# tokens, experts, hidden, intermediate
FUSED_CASES = {
    "smallest": (3, 1, 16, 16),
    "fills_no_tile": (9, 3, 80, 48),
    "tiles": (140, 2, 144, 144),
}


def check_fused(fp4, sixteen_bits, case, activation):
    """Compare quantization inside the first product with that by a kernel of its own.

    ``sixteen_bits(call)`` runs the layer on an engine of 16 bits, which rounds by a kernel of its
    own. Both form the same exact sums of the first product; the second one takes single elements.
    """
    t, e, h, i = FUSED_CASES[case]
    rng, options = np.random.default_rng(t), Options(activation, activation_scale="static")
    parts, g = 2 if options.gated else 1, np.float32(2.0**-5)
    layer = float64_layer.random_layer(rng, e, h, i, gated=options.gated, bias=True)
    packed, block_scale = exact_weight(rng, e, parts * i, h)
    ones = np.zeros((e, h, i), np.uint8)
    ones[:, np.arange(min(h, i)), np.arange(min(h, i))] = 2  # the code of 1
    layer = layer._replace(
        gate_up_packed=packed,
        gate_up_block_scale=block_scale,
        gate_up_global_scale=np.full((e, parts), 2.0**-6, np.float32),
        gate_up_input_scale=np.full(e, g),
        down_packed=ones[..., 0::2] | ones[..., 1::2] << 4,
        down_block_scale=np.ones((e, h, i // 16), E4M3),
        down_global_scale=np.ones((e, 1), np.float32),
        down_bias=np.zeros((0, 0), np.float32),
    )
    x = exact_rows(rng, t, h, g, BF16)
    ids = rng.integers(0, e, (t, 1)).astype(np.int32)
    call = gpu.Call(x, layer, ids, np.ones((t, 1), np.float32), options)
    actual, want = np.asarray(fp4(call)), np.asarray(sixteen_bits(call))
    assert np.unique(actual.astype(np.float32)).size > 8
    np.testing.assert_array_equal(actual.view(np.uint16), want.view(np.uint16))


def check_bound_of_layers(run, mode):
    """The block scales of one expert of three, moved on by one, are over the bound."""
    call = gpu.make("fills_no_tile", BF16, Options(activation_scale=mode))
    actual = run(gpu.with_wrong_block_scales(call))
    with pytest.raises(AssertionError, match=r"over 2\.0 x"):
        assert_as_accurate_as(actual, call.yardstick(), call.truth())


def check_bound_of_products(product, mode):
    """The block scales of one row of one group, moved on by one, are over the bound."""
    operands = gpu.make_product("padding_rows", BF16)
    wrong = operands[2].copy()
    wrong[2, 17] = np.roll(wrong[2, 17], 1)
    actual = product((*operands[:2], wrong, *operands[3:]), mode)
    yardstick = float64_layer.grouped_gemm(*operands, mode, matmul=gpu.xla(BF16)).astype(BF16)
    with pytest.raises(AssertionError, match=r"over 2\.0 x"):
        assert_as_accurate_as(actual, yardstick, float64_layer.grouped_gemm(*operands, mode))


def check_non_finite_token(run, activation, value, mode):
    """One token with `value` in it is not finite; all others have the bits they had."""
    options = Options(activation=activation, activation_scale=mode)
    call = gpu.make((40, 2, 3, 80, 48, gpu.uniform(40, 2, 3)), BF16, options)
    clean = np.asarray(run(call), np.float64)
    x = call.x.copy()
    x[17, 33] = value
    actual = np.asarray(run(dataclasses.replace(call, x=x)), np.float64)
    assert not np.isfinite(actual[17]).any()
    others = np.arange(len(x)) != 17
    np.testing.assert_array_equal(actual[others], clean[others])


@pytest.mark.fp4
@pytest.mark.parametrize("case", gpu.CASES)
@dtypes
@modes
def test_layer_matches_float64(case, dtype, mode):
    gpu.assert_accurate(gpu.make(case, dtype, Options(activation_scale=mode), bias=True), SUFFIX)


@pytest.mark.fp4
@pytest.mark.parametrize("activation", gpu.ACTIVATIONS)
@pytest.mark.parametrize("limit", [np.inf, 0.5])
@modes
def test_activation_matches_float64(activation, limit, mode):
    options = Options(activation, alpha=1.25, beta=0.75, limit=limit, activation_scale=mode)
    gpu.assert_accurate(gpu.make("several_tiles", BF16, options, bias=True), SUFFIX)


@pytest.mark.fp4
@dtypes
@modes
def test_weight_on_input_matches_float64(dtype, mode):
    options = Options("relu2", activation_scale=mode, weight_on_input=True)
    gpu.assert_accurate(gpu.make("out_of_range", dtype, options), SUFFIX)


@pytest.mark.fp4
@pytest.mark.parametrize("case", gpu.PRODUCTS)
@pytest.mark.parametrize("parts", [1, 2])
@dtypes
@modes
def test_product_matches_float64(case, parts, dtype, mode):
    operands = gpu.make_product(case, dtype, parts, bias=True)
    gpu.assert_product_accurate(operands, mode, SUFFIX)


@pytest.mark.fp4
@pytest.mark.parametrize("case", EXACT_PRODUCTS)
@dtypes
def test_order_independent_product_is_exact(case, dtype):
    def product(operands, mode):
        return gpu.run_product(operands, mode, SUFFIX)

    check_exact_product(product, case, dtype)


@pytest.mark.fp4
@pytest.mark.parametrize("case", FUSED_CASES)
@pytest.mark.parametrize("activation", ["silu", "relu2", "gelu"])
def test_fused_quantization_is_that_of_the_quantizer(case, activation):
    check_fused(
        lambda call: call.run(SUFFIX), lambda call: call.run("w4a16_sm80"), case, activation
    )


@pytest.mark.fp4
@pytest.mark.parametrize("activation", ["silu", "relu2"])
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@modes
def test_non_finite_token_stays_alone(activation, value, mode):
    check_non_finite_token(lambda call: call.run(SUFFIX), activation, value, mode)


@pytest.mark.fp4
@modes
def test_same_bits_twice(mode):
    call = gpu.make("several_tiles", BF16, Options(activation_scale=mode), bias=True)
    first, second = (np.asarray(call.run(SUFFIX)).tobytes() for _ in range(2))
    assert first == second


@pytest.mark.fp4
@pytest.mark.slow
@modes
def test_many_tokens_equal_few(mode):
    """65536 tokens go through in chunks; each token's output is that of a short call."""
    case = (65536, 2, 8, 64, 32, gpu.uniform(65536, 2, 8))
    call = gpu.make(case, BF16, Options(activation_scale=mode))
    actual = np.asarray(call.run(SUFFIX))
    for first in (0, 32768 - 8, 65536 - 16):
        rows = slice(first, first + 16)
        few = dataclasses.replace(
            call, x=call.x[rows], ids=call.ids[rows], weights=call.weights[rows]
        )
        assert np.asarray(few.run(SUFFIX)).tobytes() == actual[rows].tobytes()


@pytest.mark.fp4
@modes
def test_bound_catches_wrong_block_scales(mode):
    check_bound_of_layers(lambda call: call.run(SUFFIX), mode)
    check_bound_of_products(lambda operands, mode: gpu.run_product(operands, mode, SUFFIX), mode)


@pytest.mark.fp4
@modes
def test_no_tokens(mode):
    case = (0, 2, 4, 64, 48, gpu.uniform(0, 2, 4))
    assert gpu.make(case, BF16, Options(activation_scale=mode)).run(SUFFIX).shape == (0, 64)


@pytest.mark.fp4
@modes
def test_graph_replay_follows_the_routing(tmp_path, mode):
    gpu.assert_graph_follows_the_routing(tmp_path, SUFFIX, mode)


@pytest.mark.fp4
@pytest.mark.parametrize(
    ("dtype", "mode", "why"),
    [
        (np.float32, "static", "x: expected bfloat16 or float16, got float32"),
        (BF16, "none", "activation_scale: expected static or token, got none"),
    ],
)
def test_what_it_cannot_do_is_named(dtype, mode, why):
    call = gpu.make("fills_no_tile", dtype, Options(activation_scale=mode))
    with pytest.raises((jax.errors.JaxRuntimeError, ValueError), match=why):
        call.run(SUFFIX).block_until_ready()


@pytest.mark.hopper
def test_a_build_without_code_for_this_device_says_so():
    cuda_calls.register()
    extension = importlib.import_module("jax_nvfp4_moe._nvfp4_cuda")
    call = gpu.make("smallest", BF16, Options(activation_scale="static"))
    if extension.emulates_blackwell():
        gpu.assert_accurate(call, SUFFIX)
        return
    with pytest.raises((jax.errors.JaxRuntimeError, ValueError), match=r"device: expected .*12\.x"):
        call.run(SUFFIX).block_until_ready()
    other = jnp.ones(3) + 1  # nothing of the error is left for the next kernel
    assert other.sum() == 6
