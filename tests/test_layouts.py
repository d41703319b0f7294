"""Layouts are inverse pairs, and put bytes where their comments say."""

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jax_nvfp4_moe import formats
from jax_nvfp4_moe.layouts import LAYOUTS, find_layout, from_layout, to_layout


def random_bytes(lead, n, k, seed):
    rng = np.random.default_rng(seed)
    packed = rng.integers(0, 256, (*lead, n, k // 2), np.uint8)
    scales = rng.integers(0, 256, (*lead, n, k // 16), np.uint8)
    return jnp.asarray(packed), jnp.asarray(scales).view(jnp.float8_e4m3fn)


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
@given(
    lead=st.lists(st.integers(1, 3), max_size=2).map(tuple),
    n=st.integers(1, 70),
    blocks=st.integers(1, 6),
    seed=st.integers(0, 99),
)
@settings(deadline=None, max_examples=15)
def test_every_layout_comes_back(layout, lead, n, blocks, seed):
    packed, scales = random_bytes(lead, n, 16 * blocks, seed)
    there = to_layout(packed, scales, layout)
    back = from_layout(*there, layout, n)
    np.testing.assert_array_equal(back[0], packed)
    np.testing.assert_array_equal(back[1].view(jnp.uint8), scales.view(jnp.uint8))


def test_cpu_16x16_bytes_stand_where_the_comment_says():
    n, k = 48, 64
    packed, scales = random_bytes((), n, k, 0)
    codes = np.asarray(formats.unpack(packed))
    there, there_scales = (np.asarray(a) for a in to_layout(packed, scales, LAYOUTS["cpu_16x16"]))
    words = there.reshape(n // 16, k // 16, 2, 64).view(np.uint16)  # group, block, z, word
    for row, column in [(0, 0), (1, 0), (0, 1), (17, 5), (47, 63), (30, 40)]:
        block, within = divmod(column, 16)
        z, rest = divmod(within, 8)
        word = words[row // 16, block, z, 2 * (row % 16) + rest % 2]
        assert (word >> (4 * (rest // 2))) & 15 == codes[row, column]
    raw = np.asarray(scales).view(np.uint8)
    tiles = there_scales.view(np.uint8).reshape(n // 16, k // 16, 16)
    assert tiles[2, 3, 5] == raw[2 * 16 + 5, 3]


def test_cpu_16x16_pads_rows_with_zeros():
    packed, scales = random_bytes((), 20, 32, 0)
    there, there_scales = to_layout(packed, scales, LAYOUTS["cpu_16x16"])
    assert there.shape == (32, 16)
    padding = from_layout(there, there_scales, LAYOUTS["cpu_16x16"], 32)
    assert not np.asarray(padding[0][20:]).any()
    assert not np.asarray(padding[1].view(jnp.uint8)[20:]).any()


def test_swizzle_128x4_follows_the_offset_formula():
    m, blocks = 200, 20
    packed, scales = random_bytes((), m, 16 * blocks, 0)
    flat = np.asarray(to_layout(packed, scales, LAYOUTS["swizzle_128x4"])[1]).view(np.uint8).ravel()
    raw = np.asarray(scales).view(np.uint8)
    row, block = np.indices((m, blocks))
    tiles = -(-blocks // 4)
    offset = (
        (row // 128 * tiles + block // 4) * 512 + row % 32 * 16 + row % 128 // 32 * 4 + block % 4
    )
    np.testing.assert_array_equal(flat[offset], raw)
    rest = np.ones(flat.size, bool)
    rest[offset] = False
    assert not flat[rest].any()


def test_an_unknown_layout_is_named():
    with pytest.raises(ValueError, match=r"layout: expected one of .*canonical.*got 'marlin'"):
        find_layout("marlin")
