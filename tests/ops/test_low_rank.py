"""Test low-rank products beside the weights of experts, against matrices that are changed."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import jaxprs_in_params

from jax_nvfp4_moe.numerics.activations import activate, find_activation
from jax_nvfp4_moe.numerics.tensor import DenseExperts
from jax_nvfp4_moe.ops.low_rank import (
    AdaptedExperts,
    LowRank,
    block_by_expert,
    grouped_low_rank,
    low_rank,
    run_adapted_experts,
)

H, N, E, R = 8, 6, 5, 2  # hidden and inner width, experts, rank


def draw(seed, *shape):
    return np.random.default_rng(seed).standard_normal(shape, np.float32)


def pair(seed, n, k):
    return LowRank(draw(seed, E, R, k), draw(seed + 1, E, n, R), 0.5)


def assert_is_low_rank(y, rows, a, b, scale):
    """Assert that ``y = scale * rows @ a.T @ b.T`` in float32, whatever the order of additions.

    Each of H + R additions, and each multiplication by the scale, rounds by half of 2^-23 of the
    sum of magnitudes at most.
    """
    rows, a, b = (np.asarray(x, np.float64) for x in (rows, a, b))
    bound = (H + R + 2) * 2**-24 * abs(scale) * np.abs(rows) @ np.abs(a).T @ np.abs(b).T
    assert (np.abs(y - scale * rows @ a.T @ b.T) <= bound).all()


def test_a_product_beside_one_matrix():
    x, a, b = draw(0, 3, 7, H), draw(1, R, H), draw(2, N, R)
    y = np.asarray(low_rank(x, LowRank(a, b, 0.25)))
    assert_is_low_rank(y, x, a, b, 0.25)
    with pytest.raises(AssertionError):
        assert_is_low_rank(y * np.float32(1 + 1e-5), x, a, b, 0.25)


@pytest.mark.parametrize("tokens", [0, 1, 3, 40, 700])
def test_rows_meet_the_matrices_of_their_experts(tokens):
    """Ids out of range belong to no expert, and one expert has no row."""
    ids = np.random.default_rng(tokens).integers(-1, E + 1, (tokens, 2)).astype(np.int32)
    ids = np.where(ids == 2, 0, ids)
    blocks, both = block_by_expert(ids, E), pair(3, N, H)
    rows = np.concatenate([draw(1, ids.size, H), np.zeros((1, H), np.float32)])
    slots = np.asarray(blocks.slots)
    y = np.asarray(jax.jit(grouped_low_rank)(rows[slots], both, blocks))
    flat = ids.reshape(-1)
    for slot, expert, found in zip(slots, np.asarray(blocks.experts), y, strict=True):
        if slot < ids.size:
            assert expert == flat[slot]
            assert_is_low_rank(found, rows[slot], both.a[expert], both.b[expert], 0.5)
        else:
            assert not found.any()


@pytest.mark.parametrize("tokens", [0, 1, 3, 40, 700])
def test_each_slot_has_one_place_among_those_of_its_expert(tokens):
    ids = np.random.default_rng(tokens).integers(-1, E + 1, (tokens, 2)).astype(np.int32)
    ids = np.where(ids == 2, 0, ids)
    blocks = jax.tree.map(np.asarray, jax.jit(block_by_expert, static_argnums=1)(ids, E))
    flat, count = ids.reshape(-1), len(blocks.slots)
    (with_expert,) = np.nonzero((flat >= 0) & (flat < E))
    np.testing.assert_array_equal(np.sort(blocks.slots[blocks.slots < ids.size]), with_expert)
    np.testing.assert_array_equal(blocks.slots[blocks.places[with_expert]], with_expert)
    assert (np.delete(blocks.places, with_expert) == count).all()
    ends = np.cumsum(blocks.sizes)
    expert = np.searchsorted(ends, blocks.places[with_expert], side="right")
    np.testing.assert_array_equal(expert, flat[with_expert])
    numbers = np.bincount(flat[with_expert], minlength=E)
    size = max(1, min(ids.size // (4 * E), 32))
    np.testing.assert_array_equal(blocks.sizes, -(-numbers // size) * size)
    assert ends[-1] <= count


def changed(weight, both):
    return weight + both.scale * np.einsum("enr,erk->enk", both.b, both.a)


@pytest.mark.parametrize(
    ("activation", "weight_on_input"), [("silu", True), ("swigluoai", False), ("relu2", False)]
)
def test_adapted_experts_are_experts_with_changed_matrices(activation, weight_on_input):
    """So are their gradients to the tokens, to the weights of experts, and through the sort."""
    call = find_activation(activation)
    first = 2 * N if call.row.gated else N
    experts = DenseExperts(draw(1, E, first, H), draw(2, E, H, N), draw(3, E, first), draw(4, E, H))
    adapted = AdaptedExperts(experts, pair(5, first, H), pair(7, H, N))
    ids = np.array([[0, 3], [1, -1], [4, 0], [3, 9]], np.int32)

    def multiply(rows, weight, scale, blocks):
        return jax.lax.ragged_dot(rows, weight.swapaxes(1, 2), blocks.sizes, precision="highest")

    def run(x, weights, adapted):
        how = {"multiply": multiply, "call": call, "weight_on_input": weight_on_input}
        return jnp.sum(jnp.sin(run_adapted_experts(x, adapted, ids, weights, **how)))

    def truth(x, weights, adapted):
        experts = adapted.experts
        one, two = (
            weight + pair.scale * jnp.einsum("enr,erk->enk", pair.b, pair.a, precision="highest")
            for weight, pair in (
                (adapted.experts.gate_up, adapted.gate_up),
                (adapted.experts.down, adapted.down),
            )
        )
        y = [jnp.zeros(H)] * len(ids)
        for t, row in enumerate(ids):
            for j, e in enumerate(row):
                if 0 <= e < E:
                    given = x[t] * (weights[t, j] if weight_on_input else 1)
                    u = jnp.matmul(one[e], given, precision="highest") + experts.gate_up_bias[e]

                    d = jnp.matmul(two[e], activate(call, u), precision="highest")
                    d = d + experts.down_bias[e]
                    y[t] = y[t] + d * (1 if weight_on_input else weights[t, j])
        return jnp.sum(jnp.sin(jnp.stack(y)))

    given = draw(8, len(ids), H), np.abs(draw(9, *ids.shape)), adapted
    got, want = (jax.value_and_grad(one, (0, 1, 2), allow_int=True)(*given) for one in (run, truth))
    for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        bound = 1e-4 * max(np.abs(other).max(), 1)
        np.testing.assert_allclose(one, other, rtol=0, atol=bound)


def scatters(function, *operands):
    """Return the shapes of floats that a program adds to an array, whatever calls it is inside."""
    return [
        eqn.outvars[0].aval.shape
        for jaxpr in all_jaxprs(jax.make_jaxpr(function)(*operands).jaxpr)
        for eqn in jaxpr.eqns
        if eqn.primitive.name == "scatter-add"
        and jnp.issubdtype(eqn.outvars[0].aval.dtype, jnp.floating)
    ]


def all_jaxprs(jaxpr):
    """Yield a program and the programs of its calls."""
    yield jaxpr
    for eqn in jaxpr.eqns:
        for inner in jaxprs_in_params(eqn.params):
            yield from all_jaxprs(inner)


@pytest.mark.parametrize("tokens", [1, 300])
def test_a_backward_pass_adds_nothing_to_zeros(tokens):
    """XLA makes such zeros for all layers before the first one: 0.6 GB each for 4096 tokens.

    On GPUs, it adds in any order.
    """
    call = find_activation("silu")
    adapted = AdaptedExperts(
        DenseExperts(draw(1, E, 2 * N, H), draw(2, E, H, N)), pair(5, 2 * N, H), pair(7, H, N)
    )
    adapted = jax.tree.map(jnp.asarray, adapted)
    ids = jnp.asarray(np.random.default_rng(0).integers(-1, E, (tokens, 2)), jnp.int32)

    def run(x, weights, pairs):
        def multiply(rows, weight, scale, blocks):
            return jax.lax.ragged_dot(rows, weight.swapaxes(1, 2), blocks.sizes)

        how = {"multiply": multiply, "call": call}
        changed = AdaptedExperts(adapted.experts, *pairs)
        return jnp.sum(run_adapted_experts(x, changed, ids, weights, **how))

    x, weights = draw(8, tokens, H), draw(9, *ids.shape)
    pairs = adapted.gate_up, adapted.down
    assert scatters(jax.grad(run, (0, 1, 2)), x, weights, pairs) == []
    assert scatters(jax.grad(lambda x: jnp.sum(x[ids])), x) == [x.shape]
