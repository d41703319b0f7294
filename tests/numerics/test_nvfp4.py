"""Test the numbers of NVFP4 exactly, against numpy and ml_dtypes."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from support.examples import examples

from jax_nvfp4_moe.numerics import nvfp4 as formats

quantize = jax.jit(formats.quantize)


@jax.jit
def dequantize(packed, block_scale, global_scale):
    scale = block_scale.astype(jnp.float32) * global_scale[..., None, None]
    return formats.dequantize(packed, scale)


def numpy_quantize(x, g):
    """Quantize by the definition, written a second time in numpy and ml_dtypes."""
    g = np.float32(g)
    blocks = x.astype(np.float32).reshape(*x.shape[:-1], -1, 16)
    with np.errstate(all="ignore"):
        ratio = np.abs(blocks).max(-1) / (np.float32(6) * g)
        ratio = np.where(np.abs(blocks).max(-1) == 0, np.float32(0), ratio)
        s8 = np.minimum(ratio, np.float32(448)).astype(ml_dtypes.float8_e4m3fn)
        s = s8.astype(np.float32) * g
        y = np.where(s[..., None] == 0, np.float32(0), blocks / s[..., None])
    codes = y.astype(ml_dtypes.float4_e2m1fn).view(np.uint8).reshape(x.shape)
    return codes[..., 0::2] | codes[..., 1::2] << 4, s8.view(np.uint8)


def assert_same_bytes(x, g):
    packed, block_scale, _ = quantize(x, g)
    want = numpy_quantize(np.asarray(x), g)
    np.testing.assert_array_equal(np.asarray(block_scale).view(np.uint8), want[1])
    np.testing.assert_array_equal(np.asarray(packed), want[0])


@pytest.mark.parametrize("shape", [(256,), (37, 8), (2, 3, 48), (0, 8)])
def test_pack_undoes_unpack(shape):
    packed = np.resize(np.arange(256, dtype=np.uint8), shape)  # every byte
    back = jax.jit(lambda packed: formats.pack(formats.unpack(packed)))(packed)
    np.testing.assert_array_equal(back, packed)


def test_even_elements_take_the_low_nibble():
    codes = jnp.arange(16, dtype=jnp.uint8)
    assert np.asarray(formats.pack(codes)).tolist() == [16 * (i + 1) + i for i in range(0, 16, 2)]


def test_pack_refuses_an_odd_axis():
    with pytest.raises(ValueError, match=r"codes: expected an even last axis, got shape \(3,\)"):
        formats.pack(jnp.zeros(3, jnp.uint8))


def test_code_table_is_that_of_ml_dtypes():
    values = np.arange(16, dtype=np.uint8).view(ml_dtypes.float4_e2m1fn).astype(np.float32)
    np.testing.assert_array_equal(formats.CODE_VALUES, values)
    assert np.signbit(formats.CODE_VALUES[8])


def test_encode_rounds_every_bfloat16_as_ml_dtypes():
    bits = np.arange(1 << 16, dtype=np.uint16).view(ml_dtypes.bfloat16)
    x = bits[np.isfinite(bits.astype(np.float32))].astype(np.float32)
    np.testing.assert_array_equal(
        formats.encode(jnp.asarray(x)), x.astype(ml_dtypes.float4_e2m1fn).view(np.uint8)
    )


@pytest.mark.parametrize(
    ("y", "value"),
    [(0.25, 0), (0.75, 1), (1.25, 1), (1.75, 2), (2.5, 2), (3.5, 4), (5.0, 4), (5.1, 6), (9e9, 6)],
)
def test_encode_takes_ties_to_even_and_saturates(y, value):
    codes = formats.encode(jnp.asarray([y, -y], jnp.float32))
    assert np.asarray(formats.decode(codes)).tolist() == [value, -value]


@pytest.mark.parametrize("g", [1.0, 0.1, 3.7e-4, 2.0**-30, 1e-30, 1e30])
def test_quantize_matches_numpy_to_the_bit(g):
    x = np.random.default_rng(0).standard_normal((512, 64)).astype(np.float32) * np.float32(g * 900)
    x[0] = 0
    x[1, :16] = np.float32(1e-37)
    x[2] *= np.float32(1e-6)
    assert_same_bytes(x, np.float32(g))


def test_quantize_matches_numpy_on_every_finite_bfloat16():
    bits = np.arange(1 << 16, dtype=np.uint16).view(ml_dtypes.bfloat16)
    finite = bits[np.isfinite(bits.astype(np.float32))]
    for g in (np.float32(1), np.float32(0.01)):
        assert_same_bytes(np.resize(finite, (1, 65536)), g)
        alone = np.zeros((len(finite), 16), ml_dtypes.bfloat16)  # each alone sets its block's scale
        alone[:, 3] = finite
        assert_same_bytes(alone, g)


@given(
    hnp.arrays(
        np.float32,
        (2, 32),
        elements=st.floats(-(2.0**100), 2.0**100, width=32, allow_subnormal=False),
    ),
    st.floats(2.0**-60, 2.0**60, width=32),
)
@examples(50)
def test_quantize_matches_numpy_on_anything(x, g):
    assert_same_bytes(x, np.float32(g))


def test_a_constant_global_scale_divides_exactly():
    """XLA turns a division by a constant into a multiplication. The quantizer must divide."""
    x = jnp.asarray(np.random.default_rng(1).standard_normal((4096, 16)), jnp.float32)
    got = jax.jit(lambda x: formats.quantize(x, jnp.float32(0.1))[1])(x)
    np.testing.assert_array_equal(
        np.asarray(got).view(np.uint8), numpy_quantize(np.asarray(x), 0.1)[1]
    )
    amax = np.abs(np.asarray(x)).max(-1)
    want = amax / np.float32(2688)
    got = jax.jit(jax.vmap(lambda row: formats.global_scale_of(row[None])))(x)
    np.testing.assert_array_equal(got, want)


def test_division_by_integers_is_ieee_division():
    """GPUs use this division. Compare it with numpy on random bits and on extreme values."""
    rng = np.random.default_rng(0)
    a, b = rng.integers(0, 1 << 32, (2, 1 << 20), np.uint32).view(np.float32)
    ends = np.float32([0, -0.0, 1, 3, -7, 2688, 1e38, -1e38, 1e-37, np.inf, -np.inf, np.nan])
    a, b = np.append(a, np.repeat(ends, 12)), np.append(b, np.tile(ends, 12))
    with np.errstate(all="ignore"):
        want = a / b
    keep = ~(np.abs(np.stack([a, b, want])) < np.finfo(np.float32).tiny).any(0) | (a == 0)
    got = np.asarray(jax.jit(formats._divide_by_integers)(a, b))
    np.testing.assert_array_equal(got[keep], want[keep])
    np.testing.assert_array_equal(jax.jit(formats.divide)(a, b)[keep], want[keep])


def test_quantizing_what_was_quantized_changes_nothing():
    """The largest code of each block is 6, or the block gets the same scale again."""
    x = np.random.default_rng(0).standard_normal((3, 40, 64), np.float32)
    packed, block_scale, g = quantize(x)
    values = np.asarray(dequantize(packed, block_scale, g))  # all that the second call knows
    again = quantize(values, g)
    np.testing.assert_array_equal(again[0], packed)
    np.testing.assert_array_equal(np.asarray(again[1]), np.asarray(block_scale))


def test_zero_blocks_underflow_and_a_zero_global_scale_give_zeros():
    x = np.zeros((4, 16), np.float32)
    x[1] = 1e-12  # amax / 6 is below half of the smallest block scale
    x[2, 0] = -5.0
    packed, block_scale, _ = quantize(x, np.float32(1))
    assert np.asarray(block_scale).astype(np.float32)[:2].tolist() == [[0.0], [0.0]]
    assert not np.asarray(packed)[:2].any()
    packed, _, _ = quantize(x, np.float32(0))
    assert not (np.asarray(packed) & 0x77).any()


def test_nan_marks_its_block_and_infinity_saturates():
    x = np.ones((128, 32), np.float32)  # many rows, so that XLA vectorizes its reductions
    x[0, 3], x[1, 3] = np.nan, -np.inf
    packed, block_scale, g = quantize(x, np.float32(1))
    values = np.asarray(dequantize(packed, block_scale, g))
    assert np.isnan(values[0, :16]).all()
    assert np.isfinite(values[0, 16:]).all()
    assert values[1, 3] == -6 * 448


def test_scale_above_448_is_clamped_before_the_cast():
    x = np.full((1, 16), 6.0 * 1000, np.float32)
    assert np.asarray(quantize(x, np.float32(1))[1]).astype(np.float32) == 448


def test_blocks_must_be_whole():
    with pytest.raises(ValueError, match=r"x: .* multiple of 16.*\(2, 24\)"):
        formats.quantize(jnp.zeros((2, 24)))
