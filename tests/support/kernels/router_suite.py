"""Tests that every router must pass: it chooses as `routing.route`, with the same accuracy.

`test_routing` compares `routing.route` with plain numpy.
"""

import dataclasses

import numpy as np
import pytest
from support.kernels.axes import axis
from support.ops.routers import inputs, sigmoid, softmax

from jax_nvfp4_moe.numerics.routing import Router, route
from jax_nvfp4_moe.testing import assert_as_accurate_as

# The routers of the known families and one more with groups. Tests replace their top_k.
FORMS = {
    "softmax": Router(1),
    "unnormalized": Router(1, renormalize=False, scaling=0.5),
    "softmax_of_the_best": Router(1, select="logits"),
    "sigmoid": Router(1, score="sigmoid", scaling=2.827),
    "sigmoid_of_the_best": Router(1, score="sigmoid", select="logits"),
    "sqrt_softplus": Router(1, score="sqrt_softplus"),
    "sqrt_softplus_of_the_best": Router(1, score="sqrt_softplus", select="logits"),
    "groups": Router(1, score="sigmoid", num_groups=4, groups_kept=2, scaling=2.5),
    "softmax_groups": Router(1, num_groups=4, groups_kept=3),
}


def with_experts(router, experts, top_k):
    """Return `router` for `experts` experts, with at most `top_k`, and groups only if they fit."""
    if experts % router.num_groups:
        router = dataclasses.replace(router, num_groups=1, groups_kept=1)
    eligible = experts // router.num_groups * router.groups_kept
    return dataclasses.replace(router, top_k=min(top_k, eligible))


def tied_inputs(experts):
    """Return logits and corrections with few distinct values: most scores and groups tie."""
    rng = np.random.default_rng(2)
    return np.float32(rng.integers(0, 3, (70, experts))), np.float32(rng.integers(0, 2, experts))


SCORES = {
    "softmax": softmax,
    "sigmoid": sigmoid,
    "sqrt_softplus": lambda x: np.sqrt(np.log1p(np.exp(x))),
}


def choice_values(router, logits, bias):
    """Return the values by which experts are chosen, in the dtype of `logits`."""
    if router.select == "logits":
        return logits
    return SCORES[router.score](logits) + (0 if bias is None else np.asarray(bias, logits.dtype))


def exact_weights(router, logits, ids):
    """Return the float64 weights of the experts `ids`."""
    logits = np.asarray(logits, np.float64)
    if router.select == "logits":
        return SCORES[router.score](np.take_along_axis(logits, ids, -1)) * router.scaling
    weights = np.take_along_axis(SCORES[router.score](logits), ids, -1)
    if router.renormalize:
        weights = weights / weights.sum(-1, keepdims=True)
    return weights * router.scaling


def assert_weights_accurate(router, logits, bias, got):
    """Assert that weights fit their experts, with at most twice the worst error of `route`."""
    ids, weights = got
    want_ids, want_weights = map(np.asarray, route(router, logits, bias))
    if not weights.size:
        return
    truth = exact_weights(router, logits, ids)
    errors = want_weights - exact_weights(router, logits, want_ids)
    assert_as_accurate_as(weights, truth + errors, truth)


def assert_routes_alike(router, logits, bias, got):
    """Assert equal ids, except where scores differ by rounding, and accurate weights."""
    ids, weights = got
    want_ids, want_weights = map(np.asarray, route(router, logits, bias))
    assert (ids.dtype, weights.dtype) == (np.int32, np.float32)
    assert ids.shape == weights.shape == want_ids.shape == want_weights.shape
    other = (ids != want_ids).any(-1)
    assert other.sum() <= len(ids) // 50, "more than rounding can explain"
    assert all(len(set(row)) == len(row) for row in ids[other])
    assert_weights_accurate(router, logits, bias, got)
    exact = choice_values(router, np.asarray(logits, np.float64), bias)
    if other.any():
        # Both routers may err, each by twice the error of plain float32.
        rounding = np.abs(choice_values(router, np.asarray(logits), bias) - exact).max()
        taken, best = (np.take_along_axis(exact, which, -1) for which in (ids, want_ids))
        assert np.abs(taken - best).max() <= 4 * rounding


class RouterSuite:
    """``run(router, logits, bias)`` returns expert_ids and expert_weights."""

    form = axis(*FORMS)
    experts = axis(1, 60, 250, 512)
    top_k = axis(8)

    @pytest.fixture
    def run(self):
        raise NotImplementedError("a subclass says how to call its router")

    def test_router_routes_as_the_reference(self, run, form, experts, top_k):
        router = with_experts(FORMS[form], experts, top_k)
        logits, bias = inputs(70, experts)
        for correction in (None, bias):
            got = run(router, logits, correction)
            assert_routes_alike(router, logits, correction, got)

    @pytest.mark.parametrize("tied_experts", [8, 60, 250, 512])
    def test_router_gives_ties_to_the_lower_expert(self, run, form, tied_experts):
        router = with_experts(FORMS[form], tied_experts, 32)
        logits, bias = tied_inputs(tied_experts)
        got = run(router, logits, bias)
        np.testing.assert_array_equal(got[0], route(router, logits, bias)[0])
        assert_weights_accurate(router, logits, bias, got)
