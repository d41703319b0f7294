"""Test the products of heads off GPUs: their definition, their choice and their derivative."""

import re

import jax
import jax.numpy as jnp
import pytest
from support.kernels.axes import axis
from support.kernels.head_product_suite import HeadProductSuite, make

from jax_nvfp4_moe import Target
from jax_nvfp4_moe.ops.head_products import absorb_queries, expand_values

GPU = Target("cuda", (9, 0))
KERNELS = ["nvfp4_absorb_queries_cuda", "nvfp4_expand_values_cuda"]


class TestPlain(HeadProductSuite):
    """XLA's dot passes its own bound, and the suite finds faults in it.

    Cases that differ in sizes alone are left to kernels, which divide them.
    """

    case = axis("deepseek", "three tokens", "kimi", "eight rows")
    dtype = axis("bfloat16")

    @pytest.fixture
    def run(self):
        def call(call):
            operands = map(jnp.asarray, (call.q, call.keys, call.positions))
            queries = absorb_queries(*operands, **call.options)
            return queries, expand_values(jnp.asarray(call.x), jnp.asarray(call.values))

        return call


def calls_of(rows, dtype, target):
    def run(q, keys, positions, x, values):
        queries = absorb_queries(q, keys, positions, rope=None, interleaved=True, target=target)
        return queries, expand_values(x, values, target=target)

    b, t = rows
    shapes = (b, t, 4, 24), (4, 16, 32), (b, t), (b, t, 4, 32), (4, 16, 32)
    operands = [jax.ShapeDtypeStruct(shape, dtype) for shape in shapes]
    operands[2] = jax.ShapeDtypeStruct((b, t), jnp.int32)
    text = jax.jit(run).trace(*operands).lower(lowering_platforms=("cuda",)).as_text()
    return sorted(re.findall(r"custom_call @(nvfp4\w+)", text))  # functions have no order


@pytest.mark.parametrize(
    ("rows", "dtype", "target", "names"),
    [
        ((1, 1), jnp.bfloat16, GPU, KERNELS),
        ((2, 4), jnp.float16, GPU, KERNELS),
        ((9, 1), jnp.bfloat16, GPU, []),
        ((0, 1), jnp.bfloat16, GPU, []),
        ((1, 1), jnp.float32, GPU, []),
        ((1, 1), jnp.bfloat16, Target("cuda", (7, 5)), []),
        ((1, 1), jnp.bfloat16, Target("cpu"), []),
    ],
)
def test_few_rows_run_kernels_on_a_gpu(rows, dtype, target, names):
    assert calls_of(rows, dtype, target) == names


def test_the_call_is_differentiated_around_its_kernel():
    call = make("deepseek", jnp.dtype("bfloat16"))
    keys, positions = jnp.asarray(call.keys), jnp.asarray(call.positions)

    def loss(q):
        y = absorb_queries(q, keys, positions, **call.options, target=GPU)
        return jnp.sum(y.astype(jnp.float32) ** 2)

    traced = jax.jit(jax.grad(loss)).trace(jnp.asarray(call.q))
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("@nvfp4_absorb_queries_cuda") == 1
    assert "stablehlo.dot_general" in text
