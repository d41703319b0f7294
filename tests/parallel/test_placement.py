"""Test placement: laws of copies and packing, the id map, and layers with the same results."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.examples import examples

from jax_nvfp4_moe import prepare
from jax_nvfp4_moe.ops import moe_mlp
from jax_nvfp4_moe.parallel.placement import (
    Placement,
    balance_experts,
    imbalance,
    place_params,
    unplaced,
)
from jax_nvfp4_moe.testing import random_moe_params, random_routing


@st.composite
def problems(draw):
    """Draw loads ``[e]``, a number of devices, and a number of physical experts that fits."""
    experts = draw(st.integers(1, 24))
    devices = draw(st.integers(1, 8))
    kinds = st.one_of(st.integers(0, 20), st.integers(0, 10**6))
    load = draw(st.lists(kinds, min_size=experts, max_size=experts))
    least = -(-experts // devices)
    rows = draw(st.integers(least, min(experts, least + 4)))
    return load, devices, rows * devices


@given(problems())
@examples(300)
def test_laws_of_a_placement(problem):
    load, devices, physical = problem
    placed = balance_experts(load, devices, physical)
    assert len(placed.experts) == physical
    assert set(placed.experts) == set(range(len(load)))
    assert placed.copies.sum() == physical
    assert placed.copies.max() <= devices
    share = (np.asarray(load) / placed.copies).max()
    each = placed.expected_load(load)
    # 1e-12 bounds the rounding in sums of at most 24 * 8 float64 shares.
    rounding = 1e-12 * sum(load)
    assert each.sum() == pytest.approx(sum(load), abs=rounding)
    assert each.max() - each.min() <= share + rounding
    assert each.max() <= each.mean() + share * (devices - 1) / devices + rounding


def test_the_bound_catches_experts_in_their_order():
    load = [9, 9, 9, 9, 1, 1, 1, 1]
    each = unplaced(8, 2).expected_load(load)
    assert each.max() - each.min() > max(load)
    assert imbalance(each) == 1.8
    assert imbalance(balance_experts(load, 2).expected_load(load)) == 1


@given(st.lists(st.integers(0, 30), min_size=1, max_size=4), st.integers(1, 3), st.data())
@examples(100)
def test_no_other_copies_have_a_smaller_largest_share(load, devices, data):
    least = -(-len(load) // devices)
    physical = data.draw(st.integers(least, len(load))) * devices
    shares = (
        max(one / count for one, count in zip(load, counts, strict=True))
        for counts in itertools.product(range(1, devices + 1), repeat=len(load))
        if sum(counts) == physical
    )
    placed = balance_experts(load, devices, physical)
    assert (np.asarray(load) / placed.copies).max() == min(shares)


@given(st.lists(st.integers(0, 99), min_size=6, max_size=6), st.randoms(use_true_random=False))
@examples(30)
def test_physical_ids_are_copies_in_turn(load, random):
    placed = balance_experts(load, 4, 12)
    ids = np.array([[random.randint(-2, 7) for _ in range(3)] for _ in range(9)], np.int32)
    slots = np.asarray(placed.slot_table().physical_ids(jnp.asarray(ids)))
    for token, column in np.ndindex(ids.shape):
        expert, slot = ids[token, column], slots[token, column]
        if not 0 <= expert < 6:
            assert slot == -1
            continue
        copies = [s for s, held in enumerate(placed.experts) if held == expert]
        assert slot == copies[token % len(copies)]
    assert placed.routed_load(ids).sum() == ((ids >= 0) & (ids < 6)).sum()


def test_the_same_loads_give_the_same_placement():
    load = np.random.default_rng(0).integers(0, 50, 64)
    assert balance_experts(load, 8, 72) == balance_experts(load.tolist(), 8, 72)
    assert hash(balance_experts(load, 8, 72)) == hash(balance_experts(load, 8, 72))


PLACED = balance_experts([5, 0, 40, 3, 7, 9, 1, 30], 4, 12)


@functools.cache
def layer_case():
    params = random_moe_params(jax.random.key(0), num_experts=8, hidden=64, intermediate=32)
    ids, weights = map(np.array, random_routing(jax.random.key(1), 33, 8, 3))
    ids[4, 1] = -1
    x = np.random.default_rng(2).standard_normal((33, 64), np.float32)
    return params, x, ids, weights


@pytest.mark.parametrize(
    ("backend", "scheme", "dtype"),
    [
        ("reference", "w4a16", "float32"),
        ("moe_w4a16_cpu", "w4a4", "float32"),
        ("moe_w4a16_cpu", "w4a16", "bfloat16"),
    ],
)
def test_a_placed_layer_computes_the_same(backend, scheme, dtype):
    params, x, ids, weights = layer_case()
    x = x.astype(dtype)
    how = {"scheme": scheme, "backend": backend}
    params = prepare(params, **how)
    placed, slots = place_params(params, PLACED), PLACED.slot_table()
    assert placed.num_experts == 12
    assert placed.layout == params.layout

    @jax.jit
    def compiled(params, ids, weights):
        return moe_mlp(x, params, ids, weights, **how).astype(jnp.float32)

    def run(params, ids):
        return np.asarray(compiled(params, ids, weights))

    plain, moved = run(params, ids), run(placed, physical_ids(slots, ids))
    # Each token adds three outputs, in the order of slots instead of the order of experts.
    unit = float(jnp.finfo(dtype).eps) * np.abs(plain).max()
    assert np.abs(plain - moved).max() <= (1e-6 if dtype == "float32" else unit)
    assert np.abs(plain - run(placed, ids)).max() > 0.1  # logical ids in place of slots
    alone = np.where(np.arange(3)[None, :] == 1, ids, -1)  # one expert a token: nothing to add
    np.testing.assert_array_equal(run(params, alone), run(placed, physical_ids(slots, alone)))


def test_a_placed_layer_can_be_placed_again():
    params, *_ = layer_case()
    placed = place_params(params, PLACED)
    again = place_params(placed, unplaced(8, 4), held=PLACED.slot_table())
    for a, b in zip(jax.tree.leaves(again), jax.tree.leaves(params), strict=True):
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


@jax.jit
def physical_ids(slots, ids):
    return slots.physical_ids(ids)


def zipf_routing(experts, tokens, top_k, exponent=1.0):
    """Draw distinct experts with chances that fall as ``rank^-exponent``, ranks in random order."""
    rng = np.random.default_rng(experts)
    chances = np.arange(1, experts + 1, dtype=np.float64) ** -exponent
    scores = np.log(rng.permutation(chances)) + rng.gumbel(size=(tokens, experts))
    return np.argpartition(-scores, top_k - 1, axis=-1)[:, :top_k].astype(np.int32)


@pytest.mark.parametrize(("experts", "physical"), [(128, 144), (256, 288)])
def test_zipf_routing_is_balanced(experts, physical):
    """One half of the tokens decides the placement, and the other half measures it."""
    ids = zipf_routing(experts, 8192, 8)
    seen, new = ids[:4096], ids[4096:]
    placed = balance_experts(np.bincount(seen.ravel(), minlength=experts), 8, physical)
    before = imbalance(unplaced(experts, 8).routed_load(new))
    after = imbalance(placed.routed_load(new))
    assert before > 1.15
    # Eight loads of 4096 random slots: four standard deviations of their counts are 6 %.
    assert after < 1.06


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: balance_experts([1, 2, 3], 2, 3), "num_devices: expected a divisor of 3"),
        (lambda: balance_experts([1, 2, 3], 0), "num_devices: expected a divisor of 0"),
        (
            lambda: balance_experts([1, 2, 3], 2, 2),
            "num_physical: expected a number from 3,",
        ),
        (
            lambda: balance_experts([1, 2, 3], 2, 8),
            "num_physical: expected a number from 3,",
        ),
        (
            lambda: balance_experts([1, -2], 2),
            "load: expected finite numbers of at least 0, got -2",
        ),
        (lambda: balance_experts([1, float("nan")], 2), "load: expected finite"),
        (lambda: balance_experts([[1, 2]], 2), r"load: expected shape \[2\], got \(1, 2\)"),
        (lambda: balance_experts([], 2), r"load: expected shape \[e\]"),
        (lambda: unplaced(6, 4), "num_devices: expected a divisor of 6"),
        (lambda: Placement((0, 0, 3), 3, 1), r"missing \[1, 2\], unknown \[3\]"),
        (lambda: place_params(layer_case()[0], unplaced(4, 2)), "params: expected 4 experts"),
    ],
)
def test_bad_arguments(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_loads_of_nothing_are_even():
    assert imbalance([0, 0]) == 1
    assert balance_experts([0, 0, 0], 2, 4).num_physical == 4
