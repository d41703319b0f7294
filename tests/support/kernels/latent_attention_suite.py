"""Tests that every kernel of latent attention must pass, with values inside of the keys."""

import functools

import jax.numpy as jnp
import pytest
from support.kernels import attention_suite
from support.kernels.attention_suite import SINKS, Case, check_padding, draw, worst

# The second width is that of the value inside of the key.

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
    """Return queries, keys and positions of a case."""
    return draw(name, CASES[name], dtype, 2)


def find_bound(name, q, k, positions):
    """Return the exact result of a case, and twice the error of plain XLA."""
    case = CASES[name]
    operands = q, k, k[..., : case.widths[1]], positions
    return attention_suite.find_bound(operands, case.options)


class LatentAttentionSuite:
    """Subclasses have the axes `dtype` and `case`, and a fixture `run(q, k, positions, ...)`."""

    def test_matches_float64(self, run, case, dtype):
        operands = make(case, jnp.dtype(dtype))
        expected, bound = find_bound(case, *operands)
        width = CASES[case].widths[1]
        y = run(*operands, value_width=width, **CASES[case].options)
        assert y.dtype == dtype
        assert y.shape == (*operands[0].shape[:3], width)
        assert worst(y, expected) <= bound

    @pytest.mark.parametrize("wrong", ["a full cache", "heads of GLM Flash", "heads of DeepSeek"])
    def test_missing_keys_are_found(self, run, wrong):
        operands = make(wrong, jnp.dtype("bfloat16"))
        expected, bound = find_bound(wrong, *operands)
        options = {"value_width": CASES[wrong].widths[1], "window": int(operands[2].min()) // 2}
        assert worst(run(*operands, **options), expected) > 5 * bound

    @pytest.mark.parametrize("options", [{}, {"window": 7}, {"chunk": 16}])
    def test_padding_is_finite_and_changes_nothing(self, run, options):
        operands = make("eight tokens of one head", jnp.dtype("bfloat16"))
        check_padding(run, *operands, value_width=32, **options)
