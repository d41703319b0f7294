"""Test `nvfp4.ragged_dot` as an implementation of `tokamax.ragged_dot`, with the real tokamax."""

import functools
import importlib.util

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_nvfp4_moe as nvfp4

pytestmark = [pytest.mark.tokamax, pytest.mark.filterwarnings("ignore::DeprecationWarning")]
if importlib.util.find_spec("tokamax"):
    import qwix
    import tokamax

E, K, N = 4, 64, 96
SIZES = np.array([5, 0, 4, 7], np.int32)
KERNEL = np.random.default_rng(0).standard_normal((E, K, N), np.float32)
ROWS = np.random.default_rng(1).standard_normal((20, K), np.float32)


@pytest.fixture
def served():
    """Return an implementation, and the list of what became of its calls."""
    calls = []

    def implementation(*operands, **how):
        try:
            y = nvfp4.ragged_dot(*operands, **how)
        except NotImplementedError:
            calls.append("refused")
            raise
        calls.append("served")
        return y

    return implementation, calls


def run(served, rows, weight, sizes=SIZES, **how):
    return tokamax.ragged_dot(
        rows, weight, sizes, implementation=[served[0], "mosaic", "xla"], **how
    )


@functools.cache
def weight():
    return nvfp4.prepare(nvfp4.quantize(KERNEL.swapaxes(1, 2)), dtype="float32")


def test_a_view_of_packed_weights(served):
    """Each kind of call gives what `nvfp4.ragged_dot` gives by itself."""
    view = weight().mT
    expected = nvfp4.ragged_dot(ROWS, view, SIZES)
    np.testing.assert_array_equal(run(served, ROWS, view), expected)
    whole = tokamax.RaggedDotGroupSizes(jnp.asarray(SIZES), len(ROWS))
    how = {"precision": jax.lax.Precision.DEFAULT, "preferred_element_type": jnp.bfloat16}
    found = jax.jit(lambda rows, view, sizes: run(served, rows, view, sizes, **how))(
        ROWS, view, whole
    )
    np.testing.assert_array_equal(found, expected.astype(jnp.bfloat16))
    found = run(served, ROWS, view, activation=jax.nn.silu)
    np.testing.assert_array_equal(found, jax.jit(jax.nn.silu)(expected))
    half = jax.tree.map(lambda leaf: leaf[2:], weight()).mT
    found = run(served, ROWS, half, group_offset=jnp.array([2]))
    np.testing.assert_array_equal(found, expected.at[:5].set(0))

    def gradient(dot):
        return jax.grad(lambda rows: jnp.sum(jnp.sin(dot(rows, view, SIZES))))(ROWS)

    found = gradient(functools.partial(run, served))
    np.testing.assert_array_equal(found, gradient(nvfp4.ragged_dot))
    assert set(served[1]) == {"served"}


def test_arrays_of_qwix_and_of_jax(served):
    kernel = jnp.asarray(KERNEL)
    array = qwix.quantize(kernel, "nvfp4", channelwise_axes=(0, 2), tiled_axes={1: 16})
    for rhs in (array, kernel):
        expected = tokamax.ragged_dot(ROWS, rhs, SIZES, implementation="xla")
        # Sums of k products, in another order.
        bound = 4 * K * 2**-24 * float(jnp.abs(expected).max())
        assert float(jnp.abs(run(served, ROWS, rhs) - expected).max()) <= bound
        assert float(jnp.abs(run(served, 1.01 * ROWS, rhs) - expected).max()) > 10 * bound
    assert served[1] == ["served"] * 4


def test_what_it_refuses_falls_through(served):
    kernel = jnp.asarray(KERNEL)
    int8 = qwix.quantize(kernel, jnp.int8, channelwise_axes=(0, 2))
    rows = qwix.quantize(jnp.asarray(ROWS), jnp.int8, channelwise_axes=(0,))
    calls = (
        (ROWS, int8, {}),
        (rows, int8, {}),
        (ROWS, kernel, {"fuse_gateup_activation": "silu"}),
    )
    for lhs, rhs, how in calls:
        expected = tokamax.ragged_dot(lhs, rhs, SIZES, implementation="xla", **how)
        np.testing.assert_array_equal(run(served, lhs, rhs, **how), expected)
    assert served[1] == ["refused"] * len(calls)
    with pytest.raises(NotImplementedError, match=r"^lhs: expected an array"):
        tokamax.ragged_dot(rows, weight().mT, SIZES, implementation=[nvfp4.ragged_dot])
