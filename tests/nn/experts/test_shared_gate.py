"""Test the gate of shared experts, which the sum behind it may compute."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jax_nvfp4_moe import NVFP4Linear, NVFP4MoE, Target, quantize
from jax_nvfp4_moe.nn.intermediates import capture
from jax_nvfp4_moe.nn.linear.dense_linear import DenseLinear

HOPPER = Target("cuda", (9, 0))


def make(**changes):
    sizes = {"num_experts": 8, "hidden": 64, "intermediate": 32, "top_k": 2}
    return NVFP4MoE(**sizes, rngs=nnx.Rngs(0), **changes)


def tokens(*shape, dtype=jnp.float32):
    return np.random.default_rng(1).standard_normal((*shape, 64)).astype(dtype)


@pytest.mark.parametrize(
    ("dtype", "gate", "joins"),
    [
        ("bfloat16", {}, True),
        ("float16", {}, True),
        ("bfloat16", {"bias": True}, False),
        ("bfloat16", {"dtype": jnp.float32}, False),
        ("bfloat16", {"nvfp4": True}, False),
    ],
)
def test_a_plain_gate_of_shared_experts_is_computed_by_the_sum(dtype, gate, joins):
    """On a GPU, few rows take one kernel for both. Other gates keep a product of their own."""
    dtype = jnp.dtype(dtype)
    weight = jnp.asarray(np.random.default_rng(4).standard_normal((1, 64), np.float32) / 8)
    if gate.get("nvfp4"):
        module = NVFP4Linear(64, 1, weight=quantize(weight), dtype=dtype, target=HOPPER)
    else:
        bias = jnp.ones(1) if gate.get("bias") else None
        module = DenseLinear(weight, bias, dtype=gate.get("dtype", dtype), target=HOPPER)
    shared = NVFP4Linear(64, 64, rngs=nnx.Rngs(1), dtype=dtype, target=HOPPER)
    moe = make(dtype=dtype, shared_experts=shared, shared_gate=module, target=HOPPER)

    def text(rows):
        traced = jax.jit(lambda moe, x: moe(x)).trace(moe, tokens(rows, dtype=dtype))
        return traced.lower(lowering_platforms=("cuda",)).as_text()

    assert ("nvfp4_add_linear_gated_cuda" in text(4)) == joins
    assert ("nvfp4_add_gated_cuda" in text(4)) == (not joins)
    assert "nvfp4_add" not in text(65)


def test_the_input_of_a_gate_is_recorded():
    """Calibration and measurements of errors capture what each linear layer reads."""
    gate = DenseLinear(jnp.asarray(np.full((1, 64), 1 / 64, np.float32)))
    shared = NVFP4Linear(64, 64, rngs=nnx.Rngs(1))
    moe = make(shared_experts=shared, shared_gate=gate)
    x = tokens(3, dtype=jnp.bfloat16)
    with capture(moe) as seen:
        moe(x)
    np.testing.assert_array_equal(seen["shared_gate"][0], x)
