"""Test packed tokens: they come back to their rows, and padding is left out."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_nvfp4_moe.nn.packing import find_places, is_unpacked, pack, pack_like, unpack
from jax_nvfp4_moe.ops.positions import PADDING

LENGTHS = np.array([3, 0, 5, 1])
STEPS = np.arange(5)
PRESENT = LENGTHS[:, None] > STEPS
# Two of the rows already hold tokens.
POSITIONS = np.where(PRESENT, np.array([[0], [4], [7], [0]]) + STEPS, PADDING + STEPS)
TOKENS = np.arange(4 * 5 * 2, dtype=np.float32).reshape(4, 5, 2)


@pytest.mark.parametrize("num_tokens", [9, 12])
def test_tokens_come_back(num_tokens):
    def run(x, positions):
        packed = pack(x, positions, num_tokens)
        back = unpack(packed, positions)
        return packed, back, find_places(positions), pack_like(back, positions, packed)

    packed, back, places, again = map(np.asarray, jax.jit(run)(TOKENS, POSITIONS))
    assert packed.shape == (1, num_tokens, 2)
    np.testing.assert_array_equal(packed[0, :9], TOKENS[PRESENT])
    np.testing.assert_array_equal(back[PRESENT], TOKENS[PRESENT])
    np.testing.assert_array_equal(places[PRESENT], np.arange(9))
    np.testing.assert_array_equal(again[0, :9], packed[0, :9])


@pytest.mark.parametrize("shape", [(6,), (5,), (3, 4)])
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, jnp.float32, jnp.int8])
def test_numbers_of_all_sizes_come_back(dtype, shape):
    """Tokens of 16 bits move in pairs of numbers; odd widths and other dtypes do not."""
    x = (100 * np.random.default_rng(0).normal(size=(4, 5, *shape))).astype(dtype)
    positions = jnp.asarray(POSITIONS)
    back = jax.jit(lambda x: unpack(pack(x, positions, 12), positions))(x)
    assert back.dtype == dtype
    np.testing.assert_array_equal(np.asarray(back)[PRESENT], x[PRESENT])


def test_a_token_without_room_is_lost():
    back = jax.jit(lambda x, at: unpack(pack(x, at, 8), at))(TOKENS, POSITIONS)
    kept = (np.asarray(back) == TOKENS).all(axis=-1)
    np.testing.assert_array_equal(kept[:3][PRESENT[:3]], True)
    assert not kept[3, 0]


def test_tokens_in_their_rows_stay():
    x, positions = jnp.asarray(TOKENS), jnp.asarray(POSITIONS)
    assert is_unpacked(x, positions)
    assert pack(x, positions, None) is x
    assert pack_like(x, positions, x) is x
    assert unpack(x, positions) is x


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
def test_gradients_flow_to_true_tokens_alone(dtype):
    positions = jnp.asarray(POSITIONS)

    def total(x):
        back = unpack(pack(x, positions, 12) ** 2, positions)
        return jnp.where(PRESENT[..., None], back, 0).sum()

    expected = np.where(PRESENT[..., None], 2 * TOKENS, 0)
    np.testing.assert_array_equal(jax.jit(jax.grad(total))(TOKENS.astype(dtype)), expected)
