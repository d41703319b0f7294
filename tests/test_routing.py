"""Every router of the table against plain numpy, written from the models' own descriptions."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jax_nvfp4_moe.numerics.routing import Router, route

# float32 of a handful of operations against float64.
BOUND = 8 * np.finfo(np.float32).eps


def softmax(x):
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def top(values, k):
    return np.argsort(-values, axis=-1, kind="stable")[:, :k]


def qwen3(x, bias):
    s = softmax(x)
    ids = top(s, 4)
    w = np.take_along_axis(s, ids, -1)
    return ids, w / w.sum(-1, keepdims=True)


def unnormalized(x, bias):
    s = softmax(x)
    ids = top(s, 2)
    return ids, np.take_along_axis(s, ids, -1)


def gpt_oss(x, bias):
    ids = top(x, 4)
    return ids, softmax(np.take_along_axis(x, ids, -1))


def deepseek_v3(x, bias):
    """4 groups of 4; a group counts as its two best biased scores; the 2 best groups are kept."""
    s = sigmoid(x)
    biased = s + bias
    ids, weights = [], []
    for row, scores in zip(biased, s, strict=True):
        groups = row.reshape(4, 4)
        best = np.argsort(-np.sort(groups, axis=-1)[:, -2:].sum(-1), kind="stable")[:2]
        eligible = [e for e in range(16) if e // 4 in best]
        chosen = sorted(eligible, key=lambda e, row=row: (-row[e], e))[:4]
        w = scores[chosen]
        ids.append(chosen)
        weights.append(2.5 * w / w.sum())
    return np.array(ids), np.array(weights)


def kimi_k2(x, bias):
    s = sigmoid(x)
    ids = top(s + bias, 8)
    w = np.take_along_axis(s, ids, -1)
    return ids, 2.827 * w / w.sum(-1, keepdims=True)


def deepseek_v4(x, bias):
    s = np.sqrt(np.log1p(np.exp(x)))
    ids = top(s + bias, 4)
    w = np.take_along_axis(s, ids, -1)
    return ids, w / w.sum(-1, keepdims=True)


def llama4(x, bias):
    ids = top(x, 1)
    return ids, sigmoid(np.take_along_axis(x, ids, -1))


FAMILIES = {
    "qwen3": (qwen3, Router(4), False),
    "unnormalized": (
        unnormalized,
        Router(2, renormalize=False),
        False,
    ),
    "gpt_oss": (gpt_oss, Router(4, select="logits"), False),
    "deepseek_v3": (
        deepseek_v3,
        Router(4, score="sigmoid", num_groups=4, groups_kept=2, scaling=2.5),
        True,
    ),
    "kimi_k2": (kimi_k2, Router(8, score="sigmoid", scaling=2.827), True),
    "deepseek_v4": (deepseek_v4, Router(4, score="sqrt_softplus"), True),
    "llama4": (llama4, Router(1, score="sigmoid", select="logits", weight_on_input=True), False),
}


def inputs(tokens=200, experts=16):
    logits = jax.random.normal(jax.random.key(0), (tokens, experts)) * 2
    bias = jax.random.normal(jax.random.key(1), (experts,)) * 0.3
    return logits, bias


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
    biased = np.take_along_axis(
        np.asarray(jax.nn.sigmoid(logits) + bias[None]), np.asarray(ids), -1
    )
    wrong = 2.827 * biased / biased.sum(-1, keepdims=True)
    assert np.abs(weights / wrong - 1).max() > 1000 * BOUND


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


@settings(deadline=None, max_examples=25)
@given(
    st.integers(0, 5),
    st.sampled_from([(8, 1, 1), (12, 3, 2), (16, 4, 1)]),
    st.integers(1, 4),
    st.integers(0, 2**31 - 1),
)
def test_laws(tokens, groups, top_k, seed):
    """A token's experts are distinct and in the groups kept; its weights add up to scaling."""
    experts, num_groups, kept = groups
    router = Router(top_k, score="sigmoid", num_groups=num_groups, groups_kept=kept, scaling=1.5)
    logits = jax.random.normal(jax.random.key(seed), (tokens, experts))
    ids, weights = map(np.asarray, route(router, logits))
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
            "groups_kept: expected 1 to num_groups=2",
        ),
    ],
)
def test_fields_out_of_range(arguments, message):
    with pytest.raises(ValueError, match=message):
        Router(**arguments)


def test_experts_that_do_not_fit():
    with pytest.raises(ValueError, match="top_k: expected at most 4 eligible"):
        route(Router(5), jnp.zeros((1, 4)))
    with pytest.raises(ValueError, match="num_groups: expected a divisor of 10"):
        route(Router(2, num_groups=4, groups_kept=2), jnp.zeros((1, 10)))
