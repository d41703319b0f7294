"""Run the suite of the products of heads on their CUDA kernels, and check their errors."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.extensions import cuda_calls
from support.kernels.axes import axis
from support.kernels.head_product_suite import CASES, HeadProductSuite, make
from support.ops.gradients import gradients

from jax_nvfp4_moe.ops.head_products import absorb, absorb_queries, expand_values

pytestmark = pytest.mark.gpu


def on_cuda(call):
    def run(q, keys, positions, x, values):
        return absorb_queries(q, keys, positions, **call.options), expand_values(x, values)

    operands = call.q, call.keys, call.positions, call.x, call.values
    traced = jax.jit(run).trace(*map(jnp.asarray, operands))
    text = traced.lower().as_text()
    for name in ("absorb_queries", "expand_values"):
        assert f"@nvfp4_{name}_cuda" in text
    return tuple(map(np.asarray, jax.jit(run)(*map(jnp.asarray, operands))))


class TestHeadProducts(HeadProductSuite):
    case = axis(*CASES)
    dtype = axis("bfloat16", "float16")

    @pytest.fixture
    def run(self):
        return on_cuda


def test_derivative_is_that_of_the_reference():
    call = make("three tokens", jnp.dtype("bfloat16"))
    q, keys, positions = map(jnp.asarray, (call.q, call.keys, call.positions))

    def gradients_of(run):
        return gradients(lambda q, keys: run(q, keys, positions, **call.options), q, keys)

    for got, expected in zip(*map(gradients_of, (absorb_queries, absorb)), strict=True):
        assert float(jnp.abs(expected).max()) > 0
        np.testing.assert_array_equal(got, expected)


def test_vmap_is_a_loop():
    call = make("three tokens", jnp.dtype("bfloat16"))
    x, values = jnp.asarray(call.x), jnp.asarray(call.values)
    both = jax.vmap(lambda x: expand_values(x, values))(jnp.stack([x, 2 * x]))
    for got, given in zip(both, (x, 2 * x), strict=True):
        np.testing.assert_array_equal(got, expand_values(given, values))


F16 = jnp.float16
QUERIES = {
    "q": jnp.zeros((2, 4, 24), F16),
    "keys": jnp.zeros((4, 16, 32), F16),
    "positions": jnp.zeros(2, jnp.int32),
    "frequencies": jnp.zeros(4),
}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"q": jnp.zeros((2, 4, 24))}, "x: expected bfloat16 or float16, got float32"),
        ({"q": jnp.zeros((2, 4, 12), F16)}, r"x \[rows, n, p \+ e\], e: expected at least 0"),
        ({"q": jnp.zeros((2, 4, 25), F16)}, r"e \(q\): expected an even number, got 9"),
        ({"q": jnp.zeros((2, 4, 26), F16)}, r"frequencies \[e/2\]: expected \[5\], got \[4\]"),
        ({"keys": jnp.zeros((3, 16, 32), F16)}, r"keys \[n, p, k\]: expected \[4, 16, 32\]"),
        ({"keys": jnp.zeros((4, 16, 40), F16)}, r"y \[rows, n, k \+ e\]: expected \[2, 4, 48\]"),
        ({"positions": jnp.zeros(3, jnp.int32)}, r"positions \[rows\]: expected \[2\]"),
        ({"frequencies": jnp.zeros(3)}, r"frequencies \[e/2\]"),
    ],
)
def test_kernel_names_a_wrong_operand(changes, message):
    cuda_calls.register()
    operands = {**QUERIES, **changes}
    y = jax.ShapeDtypeStruct((2, 4, 40), operands["q"].dtype)
    options = {"rotation_scale": np.float32(1), "interleaved": True}
    with pytest.raises((jax.errors.JaxRuntimeError, ValueError), match=message):
        jax.block_until_ready(
            jax.ffi.ffi_call("nvfp4_absorb_queries_cuda", y)(*operands.values(), **options)
        )


@pytest.mark.parametrize(
    ("x", "values", "message"),
    [
        ((9, 4, 32), (4, 16, 32), r"rows \(x\): expected at most 8, got 9"),
        ((2, 4, 32), (4, 16, 24), r"x \[rows, n, k\]: expected \[2, 4, 24\], got \[2, 4, 32\]"),
        ((2, 4, 36), (4, 16, 36), r"k \(values\): expected a positive multiple of 8"),
    ],
)
def test_expansion_names_a_wrong_operand(x, values, message):
    cuda_calls.register()
    operands = jnp.zeros(x, F16), jnp.zeros(values, F16)
    y = jax.ShapeDtypeStruct((x[0], 4, 16), F16)
    with pytest.raises((jax.errors.JaxRuntimeError, ValueError), match=message):
        jax.block_until_ready(jax.ffi.ffi_call("nvfp4_expand_values_cuda", y)(*operands))
