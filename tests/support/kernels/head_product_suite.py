"""Tests that both kernels of `ops.head_products` must pass: accuracy, and heads are alone."""

import dataclasses
import functools

import jax.numpy as jnp
import numpy as np
import pytest
from support.kernels.cache_suite import rotate

from jax_nvfp4_moe.numerics.rope import Rope
from jax_nvfp4_moe.ops.head_products import absorb, expand
from jax_nvfp4_moe.testing import assert_as_accurate_as


@dataclasses.dataclass(frozen=True)
class Case:
    """One layer: tokens of each row, rows, heads, and its widths."""

    tokens: tuple[int, int]
    heads: int
    plain: int  # channels of a query that are not rotated
    latent: int
    value: int
    rotated: int = 64
    rotates: bool = True
    interleaved: bool = True


CASES = {
    "deepseek": Case((1, 1), 16, 128, 512, 128),
    "glm flash": Case((4, 1), 20, 192, 512, 256),
    "three tokens": Case((1, 3), 3, 64, 104, 24, interleaved=False),
    "kimi": Case((2, 1), 5, 128, 512, 128, rotates=False),
    "eight rows": Case((2, 4), 2, 33, 72, 17, rotated=6),
    "widest": Case((8, 1), 1, 512, 1024, 512, rotated=256, interleaved=False),
    "smallest": Case((1, 1), 1, 1, 8, 1, rotated=2),
    "one row of many heads": Case((1, 1), 128, 16, 32, 16, rotated=8),
}


@dataclasses.dataclass(frozen=True)
class Call:
    """Operands of `absorb_queries` and of `expand_values`, as numpy arrays."""

    q: np.ndarray
    keys: np.ndarray
    positions: np.ndarray
    options: dict
    x: np.ndarray
    values: np.ndarray


@functools.cache
def make(name, dtype):
    case, rng = CASES[name], np.random.default_rng(len(name))
    (b, t), n = case.tokens, case.heads
    shapes = (
        (b, t, n, case.plain + case.rotated),
        (n, case.plain, case.latent),
        (b, t, n, case.latent),
        (n, case.value, case.latent),
    )
    q, keys, x, values = (np.asarray(rng.normal(size=shape), dtype) for shape in shapes)
    positions = np.asarray(rng.integers(0, 5000, (b, t)), np.int32)
    half = case.rotated // 2
    rope = Rope(tuple(float(1e4 ** (-i / half)) for i in range(half)), 1.1)
    options = {"rope": rope if case.rotates else None, "interleaved": case.interleaved}
    return Call(q, keys, positions, options, x, values)


def absorb_in_float64(call: Call):
    """Return queries in the space of the latents."""
    q, p, rope = np.float64(call.q), call.keys.shape[1], call.options["rope"]
    y, turning = np.einsum("btnp,npk->btnk", q[..., :p], np.float64(call.keys)), q[..., p:]
    if rope is not None:
        turning = rotate(turning, call.positions, rope, interleaved=call.options["interleaved"])
    return np.concatenate([y, turning], axis=-1)


def expand_in_float64(call: Call):
    return np.einsum("btnk,ndk->btnd", np.float64(call.x), np.float64(call.values))


def assert_accurate(call, queries, values):
    """Assert that both results have at most twice the error of plain XLA."""
    operands = [jnp.asarray(each) for each in (call.q, call.keys, call.positions)]
    assert_as_accurate_as(
        np.asarray(queries),
        np.asarray(absorb(*operands, **call.options)),
        absorb_in_float64(call),
    )
    plain = expand(jnp.asarray(call.x), jnp.asarray(call.values))
    assert_as_accurate_as(np.asarray(values), np.asarray(plain), expand_in_float64(call))


class HeadProductSuite:
    """Subclasses have the axes `case` and `dtype`, and a fixture `run(call)` for both results."""

    def test_matches_float64(self, run, case, dtype):
        call = make(case, jnp.dtype(dtype))
        assert_accurate(call, *run(call))

    @pytest.mark.parametrize("fault", ["keys", "values", "position", "pairs"])
    def test_bound_catches_a_fault(self, run, dtype, fault):
        call = make("three tokens", jnp.dtype(dtype))
        wrong = {
            "keys": {"keys": call.keys[::-1].copy()},  # each head with another's matrix
            "values": {"values": np.roll(call.values, 1, axis=1)},
            "position": {"positions": call.positions + np.int32([[0, 1, 0]])},
            "pairs": {"options": {**call.options, "interleaved": True}},
        }[fault]
        got = run(dataclasses.replace(call, **wrong))
        with pytest.raises(AssertionError, match="yardstick"):
            assert_accurate(call, *got)

    def test_bits_repeat(self, run, dtype):
        call = make("glm flash", jnp.dtype(dtype))
        for one, two in zip(run(call), run(call), strict=True):
            assert np.asarray(one).tobytes() == np.asarray(two).tobytes()
