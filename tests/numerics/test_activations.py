"""Every activation against its formula in float64 numpy."""

import math

import jax.numpy as jnp
import numpy as np
import pytest

from jax_nvfp4_moe.numerics.activations import ACTIVATIONS, activate, find_activation


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def gelu(x):
    return 0.5 * x * (1 + np.vectorize(math.erf)(x / math.sqrt(2)))


def gelu_tanh(x):
    return 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def clamp(g, u, limit):
    return np.minimum(g, limit), np.clip(u, -limit, limit)


def oai(g, u, alpha=1.702, beta=1.0, limit=7.0):
    g, u = clamp(g, u, limit)
    return g * sigmoid(alpha * g) * (u + beta)


def step(g, u, limit=7.0):
    return np.minimum(g * sigmoid(g), limit) * np.clip(u, -limit, limit)


GATED = {
    "silu": lambda g, u: g * sigmoid(g) * u,
    "gelu": lambda g, u: gelu(g) * u,
    "gelu_tanh": lambda g, u: gelu_tanh(g) * u,
    "swigluoai": oai,
    "swigluoai_uninterleave": oai,
    "swiglustep": step,
}
PLAIN = {
    "relu2": lambda x: np.maximum(x, 0) ** 2,
    "silu_no_mul": lambda x: x * sigmoid(x),
    "gelu_no_mul": gelu,
    "gelu_tanh_no_mul": gelu_tanh,
}


@pytest.fixture
def halves():
    rng = np.random.default_rng(0)
    return rng.standard_normal((2, 5, 48)) * 6


def assert_float32_close(actual, want):
    """Assert an error of a few units in the last place of the largest value, as in float32."""
    assert actual.dtype == jnp.float32
    assert np.abs(np.asarray(actual, np.float64) - want).max() < 8 * 2**-24 * np.abs(want).max()


def test_the_table_is_covered():
    assert ACTIVATIONS.keys() == GATED.keys() | PLAIN.keys()


@pytest.mark.parametrize("name", GATED)
def test_gated(name, halves):
    g, u = halves.astype(np.float32).astype(np.float64)
    rows = (
        np.stack([g, u], -1).reshape(5, 96) if name == "swigluoai" else np.concatenate([g, u], -1)
    )
    assert_float32_close(
        activate(find_activation(name), jnp.asarray(rows, jnp.float32)), GATED[name](g, u)
    )


@pytest.mark.parametrize("name", PLAIN)
def test_not_gated(name, halves):
    x = halves[0].astype(np.float32)
    assert_float32_close(
        activate(find_activation(name), jnp.asarray(x)), PLAIN[name](x.astype(np.float64))
    )


def test_clamp_and_parameters(halves):
    g, u = halves.astype(np.float32).astype(np.float64)
    rows = jnp.asarray(np.concatenate([g, u], -1), jnp.float32)
    want = GATED["silu"](*clamp(g, u, 2.5))
    assert_float32_close(activate(find_activation("silu", limit=2.5), rows), want)
    call = find_activation("swigluoai_uninterleave", alpha=1.1, beta=0.5, limit=3)
    assert_float32_close(activate(call, rows), oai(g, u, 1.1, 0.5, 3.0))
    call = find_activation("swiglustep", limit=2.5)
    assert_float32_close(activate(call, rows), step(g, u, 2.5))
    assert np.abs(step(g, u, 2.5) - want).max() > 0.1  # another function than silu with this limit
    call = find_activation("relu2", limit=2)
    assert_float32_close(
        activate(call, jnp.asarray(g, jnp.float32)), PLAIN["relu2"](np.minimum(g, 2))
    )


def test_aliases_and_errors():
    assert find_activation("gelu_pytorch_tanh").name == "gelu_tanh"
    assert find_activation("relu2_no_mul").name == "relu2"
    with pytest.raises(ValueError, match=r"activation: expected one of .*'silu'.*got 'mish'"):
        find_activation("mish")
    with pytest.raises(ValueError, match="limit: expected a positive number, got 0"):
        find_activation("silu", limit=0)
    with pytest.raises(ValueError, match=r"alpha, beta: .*'swigluoai'.*got 'silu'"):
        find_activation("silu", alpha=1.5)
