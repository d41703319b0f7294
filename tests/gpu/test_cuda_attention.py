"""Run the suite of attention on a GPU, and compare gradients, batches and checks of operands."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.extensions import cuda_calls
from support.kernels.attention_suite import (
    CASES,
    AttentionSuite,
    assert_nan_stays,
    in_float64,
    make,
    plain,
    worst,
)
from support.kernels.axes import axis
from support.kernels.fp8_attention_suite import FP8, FP8_CASES, Fp8KernelSuite, make_fp8
from support.ops.gradients import gradients

from jax_nvfp4_moe.ops import attention

pytestmark = pytest.mark.gpu


def on_cuda(*operands, k_scale=None, v_scale=None, **options):
    scales = {} if k_scale is None else {"k_scale": k_scale, "v_scale": v_scale}
    operands, scales = jax.tree.map(jnp.asarray, (operands, scales))
    return attention(*operands, **scales, **options, backend="attention_cuda")


class TestAttention(AttentionSuite):
    case = axis(*CASES)
    dtype = axis("bfloat16", "float16")

    @pytest.fixture
    def run(self):
        return on_cuda


class TestFp8(Fp8KernelSuite):
    case = axis(*FP8_CASES)
    dtype = axis("bfloat16", "float16")

    @pytest.fixture
    def run(self):
        return on_cuda


@pytest.mark.parametrize("case", ["one query of the widest", "64 rows with sinks", "prefill"])
def test_the_result_with_fp8_is_the_same_each_time(case):
    operands, scales = make_fp8(FP8_CASES[case], jnp.dtype("bfloat16")).given()
    call = jax.jit(lambda *operands: on_cuda(*operands, **scales, **FP8_CASES[case].options))
    first, second = (np.asarray(call(*operands)).tobytes() for _ in range(2))
    assert first == second


@pytest.mark.parametrize("case", CASES)
def test_the_result_is_the_same_each_time(case):
    operands, options = make(case, jnp.dtype("bfloat16")), CASES[case].options
    call = jax.jit(lambda *operands: on_cuda(*operands, **options))
    first, second = (np.asarray(call(*operands)).tobytes() for _ in range(2))
    assert first == second


def test_nan_among_divided_keys_stays():
    assert_nan_stays(on_cuda)


@pytest.mark.parametrize("scale", [-0.3, 0.0])
def test_any_scale(scale):
    operands = make("eight queries", jnp.dtype("bfloat16"))
    expected = in_float64(*operands, scale=scale)
    bound = 2 * worst(plain(*operands, scale=scale), expected)
    assert worst(on_cuda(*operands, scale=scale), expected) <= bound
    assert worst(on_cuda(*operands, scale=scale + 0.1), expected) > 5 * bound


def test_batches_and_gradients():
    """`vmap` equals a loop, and gradients are those of the reference."""
    q, k, v, positions = map(jnp.asarray, make("keys wider than values", jnp.dtype("bfloat16")))
    k, v = jnp.nan_to_num(k), jnp.nan_to_num(v)
    both = jax.vmap(lambda q: on_cuda(q, k, v, positions))(jnp.stack([q, 2 * q]))
    for got, given in zip(both, (q, 2 * q), strict=True):
        np.testing.assert_array_equal(got, on_cuda(given, k, v, positions))

    def gradients_of(backend):
        return gradients(lambda *qkv: attention(*qkv, positions, backend=backend), q, k, v)

    for got, expected in zip(*map(gradients_of, ("attention_cuda", "reference")), strict=True):
        assert float(jnp.abs(expected).max()) > 0
        np.testing.assert_array_equal(got, expected)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"q": jnp.zeros((2, 3, 4, 16))}, "q: expected bfloat16 or float16, got float32"),
        ({"k": jnp.zeros((2, 2, 8, 24), jnp.float16)}, r"k \[b, m, s, d\]: expected \[2, 2, 8, 16"),
        ({"v": jnp.zeros((2, 2, 7, 16), jnp.float16)}, r"v \[b, m, s, dv\]: expected \[2, 2, 8"),
        ({"v": jnp.zeros((2, 2, 8, 12), jnp.float16)}, r"dv \(v\): expected a positive multiple"),
        ({"v": jnp.zeros((2, 2, 8, 264), jnp.float16)}, r"dv \(v\): expected at most 256"),
        ({"positions": jnp.zeros((2, 2), jnp.int32)}, r"positions \[b, t\]: expected \[2, 3\]"),
        ({"sinks": jnp.zeros(3)}, r"sinks \[n\]"),
        ({"scale": np.float32(0)}, "scale: expected a number above 0"),
        ({"window": np.int32(-1)}, "window: expected at least 0, got -1"),
    ],
)
def test_kernel_names_a_wrong_operand(changes, message):
    cuda_calls.register()
    operands = {
        "q": jnp.zeros((2, 3, 4, 16), jnp.float16),
        "k": jnp.zeros((2, 2, 8, 16), jnp.float16),
        "v": jnp.zeros((2, 2, 8, 16), jnp.float16),
        "positions": jnp.zeros((2, 3), jnp.int32),
        "sinks": jnp.zeros(0),
    }
    options = {"scale": np.float32(1), "window": np.int32(0), "chunk": np.int32(0)}
    operands |= {name: changes[name] for name in operands if name in changes}
    options |= {name: changes[name] for name in options if name in changes}
    y = (2, 3, 4, operands["v"].shape[3])
    outputs = (jax.ShapeDtypeStruct(y, operands["q"].dtype), jax.ShapeDtypeStruct((0,), jnp.uint8))
    with pytest.raises((jax.errors.JaxRuntimeError, ValueError), match=message):
        jax.block_until_ready(
            jax.ffi.ffi_call("nvfp4_attention_cuda", outputs)(*operands.values(), **options)
        )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"k": jnp.zeros((2, 2, 8, 16), jnp.float16)}, "k: expected float8_e4m3fn, got float16"),
        ({"v": jnp.zeros((2, 2, 8, 16), jnp.bfloat16)}, "v: expected float8_e4m3fn, got bfloat16"),
        ({"v": jnp.zeros((2, 2, 8, 24), FP8)}, r"dv \(v\): expected a positive multiple of 16"),
        ({"k_scale": jnp.ones(3)}, r"k_scale \[m\]: expected \[2\], got \[3\]"),
        ({"v_scale": jnp.ones(2, jnp.float16)}, "v_scale: expected float32, got float16"),
    ],
)
def test_kernel_for_fp8_names_a_wrong_operand(changes, message):
    cuda_calls.register()
    operands = {
        "q": jnp.zeros((2, 3, 4, 16), jnp.float16),
        "k": jnp.zeros((2, 2, 8, 16), FP8),
        "v": jnp.zeros((2, 2, 8, 16), FP8),
        "k_scale": jnp.ones(2),
        "v_scale": jnp.ones(2),
        "positions": jnp.zeros((2, 3), jnp.int32),
        "sinks": jnp.zeros(0),
    }
    operands |= changes
    options = {"scale": np.float32(1), "window": np.int32(0), "chunk": np.int32(0)}
    y = jax.ShapeDtypeStruct((2, 3, 4, operands["v"].shape[3]), jnp.float16)
    outputs = (y, jax.ShapeDtypeStruct((0,), jnp.uint8))
    with pytest.raises((jax.errors.JaxRuntimeError, ValueError), match=message):
        jax.block_until_ready(
            jax.ffi.ffi_call("nvfp4_attention_fp8_cuda", outputs)(*operands.values(), **options)
        )
