"""Tests that every kernel of attention must pass: the error of plain XLA, and no key too many."""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_nvfp4_moe.ops import attention
from jax_nvfp4_moe.ops.causal_attention.meaning import attend
from jax_nvfp4_moe.ops.positions import PADDING

# One program for each call, and calls that differ in values only share it.
jitted_attention = jax.jit(
    attention, static_argnames=("value_width", "scale", "window", "chunk", "target", "backend")
)


@dataclasses.dataclass(frozen=True)
class Case:
    """One call: sizes, the first position of each row, and options of `ops.attention`."""

    t: int
    heads: tuple[int, int]  # query heads and key heads
    keys: int
    widths: tuple[int, int]
    starts: tuple[int, ...]
    options: dict = dataclasses.field(default_factory=dict)


SINKS = np.array([2.0, -30.0, 0.0, 8.0, 1.0, 0.5, -1.0, 3.0], np.float32)
CASES = {
    "one key": Case(1, (1, 1), 1, (8, 8), (0,)),
    "one query of eight heads": Case(1, (8, 1), 300, (128, 128), (299, 40)),
    "one query in five parts": Case(1, (2, 2), 1100, (64, 64), (1099,)),
    "one query in a hundred parts": Case(1, (2, 1), 26000, (8, 16), (25990,)),
    "seven key heads": Case(1, (7, 7), 90, (64, 64), (70, 3)),
    "an empty part": Case(1, (8, 1), 600, (32, 64), (599, 0), {"sinks": SINKS}),
    "parts and sinks": Case(2, (8, 1), 600, (64, 40), (540,), {"sinks": SINKS}),
    "parts and a window": Case(1, (4, 2), 1300, (64, 64), (1299, 400), {"window": 700}),
    "window of one": Case(5, (4, 2), 90, (64, 64), (80, 0), {"window": 1}),
    "eight queries": Case(8, (8, 1), 300, (128, 128), (292,), {"window": 100}),
    "seven heads a key head": Case(9, (7, 1), 70, (40, 72), (20,), {"chunk": 16}),
    "prefill": Case(150, (2, 1), 150, (64, 64), (0,), {"sinks": SINKS[:2]}),
    "prefill in a room": Case(70, (1, 1), 400, (128, 128), (64,), {"window": 50}),
    "keys wider than values": Case(20, (2, 2), 80, (192, 128), (60,)),
    "one query of wide keys": Case(1, (4, 1), 80, (192, 128), (79,)),
    "widest": Case(20, (1, 1), 50, (256, 256), (30,), {"scale": 0.02}),
    "one query of the widest": Case(1, (4, 2), 150, (256, 256), (140,)),
    "parts of the widest": Case(1, (4, 2), 1100, (256, 256), (1050, 300), {"scale": 0.02}),
    "values wider than keys": Case(18, (1, 1), 40, (16, 136), (22,)),
    "more keys than filled": Case(3, (4, 2), 500, (64, 64), (30, 250)),
    "whole tile of 128 rows": Case(70, (2, 1), 70, (128, 128), (0,), {"window": 60}),
    "one whole tile": Case(128, (1, 1), 128, (128, 128), (0,)),
    "sinks and ragged keys": Case(150, (2, 1), 300, (64, 64), (130,), {"sinks": SINKS[:2]}),
    "eight heads in a tile": Case(20, (8, 1), 400, (128, 128), (333, 7)),
    "latent prefill": Case(130, (4, 2), 300, (192, 128), (100,)),
    "window inside a tile": Case(140, (1, 1), 600, (128, 128), (400,), {"window": 50}),
    "chunks of odd size": Case(140, (1, 1), 600, (128, 128), (400,), {"chunk": 129}),
    "widest prefill": Case(64, (2, 1), 200, (256, 256), (130,), {"scale": 0.02}),
    "heads that fill a device": Case(130, (34, 2), 140, (64, 64), (10,)),
    "groups that fill a device": Case(32, (72, 18), 40, (64, 64), (8,) * 4, {"window": 30}),
}


def draw(name, case, dtype, count=3):
    """Return the first `count` of queries, keys and values, and positions.

    Keys that no query sees are NaN.
    """
    rng = np.random.default_rng(len(name))
    b, (n, m), (d, dv) = len(case.starts), case.heads, case.widths
    shapes = ((b, case.t, n, d), (b, m, case.keys, d), (b, m, case.keys, dv))
    q, *entries = (rng.normal(size=shape) * 1.5 for shape in shapes[:count])
    positions = np.asarray(case.starts, np.int32)[:, None] + np.arange(case.t, dtype=np.int32)
    for row, last in enumerate(positions[:, -1]):
        for entry in entries:
            entry[row, :, last + 1 :] = np.nan
    return (*(np.asarray(x, dtype) for x in (q, *entries)), positions)


@functools.cache
def make(name, dtype):
    """Return queries, keys, values and positions of a case."""
    return draw(name, CASES[name], dtype)


def find_seen(positions, s, window=None, chunk=None):
    """Return which of `s` keys each query sees, bool ``[b, t, s]``."""
    keys, at = np.arange(s), positions[..., None]
    seen = keys <= at
    if window is not None:
        seen &= keys > at - window
    if chunk is not None:
        seen &= keys // chunk == at // chunk
    return seen


def in_float64(q, k, v, positions, scale=None, window=None, chunk=None, sinks=None):
    """Compute attention by its definition, for all query heads of a key head at once.

    Only keys that some query of the row sees are read. Others may be NaN.
    """
    q, k, v = map(np.asarray, (q, k, v))
    y = np.zeros((*q.shape[:3], v.shape[3]))
    scale = q.shape[3] ** -0.5 if scale is None else scale
    group = q.shape[2] // k.shape[1]
    visible = find_seen(positions, k.shape[2], window, chunk)
    for row, own in itertools.product(*map(range, k.shape[:2])):
        heads, read = slice(own * group, (own + 1) * group), visible[row].any(axis=0)
        seen = q[row, :, heads], k[row, own, read], v[row, own, read]
        queries, keys, values = map(np.float64, seen)
        scores = scale * (queries.reshape(-1, q.shape[3]) @ keys.T).reshape(*queries.shape[:2], -1)
        scores = np.where(visible[row][:, None, read], scores, -np.inf)
        extra = np.full(group, -np.inf) if sinks is None else sinks[heads]
        extra = np.broadcast_to(extra[:, None], (*scores.shape[:2], 1))
        every = np.concatenate([scores, extra], axis=2)
        weights = np.exp(every - every.max(axis=2, keepdims=True))
        weights /= weights.sum(axis=2, keepdims=True)
        found = weights[..., :-1].reshape(-1, len(values)) @ values
        y[row, :, heads] = found.reshape(*queries.shape[:2], -1)
    return y


def worst(y, expected):
    """Return the largest error of a query, relative to the norm of its result."""
    norms = np.linalg.norm(expected, axis=-1)
    return (np.linalg.norm(np.asarray(y, np.float64) - expected, axis=-1) / norms).max()


def plain(q, k, v, positions, scale=None, sinks=None, k_scale=None, v_scale=None, **options):
    """Return the result of plain XLA, which multiplies masked keys by zero and needs numbers."""
    if k_scale is None:
        k, v = (np.where(np.isnan(x), np.zeros((), x.dtype), x) for x in map(np.asarray, (k, v)))
    operands = (q, k, v, positions, sinks, k_scale, v_scale)
    options = {"window": None, "chunk": None, **options}
    scale = q.shape[3] ** -0.5 if scale is None else scale
    return attend(*operands, scale=scale, **options)


def find_bound(operands, options):
    """Return the exact result of a call, and twice the error of plain XLA.

    Values of one key are copied, so that plain XLA has no error at all.
    """
    expected = in_float64(*operands, **options)
    return expected, 2 * worst(plain(*operands, **options), expected)


def assert_nan_stays(run):
    """Assert that NaN in one of several parts of the keys reaches the queries of its head alone."""
    q, k, v, positions = make("one query in five parts", jnp.dtype("bfloat16"))
    k = k.copy()
    k[0, 1, 300, 7] = np.nan
    y = np.asarray(run(q, k, v, positions), np.float32)[0, 0]
    assert np.isfinite(y[0]).all()
    assert np.isnan(y[1]).all()


def check_padding(run, q, *entries, **options):
    """Check that padding behind five tokens is finite and changes nothing; positions are last."""
    *entries, positions = entries
    alone = run(q[:, :5], *entries, positions[:, :5], **options)
    padded = positions.copy()
    padded[:, 5:] = PADDING + np.arange(3)
    y = np.asarray(run(q, *entries, padded, **options))
    assert np.isfinite(y.astype(np.float32)).all()
    np.testing.assert_array_equal(y[:, :5], np.asarray(alone))
    nothing = run(q, *entries, np.full_like(positions, PADDING), **options)
    np.testing.assert_array_equal(np.asarray(nothing, np.float32), 0)


class AttentionSuite:
    """Subclasses have the axes `dtype` and `case`, and a fixture `run(q, k, v, positions, ...)`."""

    def test_matches_float64(self, run, case, dtype):
        operands, options = make(case, jnp.dtype(dtype)), CASES[case].options
        expected, bound = find_bound(operands, options)
        y = run(*operands, **options)
        assert y.dtype == dtype
        assert worst(y, expected) <= bound

    @pytest.mark.parametrize("wrong", ["one query of eight heads", "prefill in a room"])
    def test_a_wrong_window_is_found(self, run, wrong):
        operands, options = make(wrong, jnp.dtype("bfloat16")), CASES[wrong].options
        expected, bound = find_bound(operands, options)
        off = {**options, "window": options.get("window", 40) - 1}
        assert worst(run(*operands, **off), expected) > 5 * bound

    @pytest.mark.parametrize("options", [{}, {"window": 7}, {"chunk": 16}])
    def test_padding_is_finite_and_changes_nothing(self, run, options):
        check_padding(run, *make("eight queries", jnp.dtype("bfloat16")), **options)
