"""Test NVFP4Linear: products, arguments that are refused, and kernels of Flax."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jax_nvfp4_moe import NVFP4Linear, quantize
from jax_nvfp4_moe.testing import assert_as_accurate_as


def tokens(*shape, dtype=jnp.float32):
    return np.random.default_rng(1).standard_normal((*shape, 64)).astype(dtype)


def test_a_linear_with_a_bias():
    weight = quantize(np.random.default_rng(0).standard_normal((48, 64), np.float32))
    bias = jnp.asarray(np.arange(48, dtype=np.float32))
    module = NVFP4Linear(64, 48, weight=weight, bias=bias, dtype=jnp.float32)
    x = tokens(2, 3)
    values = np.asarray(weight.dequantize())
    truth = np.asarray(x, np.float64) @ np.asarray(values, np.float64).T
    yardstick = jax.jit(lambda x, w, b: jnp.einsum("btk,nk->btn", x, w) + b[None, None])(
        x, values, bias
    )
    assert_as_accurate_as(module(x), yardstick, truth + np.arange(48))
    assert NVFP4Linear(64, 48, weight=weight, use_bias=True).bias[...].shape == (48,)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"bias": jnp.zeros(31)}, r"bias: expected shape \(32,\), got \(31,\)"),
        ({"scheme": "w4a4"}, r"input_scale: scheme w4a4 needs .*; got None"),
        ({"input_scale": jnp.ones(2)}, r"input_scale: expected shape \(\), got \(2,\)"),
    ],
)
def test_a_linear_refuses_at_construction(changes, message):
    with pytest.raises(ValueError, match=message):
        NVFP4Linear(64, 32, checkpoint_scheme="w4a4", rngs=nnx.Rngs(0), **changes)


def rounded(kernel):
    """Round a kernel ``[..., inputs, outputs]`` to NVFP4."""
    return np.asarray(quantize(kernel.swapaxes(-1, -2)).dequantize()).swapaxes(-1, -2)


@pytest.mark.parametrize("outputs", [48, 64], ids=["oblong", "square"])
def test_a_linear_from_a_kernel_of_flax(outputs):
    dense = nnx.Linear(64, outputs, rngs=nnx.Rngs(0))
    kernel, bias = np.asarray(dense.kernel[...]), np.arange(outputs, dtype=np.float32)
    linear = NVFP4Linear.from_dense(kernel, bias=bias, dtype=jnp.float32)
    x = tokens(5)
    values = rounded(kernel)
    yardstick = jax.jit(lambda x, w, b: x @ w + b[None])(x, values, bias)
    truth = np.asarray(x, np.float64) @ np.asarray(values, np.float64) + bias
    assert_as_accurate_as(linear(x), yardstick, truth)
    if outputs == 64:
        wrong = NVFP4Linear.from_dense(kernel.T, bias=bias, dtype=jnp.float32)(x)
        with pytest.raises(AssertionError, match=r"over 2\.0 x"):
            assert_as_accurate_as(wrong, yardstick, truth)
    with pytest.raises(
        ValueError, match=r"kernel: expected two axes, \[inputs, outputs\]; got shape \(64,\)"
    ):
        NVFP4Linear.from_dense(kernel[:, 0])
