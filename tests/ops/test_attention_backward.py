"""The backward pass of attention on GPUs, with plain XLA in place of cuDNN."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, PartitionSpec
from support.kernels import attention_gradient_suite as suite
from support.kernels.axes import axis

from jax_nvfp4_moe.ops.causal_attention import cudnn
from jax_nvfp4_moe.testing import assert_as_accurate_as

DTYPE = jnp.dtype("bfloat16")


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


def nothing(q, k, v, positions, gradient, **options):
    del positions, gradient, options
    return jnp.zeros_like(q), jnp.zeros_like(k), jnp.zeros_like(v)


@pytest.mark.parametrize("name", [name for name in suite.CASES if suite.CASES[name].t >= 256])
def test_the_library_runs_where_positions_are_those_of_keys(name, monkeypatch):
    truth = suite.in_float64(name, DTYPE)
    plain = suite.pull_back(suite.attend_plainly, name, DTYPE)
    monkeypatch.setattr(cudnn, "_plain_gradients", nothing)  # shows which of the two has run
    own = suite.pull_back(attend, name, DTYPE)
    assert not suite.all_as_accurate([jnp.zeros_like(one) for one in own], plain, truth)
    if name in suite.IN_ORDER:
        for got, yardstick, exact in zip(own, plain, truth, strict=True):
            assert_as_accurate_as(got, yardstick, exact)
    else:
        assert not any(gradient.any() for gradient in own)


@pytest.mark.parametrize(
    "change",
    [
        {"sinks": np.zeros(2, np.float32)},
        {"chunk": 50},
        {"scale": -0.3},
        {"dtype": "float32"},
    ],
    ids=["sinks", "chunk", "scale", "float32"],
)
def test_other_calls_have_the_gradients_of_the_definition(change, monkeypatch):
    monkeypatch.setattr(cudnn, "_choose_gradients", nothing)
    change = dict(change)
    assert_defined(jnp.dtype(change.pop("dtype", "bfloat16")), **change)


@pytest.mark.parametrize("error", [NotImplementedError, RuntimeError, ValueError])
def test_what_the_library_refuses_has_the_gradients_of_the_definition(error, monkeypatch):
    """It refuses a device without cuDNN, an old device, and sizes for which it has no kernel."""

    def refuse(*operands, **options):
        del operands, options
        raise error("not supported")

    monkeypatch.setattr(cudnn, "_choose_gradients", nothing)
    monkeypatch.setattr(jax.nn, "dot_product_attention", refuse)
    cudnn._library_takes.cache_clear()  # which knows the answers of the function that is replaced
    try:
        assert_defined(DTYPE)
    finally:
        cudnn._library_takes.cache_clear()


def assert_defined(dtype, **change):
    """Assert that the gradients of a call are those of `meaning.attend`, to the bit."""
    options = {"scale": 0.125, "window": None, "sinks": None, "chunk": None} | change

    def defined(q, k, v, positions):
        return cudnn.attend(q, k, v, positions, **options)

    own = suite.pull_back(functools.partial(attend, **change), "whole tiles", dtype)
    for got, expected in zip(own, suite.pull_back(defined, "whole tiles", dtype), strict=True):
        assert float(jnp.abs(expected).max()) > 0
        np.testing.assert_array_equal(got, expected)


def gradient(run, operands, q, window=None):
    """Return the gradient to the queries `q`; `operands` has keys, values, positions, cotangent."""
    k, v, positions, cotangent = operands

    def loss(q):
        return jnp.sum(run(q, k, v, positions, window=window) * cotangent)

    return jax.grad(loss)(q)


def curvature(run, operands, q, window=None):
    """Return the gradient of the sum of the squares of `gradient`."""

    def loss(q):
        return jnp.sum(jnp.square(gradient(run, operands, q, window).astype(jnp.float32)))

    return jax.grad(loss)(q)


def in_a_batch(run, operands, several, **options):
    """Return `gradient` for each of `several` queries, by `vmap`."""
    return jax.vmap(lambda q: gradient(run, operands, q, **options))(several)


def of_the_first(run, operands, several, **options):
    """Return `curvature` for the first of `several` queries."""
    return curvature(run, operands, several[0], **options)


@pytest.mark.parametrize("differentiate", [in_a_batch, of_the_first])
def test_further_transformations(differentiate):
    """Under `vmap` and `jax.grad`, gradients are as accurate as plain XLA; float32 is the truth."""
    q, k, v, positions, cotangent = map(jnp.asarray, suite.make("whole tiles", DTYPE))

    def differentiated(run, dtype, **options):
        operands = k.astype(dtype), v.astype(dtype), positions, cotangent.astype(dtype)
        several = jnp.stack([q, 2 * q]).astype(dtype)
        return jax.jit(lambda several: differentiate(run, operands, several, **options))(several)

    truth = np.float64(differentiated(suite.attend_plainly, jnp.float32))
    plain = differentiated(suite.attend_plainly, DTYPE)
    assert_as_accurate_as(differentiated(attend, DTYPE), plain, truth)
    other = differentiated(attend, DTYPE, window=50)
    assert not suite.all_as_accurate([other], [plain], [truth])


def test_inside_of_shard_map_the_definition_is_differentiated(monkeypatch):
    monkeypatch.setattr(cudnn, "_choose_gradients", nothing)
    operands = tuple(map(jnp.asarray, suite.make("whole tiles", DTYPE)))

    def gradients(run):
        def pull_back(q, k, v, positions, cotangent):
            return jax.vjp(lambda *qkv: run(*qkv, positions), q, k, v)[1](cotangent)

        return pull_back

    mesh, rows = jax.make_mesh((1,), ("rows",), (AxisType.Auto,)), PartitionSpec("rows")
    own = jax.shard_map(gradients(attend), mesh=mesh, in_specs=rows, out_specs=rows)
    expected = jax.jit(gradients(suite.attend_plainly))(*operands)
    for got, plain in zip(jax.jit(own)(*operands), expected, strict=True):
        assert float(jnp.abs(plain).max()) > 0
        np.testing.assert_array_equal(got, plain)


def test_forward_mode_is_refused():
    q, k, v, positions, _ = map(jnp.asarray, suite.make("whole tiles", DTYPE))
    with pytest.raises(TypeError, match="forward-mode"):
        jax.jvp(lambda q: attend(q, k, v, positions), (q,), (q,))
