"""Test what modules record during a capture: under paths, in order, and only for that capture."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jax_nvfp4_moe import NVFP4MoE
from jax_nvfp4_moe.nn.intermediates import capture, record


class Part(nnx.Module):
    def __call__(self, x):
        record(self, x)
        return 2 * x


class Whole(nnx.Module):
    def __init__(self):
        self.parts = nnx.List([Part(), Part()])

    def __call__(self, x):
        for part in self.parts:
            x = part(x)
        record(self, x)
        return self.parts[0](x)


def test_values_stand_under_the_paths_of_modules_in_the_order_of_calls():
    whole = Whole()
    with capture(whole) as seen:
        whole(1)
    assert seen == {"parts.0": [1, 4], "parts.1": [2], "": [4]}


def test_each_capture_takes_what_its_own_modules_record():
    whole, other = Whole(), Part()
    with capture(whole) as outer, capture(whole.parts[1]) as inner:
        whole(1)
        other(9)
    assert inner == {"": [2]}
    assert outer == {"parts.0": [1, 4], "parts.1": [2], "": [4]}


def test_nothing_is_recorded_before_after_or_after_an_error():
    whole = Whole()
    whole(1)
    with pytest.raises(RuntimeError), capture(whole) as seen:
        raise RuntimeError
    whole(1)
    assert seen == {}


def block():
    return NVFP4MoE(4, 64, 32, top_k=2, dtype=jnp.float32, rngs=nnx.Rngs(0))


def test_a_block_records_what_its_experts_read_and_give():
    moe, x = block(), jax.random.normal(jax.random.key(0), (3, 5, 64), jnp.float32)

    @jax.jit
    def look(moe, x):
        with capture(moe) as seen:
            y = moe(x)
        return y, seen

    y, seen = look(moe, x)
    (call,) = seen["experts"]
    ids, weights = moe.route(x)
    np.testing.assert_array_equal(call.x, x)
    np.testing.assert_array_equal(call.expert_ids, ids)
    np.testing.assert_array_equal(call.expert_weights, weights)
    np.testing.assert_array_equal(call.y, y)


def test_the_program_of_a_block_is_the_same_after_somebody_looked():
    moe, x = block(), jnp.ones((3, 64), jnp.float32)

    def program():
        return jax.jit(lambda moe, x: moe(x)).lower(moe, x).as_text()

    before, structure = program(), jax.tree.structure(nnx.state(moe))
    with capture(moe):
        moe(x)
    assert program() == before
    assert jax.tree.structure(nnx.state(moe)) == structure
