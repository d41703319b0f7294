"""Compare every router of the table with plain numpy, written from the models' descriptions."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.examples import examples
from support.ops.routers import FAMILIES, inputs, sigmoid

from jax_nvfp4_moe.numerics.routing import Router, route

# The error of a handful of float32 operations, compared with float64.
BOUND = 8 * np.finfo(np.float32).eps


@pytest.mark.parametrize("family", FAMILIES)
def test_families(family):
    expected, router, biased = FAMILIES[family]
    logits, bias = inputs()
    ids, weights = jax.jit(route, static_argnums=0)(router, logits, bias if biased else None)
    assert (ids.dtype, weights.dtype) == (jnp.int32, jnp.float32)
    true_ids, true_weights = expected(np.asarray(logits, np.float64), np.asarray(bias, np.float64))
    np.testing.assert_array_equal(ids, true_ids)
    np.testing.assert_allclose(weights, true_weights, rtol=BOUND)


def test_the_bound_catches_weights_with_the_bias():
    logits, bias = inputs()
    ids, weights = route(Router(8, score="sigmoid", scaling=2.827), logits, bias)
    biased = np.take_along_axis(np.asarray(sigmoid(logits) + bias[None]), np.asarray(ids), -1)
    wrong = 2.827 * biased / biased.sum(-1, keepdims=True)
    assert np.abs(weights / wrong - 1).max() > 1000 * BOUND


@pytest.mark.parametrize("shift", [-3, 3])
def test_experts_outside_of_the_kept_groups_are_never_chosen(shift):
    """A number added to all corrections changes no choice, also if it makes scores negative."""
    _, router, _ = FAMILIES["deepseek_v3"]
    logits, bias = inputs()
    for one, other in zip(
        route(router, logits, bias), route(router, logits, bias + np.float32(shift)), strict=True
    ):
        np.testing.assert_array_equal(one, other)


def test_epsilon_is_added_to_the_sum():
    logits = inputs()[0]
    _, weights = route(Router(4, score="sigmoid", epsilon=0.5), logits)
    scores = np.sort(sigmoid(np.asarray(logits, np.float64)))[:, ::-1][:, :4]
    expected = scores / (scores.sum(-1, keepdims=True) + 0.5)
    np.testing.assert_allclose(weights, expected, rtol=BOUND)


@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
def test_scaling_multiplies_weights_of_chosen_logits(score):
    logits = inputs()[0]
    router = Router(4, score=score, select="logits", scaling=2.5)
    _, weights = route(router, logits)
    chosen = np.sort(np.asarray(logits, np.float64))[:, ::-1][:, :4]
    one = sigmoid(chosen)
    if score == "softmax":
        one = np.exp(chosen) / np.exp(chosen).sum(-1, keepdims=True)
    np.testing.assert_allclose(weights, 2.5 * one, rtol=BOUND)


def test_gradients_of_near_logits_are_finite():
    """An earlier logit may be so much larger that its exponential would be infinite."""
    router, logits = Router(2, select="near", distance=0.3), jnp.array([[200.0, 1.0, 0.9, -3.0]])
    found = jax.grad(lambda logits: route(router, logits)[1][0, 1])(logits)
    apart = 1 - np.float64(np.float32(0.9))  # the second id, and the logit beside it
    share = 1 / (1 + np.exp(-apart))
    slope = share * (1 - share)
    np.testing.assert_allclose(found, [[0, slope, -slope, 0]], rtol=BOUND)


def test_ties_go_to_the_lower_expert():
    ids, weights = route(Router(3), jnp.zeros((2, 8)))
    np.testing.assert_array_equal(ids, [[0, 1, 2]] * 2)
    np.testing.assert_allclose(weights, 1 / 3, rtol=BOUND)


def test_scores_that_all_underflow_stay_finite():
    _, weights = route(Router(2, score="sigmoid"), jnp.full((1, 4), -200.0))
    assert bool(jnp.isfinite(weights).all())


def test_low_precision_logits_are_computed_in_float32():
    logits = inputs()[0].astype(jnp.bfloat16)
    np.testing.assert_array_equal(
        route(Router(4), logits)[1], route(Router(4), logits.astype(jnp.float32))[1]
    )


@examples(10)
@pytest.mark.parametrize(
    ("tokens", "experts", "num_groups", "kept", "top_k"),
    [(5, 8, 1, 1, 1), (4, 12, 3, 2, 3), (5, 16, 4, 1, 4), (1, 12, 3, 2, 4), (0, 8, 1, 1, 2)],
)
@given(st.integers(0, 2**32 - 1))
def test_laws(tokens, experts, num_groups, kept, top_k, seed):
    """A token's experts are distinct and in the groups kept; its weights add up to scaling."""
    router = Router(top_k, score="sigmoid", num_groups=num_groups, groups_kept=kept, scaling=1.5)
    logits = np.random.default_rng(seed).standard_normal((tokens, experts), np.float32)
    ids, weights = map(np.asarray, jax.jit(route, static_argnums=0)(router, logits))
    assert ids.shape == weights.shape == (tokens, top_k)
    assert ((ids >= 0) & (ids < experts)).all()
    for row in ids:
        assert len(set(row)) == top_k
        assert len({expert // (experts // num_groups) for expert in row}) <= kept
    np.testing.assert_allclose(weights.sum(-1), np.full(tokens, 1.5), rtol=BOUND)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"top_k": 0}, "top_k: expected at least 1"),
        ({"top_k": 2, "score": "tanh"}, "score: expected one of"),
        ({"top_k": 2, "select": "best"}, "select: expected one of"),
        (
            {"top_k": 2, "num_groups": 2, "groups_kept": 3},
            "groups_kept: expected a number from 1 to num_groups=2",
        ),
    ],
)
def test_fields_out_of_range(arguments, message):
    with pytest.raises(ValueError, match=message):
        Router(**arguments)


def test_experts_that_do_not_fit():
    with pytest.raises(ValueError, match="top_k: expected at most 4, the number of experts"):
        route(Router(5), jnp.zeros((1, 4)))
    with pytest.raises(ValueError, match="num_groups: expected a divisor of 10"):
        route(Router(2, num_groups=4, groups_kept=2), jnp.zeros((1, 10)))
