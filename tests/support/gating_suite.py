"""Tests that all kernels of `activate` and `add_gated` must pass."""

import dataclasses
import functools

import jax.numpy as jnp
import numpy as np
import pytest
from float64_layer import Options, activate

from jax_nvfp4_moe.backends import reference
from jax_nvfp4_moe.numerics.activations import find_activation
from jax_nvfp4_moe.testing import assert_as_accurate_as

DTYPES = ("bfloat16", "float16", "float32")
SIZES = {
    "one": (1, 512),
    "odd": (5, 77),
    "many": (64, 1000),
    "one value": (200, 1),
    "none": (0, 64),
}
ACTIVATIONS = ("silu", "gelu", "gelu_tanh", "swigluoai", "swigluoai_uninterleave", "swiglustep")


def options_of(name) -> Options:
    """Return the options of the float64 layer for the activation with its own parameters."""
    call = find_activation(name)
    parameters = {"alpha": call.alpha, "beta": call.beta, "limit": call.limit}
    return dataclasses.replace(Options(activation=name), **parameters)


@functools.cache
def make_gate_up(size, dtype):
    rows, columns = SIZES[size]
    rng = np.random.default_rng(columns)
    return np.asarray(rng.normal(0, 3, (rows, 2 * columns)), jnp.dtype(dtype))


@functools.cache
def make_sum(size, dtype):
    """Return x, a gate and z."""
    rows, columns = SIZES[size]
    rng = np.random.default_rng(columns)
    sizes = (rows, columns), (rows, 1), (rows, columns)
    return tuple(np.asarray(rng.normal(0, 2, each), jnp.dtype(dtype)) for each in sizes)


def sum_in_float64(x, gate, z):
    x, z = np.asarray(x, np.float64), np.asarray(z, np.float64)
    return x + (z if gate is None else z / (1 + np.exp(-np.asarray(gate, np.float64))))


class GatingSuite:
    """Subclasses have fixtures `run_activate(gate_up, name)` and `run_add(x, gate, z)`."""

    @pytest.mark.parametrize("dtype", DTYPES)
    @pytest.mark.parametrize("name", ACTIVATIONS)
    @pytest.mark.parametrize("size", SIZES)
    def test_activation_matches_float64(self, run_activate, size, name, dtype):
        gate_up = make_gate_up(size, dtype)
        y = np.asarray(run_activate(gate_up, name))
        plain = reference.activate_rows(jnp.asarray(gate_up), call=find_activation(name))
        assert (y.shape, y.dtype) == (plain.shape, gate_up.dtype)
        truth = activate(np.asarray(gate_up, np.float64), options_of(name))
        assert_as_accurate_as(y, np.asarray(plain), truth)

    @pytest.mark.parametrize("name", ACTIVATIONS)
    def test_bound_catches_exchanged_halves(self, run_activate, name):
        gate_up = make_gate_up("odd", "bfloat16")
        wrong = gate_up[:, ::-1] if name == "swigluoai" else np.roll(gate_up, 77, axis=1)
        plain = reference.activate_rows(jnp.asarray(gate_up), call=find_activation(name))
        truth = activate(np.asarray(gate_up, np.float64), options_of(name))
        with pytest.raises(AssertionError, match="yardstick"):
            assert_as_accurate_as(
                np.asarray(run_activate(np.ascontiguousarray(wrong), name)),
                np.asarray(plain),
                truth,
            )

    @pytest.mark.parametrize("dtype", DTYPES)
    @pytest.mark.parametrize("gated", [True, False])
    @pytest.mark.parametrize("size", SIZES)
    def test_sum_matches_float64(self, run_add, size, gated, dtype):
        x, gate, z = make_sum(size, dtype)
        gate = gate if gated else None
        y = np.asarray(run_add(x, gate, z))
        plain = np.asarray(reference.add_gated(*map(_array, (x, gate, z))))
        assert (y.shape, y.dtype) == (x.shape, x.dtype)
        assert_as_accurate_as(y, plain, sum_in_float64(x, gate, z))
        if not gated:
            np.testing.assert_array_equal(y, plain)

    @pytest.mark.parametrize("fault", ["gate", "row"])
    def test_bound_catches_a_wrong_gate(self, run_add, fault):
        x, gate, z = make_sum("odd", "bfloat16")
        wrong = None if fault == "gate" else np.roll(gate, 1)
        plain = np.asarray(reference.add_gated(*map(_array, (x, gate, z))))
        y = np.asarray(run_add(x, wrong, z))
        with pytest.raises(AssertionError, match="yardstick"):
            assert_as_accurate_as(y, plain, sum_in_float64(x, gate, z))

    def test_values_that_are_not_finite_stay_alone(self, run_activate, run_add):
        gate_up = make_gate_up("odd", "bfloat16").copy()
        gate_up[1, 3], gate_up[2, 80] = np.nan, np.inf
        y, expected = run_activate(gate_up, "silu"), run_activate(np.nan_to_num(gate_up), "silu")
        wrong = np.zeros(np.shape(y), bool)
        wrong[1, 3] = wrong[2, 3] = True
        assert np.isnan(np.asarray(y)[1, 3])
        assert np.array_equal(np.asarray(y)[~wrong], np.asarray(expected)[~wrong])
        x, gate, z = (np.array(each) for each in make_sum("odd", "bfloat16"))
        gate[2] = np.nan
        found = np.asarray(run_add(x, gate, z))
        assert np.isnan(found[2]).all()
        assert np.isfinite(np.delete(found, 2, axis=0)).all()


def _array(x):
    return None if x is None else jnp.asarray(x)
