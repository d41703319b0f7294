"""Tests that all kernels of gated operations must pass."""

import dataclasses
import functools

import jax.numpy as jnp
import numpy as np
import pytest
from support.kernels.float64_layer import Options, activate

from jax_nvfp4_moe.numerics.activations import find_activation
from jax_nvfp4_moe.ops import gating
from jax_nvfp4_moe.testing import assert_as_accurate_as

DTYPES = ("bfloat16", "float16", "float32")
SIZES = {
    "one": (1, 512),
    "odd": (5, 77),
    "many": (64, 1000),
    "one value": (200, 1),
    "none": (0, 64),
}
# Rows, columns, and inputs of a linear gate. The kernel loads 16 bytes at a time if rows of both
# kinds are a multiple of that. A block adds 256 such pieces of a row, and loads 512 pieces of the
# inputs at once.
LINEAR_SIZES = {
    "one row": (1, 2048, 2048),
    "many rows": (64, 128, 256),
    "several blocks": (3, 4104, 512),
    "many inputs": (16, 64, 8200),
    "odd inputs": (5, 64, 77),
    "odd columns": (5, 77, 64),
    "one value": (3, 1, 1),
    "no rows": (0, 64, 32),
}
# Rows, heads, width of a head, and columns of the gates: those after the queries, further ones that
# belong to keys and values, one for each head, or one for each channel.
GATES = {
    "one row": (1, 16, 256, 2 * 16 * 256 + 2 * 2 * 256),
    "odd": (5, 3, 7, 2 * 3 * 7 + 4),
    "gates alone": (2, 4, 32, 2 * 4 * 32),
    "many": (64, 8, 64, 2 * 8 * 64 + 2 * 64),
    "one channel": (3, 5, 1, 10),
    "one gate a head": (7, 6, 33, 6),
    "one gate": (1, 1, 96, 1),
    "channels": (5, 3, 7, 3 * 7),
    "wide channels": (2, 4, 320, 4 * 320),
    "no rows": (0, 2, 8, 32),
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


@functools.cache
def make_linear_sum(size, dtype):
    """Return x, the inputs and the weight of a linear gate, and z."""
    rows, columns, k = LINEAR_SIZES[size]
    rng = np.random.default_rng(columns + k)
    x, z = (rng.normal(0, 2, (rows, columns)) for _ in range(2))
    gate_input, gate_weight = rng.normal(0, 2, (rows, k)), rng.normal(0, k**-0.5, k)
    return tuple(np.asarray(each, jnp.dtype(dtype)) for each in (x, gate_input, gate_weight, z))


@functools.cache
def make_gates(size, dtype):
    """Return the results of heads, and their gates."""
    rows, n, d, columns = GATES[size]
    rng = np.random.default_rng(columns)
    sizes = (rows, n, d), (rows, columns)
    return tuple(np.asarray(rng.normal(0, 2, each), jnp.dtype(dtype)) for each in sizes)


def gate_in(x, gates, dtype):
    """Return ``x * sigmoid(gate)``, computed by numpy in `dtype`."""
    x, gates = np.asarray(x, dtype), np.asarray(gates, dtype)
    rows, n, d = x.shape
    if gates.shape[1] in (n, n * d):
        gates = gates.reshape(rows, n, -1)
    else:
        gates = gates[:, : 2 * n * d].reshape(rows, n, 2 * d)[:, :, d:]
    return x / (1 + np.exp(-gates))


def sum_in_float64(x, gate, z):
    x, z = np.asarray(x, np.float64), np.asarray(z, np.float64)
    return x + (z if gate is None else z / (1 + np.exp(-np.asarray(gate, np.float64))))


def linear_sum_in_float64(x, gate_input, gate_weight, z):
    gate = np.asarray(gate_input, np.float64) @ np.asarray(gate_weight, np.float64)
    return sum_in_float64(x, gate[:, None], z)


class GatingSuite:
    """Subclasses have fixtures for the ops.

    They are `run_activate(gate_up, name)`, `run_add(x, gate, z)`, `run_gates(x, gates)` and
    `run_linear(x, gate_input, gate_weight, z)`.
    """

    @pytest.mark.parametrize("dtype", DTYPES)
    @pytest.mark.parametrize("name", ACTIVATIONS)
    @pytest.mark.parametrize("size", SIZES)
    def test_activation_matches_float64(self, run_activate, size, name, dtype):
        gate_up = make_gate_up(size, dtype)
        y = np.asarray(run_activate(gate_up, name))
        plain = gating.activate_meaning(jnp.asarray(gate_up), call=find_activation(name))
        assert (y.shape, y.dtype) == (plain.shape, gate_up.dtype)
        truth = activate(np.asarray(gate_up, np.float64), options_of(name))
        assert_as_accurate_as(y, np.asarray(plain), truth)

    @pytest.mark.parametrize("name", ACTIVATIONS)
    def test_bound_catches_exchanged_halves(self, run_activate, name):
        gate_up = make_gate_up("odd", "bfloat16")
        wrong = gate_up[:, ::-1] if name == "swigluoai" else np.roll(gate_up, 77, axis=1)
        plain = gating.activate_meaning(jnp.asarray(gate_up), call=find_activation(name))
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
        plain = np.asarray(gating.add_gated_meaning(*map(_array, (x, gate, z))))
        assert (y.shape, y.dtype) == (x.shape, x.dtype)
        assert_as_accurate_as(y, plain, sum_in_float64(x, gate, z))
        if not gated:
            np.testing.assert_array_equal(y, plain)

    @pytest.mark.parametrize("fault", ["gate", "row"])
    def test_bound_catches_a_wrong_gate(self, run_add, fault):
        x, gate, z = make_sum("odd", "bfloat16")
        wrong = None if fault == "gate" else np.roll(gate, 1)
        plain = np.asarray(gating.add_gated_meaning(*map(_array, (x, gate, z))))
        y = np.asarray(run_add(x, wrong, z))
        with pytest.raises(AssertionError, match="yardstick"):
            assert_as_accurate_as(y, plain, sum_in_float64(x, gate, z))

    @pytest.mark.parametrize("dtype", DTYPES)
    @pytest.mark.parametrize("size", LINEAR_SIZES)
    def test_sum_behind_a_linear_gate_matches_float64(self, run_linear, size, dtype):
        operands = make_linear_sum(size, dtype)
        y = np.asarray(run_linear(*operands))
        plain = np.asarray(gating.add_linear_gated_meaning(*map(jnp.asarray, operands)))
        assert (y.shape, y.dtype) == (operands[0].shape, operands[0].dtype)
        assert_as_accurate_as(y, plain, linear_sum_in_float64(*operands))

    @pytest.mark.parametrize("size", ["several blocks", "many inputs", "odd inputs"])
    @pytest.mark.parametrize("fault", ["input", "weight", "sign", "row"])
    def test_bound_catches_a_wrong_linear_gate(self, run_linear, size, fault):
        x, gate_input, gate_weight, z = make_linear_sum(size, "bfloat16")
        wrong = {
            "input": (np.roll(gate_input, 1, axis=1), gate_weight),
            "weight": (gate_input, np.roll(gate_weight, 1)),
            "sign": (gate_input, -gate_weight),
            "row": (np.roll(gate_input, 1, axis=0), gate_weight),
        }[fault]
        operands = x, gate_input, gate_weight, z
        plain = np.asarray(gating.add_linear_gated_meaning(*map(jnp.asarray, operands)))
        y = np.asarray(run_linear(x, *wrong, z))
        with pytest.raises(AssertionError, match="yardstick"):
            assert_as_accurate_as(y, plain, linear_sum_in_float64(*operands))

    @pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
    def test_a_linear_gate_is_rounded_as_a_layer_and_a_sum_round(self, run_linear, run_add, dtype):
        """The inputs are 1 and -1, so that the sum is exact and only roundings matter."""
        rng = np.random.default_rng(7)
        signs, weight = rng.choice([-1.0, 1.0], (64, 512)), rng.integers(-15, 16, 512) / 64
        exact = signs @ weight
        gate = np.asarray(exact[:, None], jnp.dtype(dtype))
        assert (np.float64(gate[:, 0]) != exact).any() or dtype == "float16"
        x, z = (np.asarray(rng.normal(0, 2, (64, 64)), jnp.dtype(dtype)) for _ in range(2))
        operands = (np.asarray(each, jnp.dtype(dtype)) for each in (signs, weight))
        found = np.asarray(run_linear(x, *operands, z))
        assert found.tobytes() == np.asarray(run_add(x, gate, z)).tobytes()

    @pytest.mark.parametrize("size", ["many rows", "several blocks", "odd inputs"])
    def test_rows_behind_a_linear_gate_do_not_depend_on_others(self, run_linear, size):
        x, gate_input, gate_weight, z = make_linear_sum(size, "bfloat16")
        y = np.asarray(run_linear(x, gate_input, gate_weight, z))
        one = slice(2, 3)
        alone = run_linear(x[one], gate_input[one], gate_weight, z[one])
        assert y[one].tobytes() == np.asarray(alone).tobytes()

    @pytest.mark.parametrize("dtype", DTYPES)
    @pytest.mark.parametrize("size", GATES)
    def test_gated_heads_match_float64(self, run_gates, size, dtype):
        x, gates = make_gates(size, dtype)
        y = np.asarray(run_gates(x, gates))
        plain = np.asarray(gating.gate_heads_meaning(jnp.asarray(x), jnp.asarray(gates)))
        assert (y.shape, y.dtype) == (x.shape, x.dtype)
        assert_as_accurate_as(y, plain, gate_in(x, gates, np.float64))

    @pytest.mark.parametrize("size", ["odd", "one gate a head", "channels"])
    @pytest.mark.parametrize("fault", ["head", "row", "sign"])
    def test_bound_catches_a_gate_of_another_head(self, run_gates, fault, size):
        x, gates = make_gates(size, "bfloat16")
        step = {"one gate a head": 1, "channels": x.shape[2]}.get(size, 2 * x.shape[2])
        wrong = {
            "head": np.roll(gates, step, axis=1),
            "row": np.roll(gates, 1, axis=0),
            "sign": -gates,
        }[fault]
        plain = np.asarray(gating.gate_heads_meaning(jnp.asarray(x), jnp.asarray(gates)))
        y = np.asarray(run_gates(x, np.ascontiguousarray(wrong)))
        with pytest.raises(AssertionError, match="yardstick"):
            assert_as_accurate_as(y, plain, gate_in(x, gates, np.float64))

    def test_bits_repeat_and_queries_are_not_read(self, run_gates):
        x, gates = make_gates("odd", "bfloat16")
        y = np.asarray(run_gates(x, gates))
        rows, n, d = x.shape
        others = gates.copy()
        others[:, 2 * n * d :] = np.nan
        others[:, : 2 * n * d].reshape(rows, n, 2, d)[:, :, 0] = np.nan
        assert y.tobytes() == np.asarray(run_gates(x, others)).tobytes()
        assert y[2:3].tobytes() == np.asarray(run_gates(x[2:3], gates[2:3])).tobytes()

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

    def test_a_linear_gate_that_is_not_finite_stays_in_its_row(self, run_linear):
        x, gate_input, gate_weight, z = make_linear_sum("several blocks", "bfloat16")
        gate_input = gate_input.copy()
        gate_input[1, -1] = np.nan
        found = np.asarray(run_linear(x, gate_input, gate_weight, z))
        assert np.isnan(found[1]).all()
        assert np.isfinite(np.delete(found, 1, axis=0)).all()


def _array(x):
    return None if x is None else jnp.asarray(x)
