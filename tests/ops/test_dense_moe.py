"""Experts in a float dtype or in FP8: few slots gather their experts, and many visit all."""

import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from jax_nvfp4_moe.numerics.fp8 import FP8Tensor
from jax_nvfp4_moe.numerics.tensor import DenseExperts
from jax_nvfp4_moe.ops import dense_moe as module
from jax_nvfp4_moe.ops.dense_moe import dense_moe

E, HIDDEN, INNER = 80, 24, 16
# Tokens and experts of each: one slot, a group, parts of groups, the most that are gathered, more.
SIZES = [(1, 1), (1, 8), (3, 5), (8, 8), (13, 5)]


@functools.cache
def weights(fp8):
    rng = np.random.default_rng(0)
    made = [
        rng.normal(size=shape).astype(np.float32) / 4
        for shape in ((E, 2 * INNER, HIDDEN), (E, HIDDEN, INNER))
    ]
    made = [w.astype(ml_dtypes.float8_e4m3fn if fp8 else ml_dtypes.bfloat16) for w in made]
    biases = [rng.normal(size=(E, n)).astype(np.float32) for n in (2 * INNER, HIDDEN)]
    scales = [rng.uniform(0.5, 2, size=w.shape[:2]).astype(np.float32) for w in made]
    stored = [FP8Tensor(*pair) for pair in zip(made, scales, strict=True)] if fp8 else made
    values = [
        np.float64(w) * (np.float64(scale)[..., None] if fp8 else 1)
        for w, scale in zip(made, scales, strict=True)
    ]
    return jax.tree.map(jnp.asarray, DenseExperts(*stored, *biases)), values, biases


def call(t, k, seed=1):
    """Return tokens, ids of which some name no expert, and weights."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(t, HIDDEN)).astype(np.float32)
    ids = rng.integers(-1, E + 1, size=(t, k))
    return x, ids, rng.uniform(size=(t, k)).astype(np.float32)


def in_float64(x, ids, shares, fp8, weight_on_input):
    (gate_up, down), (first, second) = weights(fp8)[1:]
    y = np.zeros((len(x), HIDDEN))
    for token, slot in np.ndindex(ids.shape):
        expert, share = ids[token, slot], np.float64(shares[token, slot])
        if 0 <= expert < E:
            row = np.float64(x[token]) * (share if weight_on_input else 1)
            u = gate_up[expert] @ row + first[expert]
            inner = u[:INNER] / (1 + np.exp(-u[:INNER])) * u[INNER:]
            y[token] += (down[expert] @ inner + second[expert]) * (1 if weight_on_input else share)
    return y


def worst(found, expected):
    return np.abs(np.float64(found) - expected).max() / np.abs(expected).max()


@pytest.mark.parametrize("weight_on_input", [False, True])
@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize(("t", "k"), SIZES)
def test_matches_float64(t, k, fp8, weight_on_input):
    x, ids, shares = call(t, k)
    ids[0, 0] = 7  # one slot of each call has an expert
    run = jax.jit(functools.partial(dense_moe, weight_on_input=weight_on_input))
    found = run(x, weights(fp8)[0], ids, shares)
    expected = in_float64(x, ids, shares, fp8, weight_on_input)
    assert worst(found, expected) < 2e-6
    assert worst(found, in_float64(x, np.roll(ids, 1) + 1, shares, fp8, weight_on_input)) > 0.05


def test_few_slots_read_their_experts_alone(monkeypatch):
    """The loop over all experts is not even traced; one slot more needs it."""

    def fail(*arguments, **options):
        raise AssertionError

    monkeypatch.setattr(module, "combine_experts", fail)
    experts = weights(False)[0]
    jax.eval_shape(dense_moe, call(8, 8)[0], experts, *call(8, 8)[1:])
    for t, k in ((13, 5), (65, 1)):
        with pytest.raises(AssertionError):
            jax.eval_shape(dense_moe, call(t, k)[0], experts, *call(t, k)[1:])


def test_a_row_does_not_depend_on_the_rows_read_with_it():
    """So a token that was drafted is computed as it would be alone."""
    x, ids, shares = call(8, 8)
    x, run = jnp.asarray(x, jnp.bfloat16), jax.jit(dense_moe)
    whole = run(x, weights(False)[0], ids, shares)
    for token in (0, 3, 7):
        some = slice(token, token + 1)
        alone = run(x[some], weights(False)[0], ids[some], shares[some])
        np.testing.assert_array_equal(alone[0], whole[token])


def test_nan_stays_in_its_row():
    x, ids, shares = call(4, 4)
    clean = dense_moe(x, weights(False)[0], ids, shares)
    x[1] = np.nan
    found = np.asarray(dense_moe(x, weights(False)[0], ids, shares))
    np.testing.assert_array_equal(found[[0, 2, 3]], np.asarray(clean)[[0, 2, 3]])
