"""Tests that every kernel of latent attention must pass, with values inside of the keys."""

import dataclasses
import functools

import jax.numpy as jnp
import numpy as np
import pytest
from support.kernels.attention_suite import SINKS, in_float64, plain, worst

from jax_nvfp4_moe.ops.positions import PADDING


@dataclasses.dataclass(frozen=True)
class Case:
    """One call: sizes, the first position of each row, and options of `ops.attention`."""

    t: int
    heads: tuple[int, int]  # query heads and key heads
    keys: int
    widths: tuple[int, int]  # of a key, and of the value in it
    starts: tuple[int, ...]
    options: dict = dataclasses.field(default_factory=dict)


DEEPSEEK, SMALL = (576, 512), (48, 32)
CASES = {
    "one key": Case(1, (1, 1), 1, SMALL, (0,)),
    "an empty cache": Case(1, (16, 1), 200, DEEPSEEK, (0,)),
    "a full cache": Case(1, (16, 1), 150, DEEPSEEK, (149,)),
    "a small latent": Case(1, (7, 1), 300, SMALL, (299, 40)),
    "eight tokens of one head": Case(8, (1, 1), 90, SMALL, (70, 0)),
    "eight tokens of seven heads": Case(8, (7, 1), 90, DEEPSEEK, (82,)),
    "heads of GLM Flash": Case(1, (20, 1), 170, DEEPSEEK, (140, 31)),
    "heads of DeepSeek": Case(1, (128, 1), 140, DEEPSEEK, (130,)),
    "two tokens of 128 heads": Case(2, (128, 1), 70, SMALL, (5,)),
    "rows that fill a device": Case(8, (16, 1), 40, SMALL, (20,) * 70),
    "batches of several tiles of keys": Case(1, (33, 1), 130, SMALL, tuple(range(63, 130))),
    "an empty part": Case(1, (8, 1), 600, (40, 8), (599, 0), {"sinks": SINKS}),
    "parts of many tiles": Case(1, (16, 16), 1100, SMALL, (1099,)),
    "a window": Case(1, (4, 1), 500, SMALL, (499, 20), {"window": 150}),
    "a window of one": Case(5, (4, 2), 90, (152, 104), (80, 0), {"window": 1}),
    "chunks and sinks": Case(9, (8, 2), 60, (80, 80), (20,), {"chunk": 16, "sinks": SINKS}),
    "keys as they are": Case(1, (8, 1), 130, (512, 512), (127,), {"sinks": SINKS, "window": 100}),
    "a prefill": Case(70, (2, 1), 100, SMALL, (0,), {"scale": 0.3}),
}


@functools.cache
def make(name, dtype):
    """Return queries, keys and positions of a case. Keys that no query sees are NaN."""
    case = CASES[name]
    rng = np.random.default_rng(len(name))
    b, (n, m), d = len(case.starts), case.heads, case.widths[0]
    q, k = (rng.normal(size=shape) * 1.5 for shape in ((b, case.t, n, d), (b, m, case.keys, d)))
    positions = np.asarray(case.starts, np.int32)[:, None] + np.arange(case.t, dtype=np.int32)
    for row, last in enumerate(positions[:, -1]):
        k[row, :, last + 1 :] = np.nan
    return np.asarray(q, dtype), np.asarray(k, dtype), positions


def find_bound(name, q, k, positions):
    """Return the exact result of a case, and twice the error of plain XLA."""
    case = CASES[name]
    operands = q, k, k[..., : case.widths[1]], positions
    expected = in_float64(*operands, **case.options)
    return expected, 2 * worst(plain(*operands, **case.options), expected)


class LatentAttentionSuite:
    """Subclasses have the axes `dtype` and `case`, and a fixture `run(q, k, positions, ...)`."""

    def test_matches_float64(self, run, case, dtype):
        operands = make(case, jnp.dtype(dtype))
        expected, bound = find_bound(case, *operands)
        width = CASES[case].widths[1]
        y = run(*operands, value_width=width, **CASES[case].options)
        assert y.dtype == dtype
        assert y.shape == (*operands[0].shape[:3], width)
        # Values of one key are copied, so that plain XLA has no error at all.
        assert worst(y, expected) <= bound

    @pytest.mark.parametrize("wrong", ["a full cache", "heads of GLM Flash", "heads of DeepSeek"])
    def test_missing_keys_are_found(self, run, wrong):
        operands = make(wrong, jnp.dtype("bfloat16"))
        expected, bound = find_bound(wrong, *operands)
        options = {"value_width": CASES[wrong].widths[1], "window": int(operands[2].min()) // 2}
        assert worst(run(*operands, **options), expected) > 5 * bound

    @pytest.mark.parametrize("options", [{}, {"window": 7}, {"chunk": 16}])
    def test_padding_is_finite_and_changes_nothing(self, run, options):
        q, k, positions = make("eight tokens of one head", jnp.dtype("bfloat16"))
        options = {"value_width": 32, **options}
        alone = run(q[:, :5], k, positions[:, :5], **options)
        padded = positions.copy()
        padded[:, 5:] = PADDING + np.arange(3)
        y = np.asarray(run(q, k, padded, **options))
        assert np.isfinite(y.astype(np.float32)).all()
        np.testing.assert_array_equal(y[:, :5], np.asarray(alone))
        nothing = run(q, k, np.full_like(positions, PADDING), **options)
        np.testing.assert_array_equal(np.asarray(nothing, np.float32), 0)
