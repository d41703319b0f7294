"""Test products of few rows with plain matrices: the CPU kernel, and which calls take a kernel."""

import functools
import re

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from jax_nvfp4_moe import NVFP4Linear, Target, explain, quantize
from jax_nvfp4_moe.backends import _ffi
from jax_nvfp4_moe.nn.linear.dense_linear import DenseLinear
from jax_nvfp4_moe.nn.linear.fp8_linear import FP8Linear
from jax_nvfp4_moe.nn.linear.merged_linear import MergedLinear
from jax_nvfp4_moe.numerics.fp8 import FP8Tensor
from jax_nvfp4_moe.ops.chain import chain_calls
from jax_nvfp4_moe.ops.dense import DENSE_CUDA, dense, dense_fp8, multiply
from jax_nvfp4_moe.scheme import FP8ActivationScaling
from jax_nvfp4_moe.testing import assert_as_accurate_as

CPU = jax.devices("cpu")[0]
ISAS = _ffi.load("_nvfp4_cpu").isa_levels()
TARGET = "nvfp4_dense_cpu"
MOST = 8  # rows up to which the kernel runs
CUDA_TARGET = "nvfp4_dense_few_cuda"
FP8_TARGET = "nvfp4_dense_fp8_few_cuda"
CUDA_MOST = 64
GPU = Target("cuda", (9, 0))

# m, n, k: below, at and above the boundaries of lanes (16), of columns and rows of a tile (4), and
# of a work item (65536 weights).
SIZES = [
    (1, 1, 1),
    (1, 4, 16),
    (2, 3, 15),
    (3, 5, 17),
    (4, 4, 32),
    (5, 9, 100),
    (6, 65, 700),
    (8, 70, 1039),
    (7, 3, 70000),
]


@pytest.fixture(scope="module", autouse=True)
def _on_the_cpu():
    """Use the CPU, so that a machine with a GPU tests this kernel too."""
    with jax.default_device(CPU):
        yield


def operands(m, n, k):
    rng = np.random.default_rng((m, n, k))
    x, weight = rng.normal(0, 1, (m, k)), rng.normal(0, 1, (n, k))
    return x.astype(ml_dtypes.bfloat16), weight.astype(ml_dtypes.bfloat16)


@jax.jit
def run_kernels(x, weight):
    """Return the results of all instruction sets, which are calls in one program."""
    output = jax.ShapeDtypeStruct((x.shape[0], weight.shape[0]), jnp.float32)
    call = jax.ffi.ffi_call(TARGET, output)
    return {isa: call(x, weight, isa=isa) for isa in ("auto", *ISAS)}


def run(x, weight, isa="auto"):
    return np.asarray(run_kernels(x.astype(np.float32), weight)[isa])


jitted_dense = jax.jit(dense, static_argnames=("target", "dtype"))


@jax.jit
def xla(x, weight):
    return jax.lax.dot(x, weight.T, preferred_element_type=jnp.float32)


def error(y, x, weight):
    """Return the largest error, relative to the sum of the magnitudes that make up a result."""
    x, weight = x.astype(np.float64), weight.astype(np.float64)
    return np.max(np.abs(y - x @ weight.T) / (np.abs(x) @ np.abs(weight).T))


# The smallest rounding of a sum; XLA may be exact where a result has one product.
UNIT = np.finfo(np.float32).eps / 2


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_against_float64(sizes, isa):
    x, weight = operands(*sizes)
    bound = 2 * max(error(np.asarray(xla(x, weight)), x, weight), UNIT)
    assert error(run(x, weight, isa), x, weight) <= bound


@pytest.mark.parametrize("sizes", [sizes for sizes in SIZES if sizes[2] > 1], ids=str)
def test_the_bound_catches_a_product_that_is_left_out(sizes):
    x, weight = operands(*sizes)
    bound = 2 * max(error(np.asarray(xla(x, weight)), x, weight), UNIT)
    short = weight.copy()
    short[:, -1] = 0
    assert error(run(x, short), x, weight) > 10 * bound


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_bits_depend_on_nothing_but_the_operands(sizes):
    """Each row has the same bits alone and beside others, on every instruction set."""
    x, weight = operands(*sizes)
    expected = run(x, weight)
    for isa in ISAS:
        np.testing.assert_array_equal(run(x, weight, isa), expected)
    for row in range(len(x)):
        np.testing.assert_array_equal(run(x[row : row + 1], weight)[0], expected[row])


@pytest.mark.parametrize("target", [None, Target("cpu")], ids=str)
@pytest.mark.parametrize("rows", [MOST + 1, 70, 71])
def test_more_rows_than_the_kernel_takes(rows, target):
    """The weight stands on the left of XLA's dot if it has more rows than x."""
    x, weight = operands(rows, 70, 300)
    run = jax.jit(lambda x, w: dense(x, w, target=target))
    got = np.asarray(run(x[:, None], weight))
    assert got.shape == (rows, 1, 70)
    bound = 2 * max(error(np.asarray(xla(x, weight)), x, weight), UNIT)
    assert error(got[:, 0], x, weight) <= bound


def test_a_loop_keeps_no_copy_of_the_weight():
    """In a loop such as that of `generate`, XLA keeps a transposed copy of a right operand."""
    k, n = 512, 1000

    def decode(ids, weight):
        def step(carry):
            count, ids = carry
            x = jnp.sin((ids[:, None, None] * jnp.arange(k)[None, None]).astype(jnp.float32))
            logits = dense(x.astype(weight.dtype), weight, target=Target("cpu"))
            return count + 1, jnp.argmax(logits[:, 0], axis=-1).astype(ids.dtype)

        return jax.lax.while_loop(lambda carry: carry[0] < 9, step, (0, ids))[1]

    weight = jax.ShapeDtypeStruct((n, k), jnp.bfloat16)
    ids = jax.ShapeDtypeStruct((MOST + 1,), jnp.int32)
    compiled = jax.jit(decode).lower(ids, weight).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < 2 * n * k


@pytest.mark.parametrize("sizes", [(0, 3, 16), (2, 0, 16), (2, 3, 0)], ids=str)
def test_empty_operands(sizes):
    x, weight = operands(*sizes)
    np.testing.assert_array_equal(run(x, weight), np.zeros((len(x), len(weight)), np.float32))


def lowered(rows, dtype=jnp.bfloat16, platform="cpu", *, weight=None, k=32, target=None):
    shapes = ((1, rows, k), dtype), ((5, k), weight or dtype)
    x, weight = (jax.ShapeDtypeStruct(*each) for each in shapes)
    # A new function each time, because JAX would reuse the trace of an earlier one.
    return (
        jax.jit(lambda x, w: dense(x, w, target=target))
        .trace(x, weight)
        .lower(lowering_platforms=(platform,))
        .as_text()
    )


def test_which_calls_take_the_kernel():
    assert TARGET in lowered(1)
    assert TARGET in lowered(MOST)
    assert TARGET not in lowered(MOST + 1)
    assert TARGET not in lowered(1, jnp.float32)
    assert TARGET not in lowered(1, platform="cuda")


def test_which_calls_for_a_gpu_take_its_kernel():
    def takes(*args, **kwargs):
        return CUDA_TARGET in lowered(*args, platform="cuda", target=GPU, **kwargs)

    assert takes(1)
    assert takes(CUDA_MOST)
    assert takes(1, jnp.float16)
    assert takes(1, weight=jnp.float32)
    assert not takes(CUDA_MOST + 1)
    assert not takes(1, jnp.float32)
    assert not takes(1, jnp.float16, weight=jnp.float32)
    assert not takes(1, k=36)  # rows are no multiple of 16 bytes
    assert CUDA_TARGET not in lowered(1, platform="cuda")  # the device is not known
    assert TARGET in lowered(MOST, target=Target("cpu"))


def test_the_call_of_the_gpu_kernel_stands_alone():
    """The program has no branch over platforms around it."""
    x, weight = jnp.zeros((1, 32), jnp.bfloat16), jnp.zeros((5, 32), jnp.bfloat16)
    traced = jax.make_jaxpr(lambda x, w: dense(x, w, target=GPU))(x, weight)
    text = str(traced)
    assert "ffi_call" in text
    assert "cond" not in text
    assert "platform_index" not in text


@pytest.mark.parametrize("bias", [None, jnp.ones(5, jnp.bfloat16), jnp.ones(5)])
def test_the_gpu_kernel_adds_the_bias_and_rounds_to_the_dtype_of_the_rows(bias):
    """No operation changes the result of the kernel."""
    x, weight = jnp.zeros((1, 32), jnp.bfloat16), jnp.zeros((5, 32), jnp.bfloat16)

    def run(x, weight, bias):
        return dense(x, weight, bias=bias, target=GPU, dtype=x.dtype)

    text = str(jax.make_jaxpr(run)(x, weight, bias))
    assert "ffi_call" in text
    assert "convert_element_type" not in text
    assert " add " not in text


@pytest.mark.parametrize("rows", [1, 2, MOST + 1, CUDA_MOST + 1])
@pytest.mark.parametrize("target", [None, Target("cpu"), GPU], ids=str)
def test_a_bias_is_added_to_the_float32_sums(rows, target):
    """The result is rounded once, and is as accurate as one that is rounded before and after."""
    if target is GPU and rows <= CUDA_MOST:
        target = Target("cuda", (7, 5))  # which has no kernel, so that XLA's forms run
    x, weight = operands(rows, 96, 40)
    bias = np.random.default_rng(2).normal(0, 8, 96).astype(ml_dtypes.bfloat16)
    run = functools.partial(jitted_dense, x, weight, target=target)
    sums = np.asarray(run())
    exact = sums + bias.astype(np.float32)
    np.testing.assert_array_equal(run(bias=bias), exact)
    once = np.asarray(run(bias=bias, dtype="bfloat16"))
    np.testing.assert_array_equal(once, exact.astype(ml_dtypes.bfloat16))
    twice = sums.astype(ml_dtypes.bfloat16) + bias
    assert (once != twice).any()
    truth = x.astype(np.float64) @ weight.astype(np.float64).T + bias.astype(np.float64)
    assert_as_accurate_as(once, twice, truth)
    with pytest.raises(AssertionError, match="yardstick"):
        assert_as_accurate_as(np.roll(once, 1, axis=1), twice, truth)


@pytest.mark.parametrize("target", [None, GPU], ids=str)
def test_a_bias_has_a_derivative(target, monkeypatch):
    """A product by XLA stands in for the kernel of a GPU."""

    def kernel(*given, **how):
        return jax.lax.stop_gradient(multiply(*given, **how))

    monkeypatch.setitem(DENSE_CUDA.lower, "dense", kernel)
    x, weight = operands(3, 5, 40)
    bias = np.linspace(-1, 1, 5, dtype=np.float32)
    bar = np.random.default_rng(3).normal(0, 1, (3, 5)).astype(np.float32)
    total = jax.grad(lambda b: jnp.sum(dense(x, weight, bias=b, target=target) * bar))
    found = jax.jit(total)(bias)
    sums, truth = bar.sum(axis=0), bar.astype(np.float64).sum(axis=0)
    assert_as_accurate_as(found, sums, truth)
    with pytest.raises(AssertionError, match="yardstick"):
        assert_as_accurate_as(np.roll(found, 1), sums, truth)


def fp8_weight(n=5, k=32, *, groups=False):
    values = np.random.default_rng((n, k)).normal(0, 1, (n, k)).astype(ml_dtypes.float8_e4m3fn)
    scale = np.linspace(0.5, 2, n)
    scale = scale[:, None] * np.linspace(1, 3, -(-k // 128)) if groups else scale
    return FP8Tensor(jnp.asarray(values), jnp.asarray(np.float32(scale)))


def lowered_fp8(rows, dtype=jnp.bfloat16, *, k=32, target=GPU, platform="cuda", **options):
    x, weight = jax.ShapeDtypeStruct((1, rows, k), dtype), fp8_weight(k=k)
    run = jax.jit(lambda x, w: dense_fp8(x, w, target=target, **options))
    return run.trace(x, weight).lower(lowering_platforms=(platform,)).as_text()


def test_which_calls_with_fp8_weights_take_the_kernel():
    assert FP8_TARGET in lowered_fp8(1)
    assert FP8_TARGET in lowered_fp8(CUDA_MOST)
    assert FP8_TARGET in lowered_fp8(1, jnp.float16)
    assert FP8_TARGET not in lowered_fp8(CUDA_MOST + 1)
    assert FP8_TARGET not in lowered_fp8(1, jnp.float32)
    assert FP8_TARGET not in lowered_fp8(1, k=40)  # rows are no multiple of 16 bytes
    assert FP8_TARGET not in lowered_fp8(1, target=None)  # the device is not known
    assert FP8_TARGET not in lowered_fp8(1, target=Target("cuda", (7, 5)))
    assert FP8_TARGET not in lowered_fp8(1, target=Target("cpu"), platform="cpu")


@pytest.mark.parametrize(
    ("weight", "options", "target", "reason"),
    [
        (fp8_weight(), {}, GPU, None),
        (fp8_weight(), {"dtype": jnp.float16}, Target("cuda", (8, 0)), None),
        (fp8_weight(k=40), {}, GPU, "FP8 inputs of at least 16 in multiples of 16; got 40"),
        (fp8_weight(), {"dtype": jnp.float32}, GPU, "needs bfloat16 or float16, got float32"),
        (fp8_weight(), {}, Target("cuda", (7, 5)), r"compute capability in \[8.0"),
        (fp8_weight(), {}, Target("cpu"), "needs cuda, got cpu"),
    ],
)
def test_explain_names_what_runs_fp8_weights(weight, options, target, reason):
    linear = FP8Linear(weight, target=GPU, **options)
    choice = explain(linear, target=target)
    if reason is None:
        assert choice.backend == "dense_cuda"
        assert choice.notes == ("1 to 64 rows take the kernel; more rows take XLA's dot",)
    else:
        assert choice.backend == "xla"
        assert re.search(reason, choice.reasons["dense_cuda"])
    assert (FP8_TARGET in lowered_fp8(1, linear.dtype, k=weight.shape[1], target=target)) == (
        reason is None
    )


def test_explain_lists_fp8_linears_of_a_model():
    """What it says of the model is said of its NVFP4 weights."""
    nvfp4 = NVFP4Linear(32, 5, weight=quantize(jnp.ones((5, 32))), target=GPU)
    choice = explain(MergedLinear(q=FP8Linear(fp8_weight(), target=GPU), k=nvfp4))
    assert [(path, c.backend) for path, c in choice.modules] == [
        ("k", "moe_w4a16_sm90"),
        ("q", "dense_cuda"),
    ]
    assert choice.backend == "moe_w4a16_sm90"


@pytest.mark.parametrize("activations", list(FP8ActivationScaling))
def test_activations_are_rounded_before_the_kernel(activations):
    text = lowered_fp8(4, activations=activations, input_scale=jnp.float32(0.1))
    assert FP8_TARGET in text
    scales = {"fp8_weights": 0, "fp8": 1, "fp8_tensor": 1, "fp8_token": 4}[activations]
    types = f"tensor<5xf32>, tensor<{scales}xf32>, tensor<0xbf16>"
    assert f"{types}) -> tensor<4x5xf32>" in text


def test_weights_with_a_scale_for_each_group_take_the_kernel_too():
    linear = FP8Linear(fp8_weight(5, 304, groups=True), target=GPU)
    run = jax.jit(linear).trace(jnp.zeros((2, 304), jnp.bfloat16))
    text = run.lower(lowering_platforms=("cuda",)).as_text()
    assert FP8_TARGET in text
    assert "tensor<5x3xf32>, tensor<0xf32>, tensor<0xbf16>) -> tensor<2x5xbf16>" in text
    assert explain(linear).backend == "dense_cuda"


@pytest.mark.parametrize("activations", list(FP8ActivationScaling))
def test_a_scale_for_each_group_multiplies_its_weights(activations):
    weight, rng = fp8_weight(6, 304, groups=True), np.random.default_rng(0)
    scale = np.asarray(weight.scale, np.float64).repeat(128, axis=1)[:, :304]
    values = np.asarray(weight.values, np.float64) * scale
    np.testing.assert_array_equal(weight.dequantize(), values.astype(np.float32))
    x = rng.normal(0, 1, (2, 3, 304)).astype(np.float32)
    how = {"activations": activations, "input_scale": np.float32(0.01)}
    run = jax.jit(functools.partial(dense_fp8, **how))
    one = FP8Tensor(np.eye(304).astype(jnp.float8_e4m3fn), np.ones(304, np.float32))
    rounded, y = np.asarray(run(x, one), np.float64), run(x, weight)  # what the product sees of x
    plain = xla(np.float32(rounded).reshape(6, 304), np.float32(values)).reshape(2, 3, 6)
    assert_as_accurate_as(y, plain, rounded @ values.T)
    with pytest.raises(AssertionError, match="yardstick"):
        assert_as_accurate_as(rounded @ np.roll(values, 128, axis=1).T, plain, rounded @ values.T)


@pytest.mark.parametrize("kind", ["fp8", "fp8 with a bias", "dense with a bias"])
def test_a_linear_takes_the_kernel_and_a_chain_holds_it(kind):
    """The kernel adds the bias and rounds to the dtype of the rows, which the next call reads."""
    own = jnp.ones(32) if "bias" in kind else None
    if kind.startswith("fp8"):
        linear, name = FP8Linear(fp8_weight(32), own, target=GPU), FP8_TARGET
    else:
        linear, name = DenseLinear(jnp.ones((32, 32)), own, target=GPU), CUDA_TARGET
    x = jnp.zeros((4, 32), jnp.bfloat16)

    def twice(x):
        return linear(linear(x))

    run = jax.jit(chain_calls(twice)).trace(x)
    text = run.lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("nvfp4_call_chain_cuda") == 1
    assert text.count(name) == 2
    assert "stablehlo.add" not in text
    assert "stablehlo.convert" not in text
    assert "stablehlo.multiply" not in text


def test_derivatives_of_the_kernel_for_fp8_weights_are_those_of_xla(monkeypatch):
    """A function without a derivative stands in for the kernel, which has none either."""
    x, weight = jnp.asarray(operands(3, 5, 32)[0]), fp8_weight()

    def kernel(x, values, scale, own, bias, dtype):
        assert own is None
        assert bias is None
        return jax.lax.stop_gradient(dense(x, values.astype(x.dtype), dtype=dtype) * scale[None])

    def gradient(target):
        y = functools.partial(dense_fp8, weight=weight, target=target)
        return jax.jit(jax.grad(lambda x: jnp.sum(jnp.sin(y(x)))))(x)

    expected = gradient(None)
    monkeypatch.setitem(DENSE_CUDA.lower, "dense_fp8", kernel)
    scale = np.asarray(weight.scale, np.float64)[:, None]
    matrix = np.asarray(weight.values, np.float64) * scale
    truth = np.cos(np.asarray(x, np.float64) @ matrix.T) @ matrix
    found = gradient(GPU)
    assert_as_accurate_as(found, expected, truth)
    with pytest.raises(AssertionError, match="yardstick"):
        assert_as_accurate_as(np.roll(found, 1, axis=1), expected, truth)


@pytest.mark.parametrize("rows", [2, MOST + 1])
@pytest.mark.parametrize("target", [None, Target("cpu")])
def test_a_narrow_result_is_the_float32_one_rounded(rows, target):
    x, weight = operands(rows, 5, 40)
    narrow = np.asarray(jitted_dense(x, weight, target=target, dtype="bfloat16"))
    assert narrow.dtype == jnp.bfloat16
    found = np.asarray(jitted_dense(x, weight, target=target))
    np.testing.assert_array_equal(narrow, found.astype(jnp.bfloat16))


@pytest.mark.parametrize("target", [None, Target("cpu")])
def test_operands_of_different_dtypes_count_as_float32(target):
    x, weight = operands(3, 5, 40)
    wide = weight.astype(np.float32) * np.float32(1.001)
    found = dense(x, wide, target=target)
    expected = dense(x.astype(np.float32), wide, target=target)
    np.testing.assert_array_equal(found, expected)


def test_many_rows_by_a_float32_matrix_on_a_gpu():
    """No bit of the matrix is lost, and no product of the program has float32 operands."""
    k, n = 64, 40
    wide = np.random.default_rng(0).normal(0, 1, (n, k)).astype(np.float32)
    unit = np.tile(np.eye(k, dtype=jnp.bfloat16), (2, 1))
    np.testing.assert_array_equal(jitted_dense(unit, wide, target=GPU), np.tile(wide.T, (2, 1)))
    without_third = jax.lax.reduce_precision(wide, 8, 15)
    assert (np.asarray(without_third) != wide).mean() > 0.9  # two parts would be seen
    x = np.tile(operands(2 * k, n, k)[0], (2, 1))
    exact = x.astype(np.float64) @ wide.astype(np.float64).T
    plain = np.asarray(xla(x.astype(np.float32), wide))
    found = np.asarray(jitted_dense(x, wide, target=GPU))
    assert np.abs(found - exact).max() <= 2 * np.abs(plain - exact).max()
    program = lowered(CUDA_MOST + 1, weight=jnp.float32, platform="cuda", target=GPU)
    (product,) = (line for line in program.splitlines() if "dot_general" in line)
    assert product.count("bf16") == 2, product


def test_derivatives_of_a_product_in_parts():
    x, _ = operands(CUDA_MOST + 1, 5, 40)
    weight = np.random.default_rng(1).normal(0, 1, (5, 40)).astype(np.float32)

    def loss(x, weight, target):
        return jnp.sum(jnp.sin(dense(x, weight, target=target)))

    gradient = jax.jit(jax.grad(loss, 1), static_argnums=2)
    found, expected = (np.asarray(gradient(x, weight, to)) for to in (GPU, Target("cpu")))
    assert np.abs(found - expected).max() <= 1e-5 * np.abs(expected).max()


def test_a_program_without_the_extension_takes_xla(monkeypatch):
    monkeypatch.setattr(_ffi, "why_unavailable", lambda extension: "not built")
    assert TARGET not in lowered(1)


def test_leading_axes_and_vmap():
    x, weight = operands(6, 5, 40)
    expected = run(x, weight)
    np.testing.assert_array_equal(dense(x.reshape(2, 3, 40), weight), expected.reshape(2, 3, 5))
    mapped = jax.vmap(dense, in_axes=(0, None))(x.reshape(2, 3, 40), weight)
    np.testing.assert_array_equal(mapped, expected.reshape(2, 3, 5))


def test_derivatives_are_those_of_the_product():
    x, weight = operands(3, 5, 40)

    def loss(product):
        return lambda x, weight: jnp.sum(jnp.sin(product(x, weight)))

    found = jax.jit(jax.grad(loss(dense), (0, 1)))(x, weight)
    expected = jax.jit(jax.grad(loss(xla), (0, 1)))(x, weight)
    for one, other in zip(found, expected, strict=True):
        one, other = np.float32(one), np.float32(other)
        # One unit in the last place of bfloat16, to which both results are rounded.
        assert np.abs(one - other).max() <= 2.0**-8 * np.abs(other).max()
    along = (weight[:3], x[:1].repeat(5, axis=0))
    push = jax.jit(lambda *given: [jax.jvp(f, given, along)[1] for f in (dense, xla)])
    own, plain = map(np.asarray, push(x, weight))
    # The tangent is one product of longer rows: dx @ weight.T + x @ dweight.T.
    rows = np.concatenate([along[0], x], axis=1), np.concatenate([weight, along[1]], axis=1)
    assert error(own, *rows) <= 2 * max(error(plain, *rows), UNIT)
    assert error(np.roll(own, 1), *rows) > 1000 * UNIT


@pytest.mark.parametrize(
    ("x", "weight", "message"),
    [
        ((2, 16), (3, 15), r"weight \[n, k\]"),
        ((2, 16), (48,), r"weight \[n, k\]"),
        ((32,), (3, 16), r"x \[m, k\]"),
    ],
)
def test_wrong_shapes(x, weight, message):
    call = jax.ffi.ffi_call(TARGET, jax.ShapeDtypeStruct((2, 3), jnp.float32))
    with pytest.raises(jax.errors.JaxRuntimeError, match=message):
        call(jnp.zeros(x), jnp.zeros(weight, jnp.bfloat16))


def test_wrong_types_and_instruction_sets():
    output = jax.ShapeDtypeStruct((2, 3), jnp.float32)
    x, weight = jnp.zeros((2, 16)), jnp.zeros((3, 16), jnp.bfloat16)
    call = jax.ffi.ffi_call(TARGET, output)
    with pytest.raises(jax.errors.JaxRuntimeError, match="weight"):
        call(x, x[:1].repeat(3, axis=0))
    with pytest.raises(jax.errors.JaxRuntimeError, match="isa"):
        call(x, weight, isa="mmx")
