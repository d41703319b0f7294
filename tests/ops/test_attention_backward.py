"""The backward pass of attention on GPUs, with plain XLA in place of cuDNN."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.kernels import attention_gradient_suite as suite
from support.kernels.axes import axis

from jax_nvfp4_moe.ops.causal_attention import cudnn

DTYPE = jnp.dtype("bfloat16")
WITHOUT_CUDNN = pytest.mark.skipif(jax.default_backend() != "cpu", reason="a GPU has cuDNN")


@pytest.fixture(autouse=True)
def promotion():
    """JAX's lowering of plain attention promotes dtypes; cuDNN's does not."""
    with jax.numpy_dtype_promotion("standard"):
        yield


def attend(q, k, v, positions, sinks=None, implementation="xla", **options):
    options = {"scale": q.shape[3] ** -0.5, "window": None, "chunk": None} | options
    operands = q, k, v, positions, sinks
    return cudnn.attend_with_cudnn(*operands, implementation=implementation, **options)


class TestGradients(suite.AttentionGradientSuite):
    dtype = axis("bfloat16")  # JAX's plain attention in float16 has no lowering on CPUs

    @pytest.fixture
    def run(self):
        return attend


def test_the_library_takes_the_cases():
    """Otherwise the tests below would compare plain XLA with itself."""
    for name in suite.IN_ORDER:
        q, k, v, _, _ = map(jnp.asarray, suite.make(name, DTYPE))
        assert cudnn._takes((q, k, v), None, "xla"), name
        assert not cudnn._takes((q[:, :200], k[:, :, :200], v[:, :, :200]), None, "xla"), name


def without_plain(monkeypatch):
    """Let plain XLA return no gradients, so that it shows which of the two has run."""

    def nothing(q, k, v, positions, gradient, **options):
        del positions, gradient, options
        return jnp.zeros_like(q), jnp.zeros_like(k), jnp.zeros_like(v)

    monkeypatch.setattr(cudnn, "_plain_gradients", nothing)


@pytest.mark.parametrize("name", [name for name in suite.CASES if suite.CASES[name].t >= 256])
def test_the_library_runs_where_positions_are_those_of_keys(name, monkeypatch):
    expected = suite.in_float64(name, DTYPE)
    without_plain(monkeypatch)
    for got, exact in zip(suite.pull_back(attend, name, DTYPE), expected, strict=True):
        if name in suite.IN_ORDER:
            # Some roundings to bfloat16. Of plain XLA, all would be zeros.
            bound = 4 * 2.0**-8 * np.abs(exact).max()
            np.testing.assert_allclose(np.float64(got), exact, atol=bound)
            assert np.abs(exact).max() > bound
        else:
            assert not got.any()


@pytest.mark.parametrize(
    "change",
    [
        {"sinks": np.zeros(2, np.float32)},
        {"chunk": 50},
        {"scale": -0.3},
        pytest.param({"implementation": "cudnn"}, marks=WITHOUT_CUDNN),
        {"dtype": "float32"},
    ],
    ids=["sinks", "chunk", "scale", "no cuDNN", "float32"],
)
def test_other_calls_have_the_gradients_of_the_definition(change, monkeypatch):
    """cuDNN is missing on a CPU. The last call has a dtype that it does not take."""
    without_plain(monkeypatch)  # nothing may call it
    change = dict(change)
    dtype = jnp.dtype(change.pop("dtype", "bfloat16"))
    options = {"scale": 0.125, "window": None, "sinks": None, "chunk": None} | change
    options.pop("implementation", None)

    def defined(q, k, v, positions):
        return cudnn.attend(q, k, v, positions, **options)

    run = functools.partial(attend, **change)
    own = suite.pull_back(run, "whole tiles", dtype)
    for got, expected in zip(own, suite.pull_back(defined, "whole tiles", dtype), strict=True):
        assert float(jnp.abs(expected).max()) > 0
        np.testing.assert_array_equal(got, expected)


def test_second_derivatives_and_batches():
    """The derivative of a gradient is that of plain XLA, and `vmap` equals a loop."""
    q, k, v, positions, cotangent = map(jnp.asarray, suite.make("whole tiles", DTYPE))

    def gradient(run, q):
        return jax.grad(lambda q: jnp.sum(run(q, k, v, positions) * cotangent))(q)

    def curve(run, q):
        return jax.grad(lambda q: jnp.sum(gradient(run, q).astype(jnp.float32) ** 2))(q)

    got, expected = (
        np.float64(jax.jit(functools.partial(curve, f))(q)) for f in (attend, suite.attend_plainly)
    )
    # Both differentiate plain XLA twice. They differ by the first gradients, rounded to bfloat16.
    bound = 4 * 2.0**-8 * np.abs(expected).max()
    np.testing.assert_allclose(got, expected, atol=bound)
    assert np.abs(1.1 * got - expected).max() > bound
    both = jax.vmap(functools.partial(gradient, attend))(jnp.stack([q, 2 * q]))
    for one, given in zip(both, (q, 2 * q), strict=True):
        alone = np.float64(gradient(attend, given))
        bound = 2.0**-8 * np.abs(alone).max()  # a rounding, because sums may have another order
        np.testing.assert_allclose(np.float64(one), alone, atol=bound)
        assert np.abs(1.1 * np.float64(one) - alone).max() > bound
