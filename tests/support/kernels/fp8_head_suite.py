"""Tests that every kernel of `prepare_heads` must pass with a cache in FP8."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.kernels import head_suite
from support.kernels.head_suite import CASES, NAMES, make

from jax_nvfp4_moe.numerics.fp8 import round_fp8
from jax_nvfp4_moe.ops.heads import HeadOptions

FP8 = jnp.dtype("float8_e4m3fn")
# With some, most numbers saturate or are subnormal. The two ways of rounding differ for 1.3125 /
# 0.0525, which is 25 or 25.000002.
SCALES = (0.3, 0.001, 40.0, 0.0525, 1.0)


def with_fp8_cache(call: head_suite.Call, *, reciprocal: bool) -> head_suite.Call:
    """Return `call` with a cache in FP8, and with values that are hard to round."""
    m, d = call.keys.shape[1], call.keys.shape[3]
    values = call.qkv.copy().reshape(*call.qkv.shape[:2], call.qkv.shape[2] // d, d)
    # The values are not normalized: they reach the cache as they are.
    hard = [1.3125, -0.0, 1e4, -1e4, 448 * 0.3, 465 * 0.3, 2**-10, -(2**-9)][:d]
    values[:, :, -m:, : len(hard)] = np.array(hard, values.dtype)
    qkv = values.reshape(call.qkv.shape)
    keys, values = (np.clip(x, -3, 3).astype(FP8) for x in (call.keys, call.values))
    scales = tuple(np.resize(np.float32(x), m) for x in (SCALES, SCALES[::-1]))
    options = dataclasses.replace(call.options, multiply_by_reciprocal=reciprocal)
    return dataclasses.replace(
        call, qkv=qkv, keys=keys, values=values, scales=scales, options=options
    )


def in_16_bits(call: head_suite.Call) -> head_suite.Call:
    """Return `call` with a cache in the dtype of the heads."""
    keys, values = (x.astype(np.float32).astype(call.qkv.dtype) for x in (call.keys, call.values))
    options = dataclasses.replace(call.options, multiply_by_reciprocal=False)
    return dataclasses.replace(call, keys=keys, values=values, scales=None, options=options)


@functools.partial(jax.jit, static_argnames="multiply_by_reciprocal")
def round_entries(entries, scales, *, multiply_by_reciprocal):
    how = {"multiply_by_reciprocal": multiply_by_reciprocal}
    return [
        round_fp8(entry, scale[None, :, None, None], **how)
        for entry, scale in zip(entries, scales, strict=True)
    ]


def expected_of(run, call):
    """Return the results in 16 bits of `run`, whose new keys and values are rounded by JAX."""
    q, *entries = map(np.asarray, run(in_16_bits(call)))
    how = {"multiply_by_reciprocal": call.options.multiply_by_reciprocal}
    rounded = round_entries(entries, call.scales, **how)
    new = call.written[..., None]
    return q, *(np.where(new, *pair) for pair in zip(rounded, call.caches, strict=True))


def assert_same_bytes(got, expected):
    for name, one, other in zip(NAMES, got, expected, strict=True):
        one = np.asarray(one)
        assert (one.shape, one.dtype) == (other.shape, other.dtype), name
        words = np.uint8 if one.dtype == FP8 else np.uint16
        np.testing.assert_array_equal(one.view(words), other.view(words), err_msg=name)


class Fp8HeadSuite:
    """Subclasses have the axes `case` and `pair`, and a fixture `run(call)`.

    `HeadSuite` holds the numbers in 16 bits to float64.
    """

    @pytest.mark.parametrize("reciprocal", [False, True])
    def test_has_the_bytes_of_round_fp8(self, run, case, pair, reciprocal):
        call = with_fp8_cache(make(case, pair), reciprocal=reciprocal)
        assert_same_bytes(run(call), expected_of(run, call))

    @pytest.mark.parametrize("reciprocal", [False, True])
    def test_numbers_near_ties_have_the_bytes_of_round_fp8(self, run, pair, reciprocal):
        call = near_ties(jnp.dtype(pair.split("-")[0]), reciprocal=reciprocal)
        expected = expected_of(run, call)
        assert_same_bytes(run(call), expected)
        other = near_ties(call.qkv.dtype, reciprocal=not reciprocal)
        assert (expected_of(run, other)[1].view(np.uint8) != expected[1].view(np.uint8)).any()

    @pytest.mark.parametrize("fault", ["scales", "swapped scales", "heads", "rounding"])
    def test_bytes_catch_a_fault(self, run, pair, fault):
        call = with_fp8_cache(make("many heads", pair), reciprocal=False)
        expected = expected_of(run, call)
        k_scale, v_scale = call.scales
        wrong = {
            "scales": {"scales": (k_scale, 1.01 * v_scale)},
            "swapped scales": {"scales": (v_scale, k_scale)},
            "heads": {"scales": (k_scale, v_scale[::-1].copy())},
            "rounding": {"options": dataclasses.replace(call.options, multiply_by_reciprocal=True)},
        }[fault]
        with pytest.raises(AssertionError):
            assert_same_bytes(run(dataclasses.replace(call, **wrong)), expected)

    @pytest.mark.parametrize("reciprocal", [False, True])
    def test_what_is_not_finite_becomes_nan(self, run, pair, reciprocal):
        call = with_fp8_cache(make("neither", pair), reciprocal=reciprocal)
        qkv = call.qkv.copy()
        qkv[..., -8:] = [np.inf, -np.inf, np.nan, 6e4, -6e4, 1, 0, -1]
        _, _, values = run(dataclasses.replace(call, qkv=qkv))
        values = np.asarray(values, np.float32)[0, 0, 0]
        assert np.isnan(values[:3]).all()
        np.testing.assert_array_equal(values[3:5], [448, -448])
        assert np.isfinite(values[5:]).all()


def near_ties(dtype, *, reciprocal: bool) -> head_suite.Call:
    """Return a call whose values, divided by their scales, are all but halfway between bytes.

    Each head has a number of its own, in its first channel. Some scales are extreme.
    """
    rng, heads = np.random.default_rng(0), 600
    x = np.asarray(rng.uniform(0.5, 2, heads), dtype)
    bytes_ = rng.integers(0, 126, heads).astype(np.uint8)
    low, high = (b.view(FP8).astype(np.float32) for b in (bytes_, bytes_ + np.uint8(1)))
    k_scale = x.astype(np.float32) / ((low + high) / 2)
    v_scale = np.nextafter(k_scale, np.resize(np.float32([0, np.inf]), heads))
    v_scale[:4] = 1e-30, 1e-28, 1e28, 1e35
    projected = np.zeros((1, 1, 1 + 2 * heads, 4), dtype)
    projected[0, 0, 1:, 0] = np.concatenate([x, x])
    projected[0, 0, 1:, 1] = np.concatenate([-x, -x])
    keys = np.zeros((1, heads, 1, 4), FP8)
    return head_suite.Call(
        projected.reshape(1, 1, -1),
        np.zeros((1, 1), np.int32),
        keys,
        keys,
        None,
        HeadOptions(None, 1e-6, False, False, reciprocal),
        (k_scale, v_scale),
    )


FP8_HEAD_CASES = [name for name in CASES if name != "past 2^17"]  # which has nothing of its own
