"""Test the kernel for plain and FP8 weights and few rows on a GPU, through its FFI targets."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.extensions import cuda_calls
from support.kernels import dense_fp8_suite as fp8
from support.kernels.axes import axis
from support.kernels.dense_few_suite import (
    SIZES,
    DenseFewSuite,
    assert_accurate,
    check_biases,
    make,
)
from support.kernels.dense_fp8_suite import DenseFp8Suite

from jax_nvfp4_moe import Target
from jax_nvfp4_moe.numerics.fp8 import FP8Tensor, dynamic_scale, round_fp8
from jax_nvfp4_moe.ops.dense import dense, dense_fp8
from jax_nvfp4_moe.scheme import FP8ActivationScaling
from jax_nvfp4_moe.testing import assert_as_accurate_as

pytestmark = pytest.mark.gpu

TARGET, FP8_TARGET = "nvfp4_dense_few_cuda", "nvfp4_dense_fp8_few_cuda"
# Sizes of models, for which a GPU takes each form of the kernel: routers, an unquantized attention,
# and a head.
MODEL_SIZES = [
    *((rows, 128, 2048) for rows in (1, 16, 64)),
    (64, 512, 7168),
    *((rows, 5120, 2048) for rows in (1, 16, 64)),
    *((rows, 2048, 4096) for rows in (5, 16, 32, 64)),
    (9, 1000, 1048),
    (33, 777, 2056),
    *((rows, 32000, 2048) for rows in (1, 16, 32, 64)),
]
# The kernel for FP8 weights needs rows of a multiple of 16 numbers.
FP8_MODEL_SIZES = [(rows, n, -(-k // 16) * 16) for rows, n, k in MODEL_SIZES]


def on_cuda(x, weight, dtype=jnp.float32, bias=None):
    cuda_calls.register()
    output = jax.ShapeDtypeStruct((x.shape[0], weight.shape[0]), dtype)
    bias = np.zeros(0, x.dtype) if bias is None else bias
    operands = (jnp.asarray(a) for a in (x, weight, bias))
    return np.asarray(jax.ffi.ffi_call(TARGET, output)(*operands))


def fp8_on_cuda(call, dtype=jnp.float32, bias=None):
    cuda_calls.register()
    output = jax.ShapeDtypeStruct((call.x.shape[0], call.weight.shape[0]), dtype)
    row_scale = np.zeros(0, np.float32) if call.row_scale is None else call.row_scale
    bias = np.zeros(0, np.float32) if bias is None else bias
    operands = (jnp.asarray(a) for a in (call.x, call.weight, call.scale, row_scale, bias))
    return np.asarray(jax.ffi.ffi_call(FP8_TARGET, output)(*operands))


class TestDenseFew(DenseFewSuite):
    width = axis(77, 777)

    @pytest.fixture
    def run(self):
        return on_cuda

    @pytest.mark.parametrize("sizes", [(9, 1000, 1048), (33, 777, 2056)], ids=str)
    def test_a_bias_of_a_wide_layer(self, run, sizes, pair):
        call = make(sizes, pair)
        sums = run(call.x, call.weight)
        check_biases(sums, call.x.dtype, lambda *how: run(call.x, call.weight, *how))

    @pytest.mark.parametrize("sizes", MODEL_SIZES, ids=str)
    def test_layers_of_models_match_float64(self, run, sizes, pair):
        call = make(sizes, pair)
        assert_accurate(run(call.x, call.weight), call)

    @pytest.mark.parametrize("sizes", [*SIZES, *MODEL_SIZES], ids=str)
    def test_same_bits_every_time(self, run, sizes, pair):
        call = make(sizes, pair)
        first = run(call.x, call.weight).tobytes()
        assert all(run(call.x, call.weight).tobytes() == first for _ in range(5))


class TestDenseFp8(DenseFp8Suite):
    width = axis(77, 777)

    @pytest.fixture
    def run(self):
        return fp8_on_cuda

    @pytest.mark.parametrize("sizes", FP8_MODEL_SIZES, ids=str)
    def test_layers_of_models_match_float64(self, run, sizes, x_type, scales):
        call = fp8.make(sizes, x_type, "each", scales)
        fp8.assert_accurate(run(call.operands), call)

    @pytest.mark.parametrize("sizes", [*fp8.SIZES, *FP8_MODEL_SIZES], ids=str)
    def test_same_bits_every_time(self, run, sizes, x_type, scales):
        call = fp8.make(sizes, x_type, "each", scales).operands
        first = run(call).tobytes()
        assert all(run(call).tobytes() == first for _ in range(5))


def round_rows(x, activations, input_scale):
    """Return rows as they enter the product, and the scales of the rows, in float64."""
    if activations is FP8ActivationScaling.WEIGHTS:
        return x, 1
    axes = {FP8ActivationScaling.TOKEN: -1, FP8ActivationScaling.TENSOR: (0, 1)}
    own = dynamic_scale(x, axes[activations]) if activations in axes else input_scale
    values = round_fp8(x, own, multiply_by_reciprocal=False)
    return np.asarray(values, np.float64), np.asarray(own, np.float64)


@pytest.mark.parametrize("activations", list(FP8ActivationScaling))
@pytest.mark.parametrize("scales", fp8.SCALES)
@pytest.mark.parametrize("rows", [1, 64])
def test_the_op_takes_the_kernel_for_fp8_and_is_as_accurate_as_xla(rows, scales, activations):
    call = fp8.make((rows, 128, 2048), "bfloat16", scales=scales).operands
    operands = call.x, FP8Tensor(jnp.asarray(call.weight), jnp.asarray(call.scale))
    how = {"activations": activations, "input_scale": jnp.float32(0.01)}

    def lower(target):
        return jax.jit(lambda x, w: dense_fp8(x, w, target=target, **how)).lower(*operands)

    ours, plain = lower(Target.current()), lower(None)
    assert FP8_TARGET in ours.as_text()
    assert FP8_TARGET not in plain.as_text()
    values, own = round_rows(call.x, activations, how["input_scale"])
    truth = fp8.in_float64(dataclasses.replace(call, x=values)) * own
    found, yardstick = (np.asarray(one.compile()(*operands)) for one in (ours, plain))
    assert_as_accurate_as(found, yardstick, truth)
    with pytest.raises(AssertionError, match="yardstick"):
        assert_as_accurate_as(np.roll(found, 1, axis=1), yardstick, truth)


@pytest.mark.parametrize("rows", [1, 16, 64])
def test_scales_of_blocks_are_nearer_to_the_file_than_decoded_weights(rows):
    """Decoding rounds each weight to 8 significant bits, and the kernel rounds sums alone."""
    call = fp8.make((rows, 2048, 4096), "bfloat16", scales="groups").operands
    kept = FP8Tensor(jnp.asarray(call.weight), jnp.asarray(call.scale))
    x, target = jnp.asarray(call.x), Target.current()
    found = np.asarray(jax.jit(lambda x, w: dense_fp8(x, w, target=target))(x, kept))
    decoded = kept.dequantize(jnp.bfloat16)
    rounded = np.asarray(jax.jit(lambda x, w: dense(x, w, target=target))(x, decoded))
    truth = fp8.in_float64(call)
    assert_as_accurate_as(found, rounded, truth)
    assert np.linalg.norm(found - truth) < np.linalg.norm(rounded - truth) / 16
    with pytest.raises(AssertionError, match="yardstick"):
        assert_as_accurate_as(np.roll(found, 1, axis=1), rounded, truth)


@pytest.mark.parametrize("rows", [1, 64])
def test_the_op_takes_the_kernel_and_gives_its_bits(rows):
    call = make((rows, 128, 2048), "bfloat16-float32")
    run = jax.jit(lambda x, weight: dense(x, weight, target=Target.current()))
    assert TARGET in run.lower(call.x, call.weight).as_text()
    y = np.asarray(run(call.x, call.weight))
    assert y.tobytes() == on_cuda(call.x, call.weight).tobytes()


@pytest.mark.parametrize("rows", [1, 16, 64])
def test_the_op_adds_a_bias_in_the_kernel_and_is_as_accurate_as_xla(rows):
    """The layer is the output projection of gpt-oss, whose results are bfloat16."""
    call = make((rows, 2880, 4096), "bfloat16-bfloat16")
    drawn = np.random.default_rng(1).normal(0, 50, 2880)
    bias = jnp.asarray(drawn, jnp.bfloat16)

    @jax.jit
    def run(x, weight, bias):
        return dense(x, weight, bias=bias, target=Target.current(), dtype=x.dtype)

    @jax.jit
    def plain(x, weight, bias):
        return jax.lax.dot(x, weight.T) + bias[None]

    text = run.lower(call.x, call.weight, bias).as_text()
    assert TARGET in text
    assert "stablehlo.add" not in text
    truth = call.truth + np.asarray(bias, np.float64)
    found, twice = (np.asarray(f(call.x, call.weight, bias)) for f in (run, plain))
    assert_as_accurate_as(found, twice, truth)
    neighbor = np.asarray(run(call.x, call.weight, jnp.roll(bias, 1)))
    with pytest.raises(AssertionError, match="yardstick"):
        assert_as_accurate_as(neighbor, twice, truth)


def test_empty_operands():
    x, weight = jnp.ones((0, 16), jnp.bfloat16), jnp.ones((3, 16), jnp.bfloat16)
    assert on_cuda(x, weight).shape == (0, 3)
    assert on_cuda(weight, x).shape == (3, 0)


@pytest.mark.parametrize(
    ("shape", "dtype", "message"),
    [
        ((4,), "bfloat16", r"bias \[n\]: expected \[3\]"),
        ((1, 3), "bfloat16", r"bias \[n\]"),
        ((3,), "float16", r"bias: expected bfloat16"),
    ],
)
def test_wrong_bias_is_named(shape, dtype, message):
    x, weight = jnp.ones((2, 16), jnp.bfloat16), jnp.ones((3, 16), jnp.bfloat16)
    with pytest.raises(jax.errors.JaxRuntimeError, match=message):
        on_cuda(x, weight, bias=jnp.zeros(shape, dtype))


@pytest.mark.parametrize(
    ("x", "weight", "message"),
    [
        (((65, 16), "bfloat16"), ((3, 16), "bfloat16"), r"rows \(x\).*at most 64"),
        (((2, 12), "bfloat16"), ((3, 12), "bfloat16"), r"k \(x\).*multiple of 8"),
        (((2, 16), "bfloat16"), ((3, 24), "bfloat16"), r"weight \[n, k\]"),
        (((2, 16), "float32"), ((3, 16), "float32"), r"x: expected bfloat16 or float16"),
        (((2, 16), "float16"), ((3, 16), "float32"), r"weight: expected the type of x"),
        (((2, 16), "bfloat16"), ((3, 16), "float16"), r"weight: expected the type of x"),
    ],
)
def test_wrong_operand_is_named(x, weight, message):
    with pytest.raises(jax.errors.JaxRuntimeError, match=message):
        on_cuda(*(jnp.zeros(*each) for each in (x, weight)))


@pytest.mark.parametrize(
    ("weight", "scale", "row_scale", "message"),
    [
        (((3, 24), "float8_e4m3fn"), (3,), (0,), r"k \(x\).*multiple of 16"),
        (((3, 160), "bfloat16"), (3,), (0,), r"weight: expected float8_e4m3fn"),
        (((3, 160), "float8_e4m3fn"), (2,), (0,), r"weight_scale \[n\]"),
        (
            ((3, 160), "float8_e4m3fn"),
            (3, 1),
            (0,),
            r"weight_scale \[n, k/128\]: expected \[3, 2\]",
        ),
        (((3, 160), "float8_e4m3fn"), (3,), (2,), r"row_scale \[rows\]: expected 0, 1 or 4 scales"),
        (((3, 160), "float8_e4m3fn"), (3,), (4, 1), r"row_scale \[scales\]: expected 1 dimensions"),
    ],
)
def test_wrong_operand_of_fp8_is_named(weight, scale, row_scale, message):
    x = jnp.zeros((4, weight[0][1]), jnp.bfloat16)
    scales = (jnp.zeros(shape, jnp.float32) for shape in (scale, row_scale))
    with pytest.raises(jax.errors.JaxRuntimeError, match=message):
        fp8_on_cuda(fp8.Operands(x, jnp.zeros(*weight), *scales))
