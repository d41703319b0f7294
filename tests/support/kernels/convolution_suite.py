"""Tests that every kernel of the causal convolution must pass.

A subclass has the axes `dtype` and `case`, and a fixture ``run(x, positions, inputs, **options)``,
which returns the parts and the new inputs as `ops.causal_convolution` does.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_nvfp4_moe.ops.convolution import meaning
from jax_nvfp4_moe.ops.positions import PADDING
from jax_nvfp4_moe.testing import assert_as_accurate_as


@dataclasses.dataclass(frozen=True)
class ConvolutionCase:
    """Sizes of a call, and what is special about its columns and tokens."""

    widths: tuple[int, ...]  # of the parts in one head
    tokens: int
    taps: int = 4
    bias: bool = False
    first: int = 0
    heads: int = 1
    between: int = 0  # columns between two heads
    behind: int = 0  # columns behind the last head
    present: tuple[int, ...] = ()  # tokens of each row that are no padding; () for one whole row


CONVOLUTIONS = {
    "delta net": ConvolutionCase((16, 16, 32), 41, behind=36),
    "delta net, head by head": ConvolutionCase((8, 4, 12), 19, heads=3, between=12, behind=4),
    "delta net, one head": ConvolutionCase((8, 4, 12), 19, between=12, behind=4),
    "Mamba-2": ConvolutionCase((24, 8, 8), 70, bias=True, first=24, behind=4),
    "whole runs": ConvolutionCase((8,), 64),
    "rows with padding": ConvolutionCase((4, 4), 40, present=(40, 33, 2, 0)),
    "more channels than a block": ConvolutionCase((1000, 36), 9, bias=True),
    "fewer tokens than taps": ConvolutionCase((128,), 2, 8, present=(2, 1, 0)),
    "two taps": ConvolutionCase((4, 8, 4), 33, 2),
    "three taps": ConvolutionCase((12,), 33, 3, True, present=(33, 5)),
    "five taps": ConvolutionCase((12,), 33, 5),
    "six taps": ConvolutionCase((12,), 33, 6),
    "seven taps": ConvolutionCase((12,), 33, 7),
    "eight taps": ConvolutionCase((12,), 33, 8, present=(33, 7)),
    "rows of unequal length": ConvolutionCase((8, 4), 200, present=(0, 1, 63, 64, 65, 199, 200)),
}


@functools.cache
def make_convolution(name, dtype):
    """Return x, positions and inputs of a case, and the keyword arguments of the call."""
    case, rng = CONVOLUTIONS[name], np.random.default_rng(len(name))
    stride = sum(case.widths) + case.between
    present = case.present or (case.tokens,)
    channels, b, t = sum(case.widths) * case.heads, len(present), case.tokens
    x = rng.normal(size=(b, t, case.first + case.heads * stride + case.behind))
    inputs = rng.normal(size=(b, case.taps - 1, channels))
    positions = np.tile(np.arange(t, dtype=np.int32), (b, 1))
    positions[positions >= np.array(present)[:, None]] = PADDING
    options = {
        "weight": np.float32(rng.normal(size=(channels, case.taps))),
        "bias": np.float32(rng.normal(size=channels)) if case.bias else None,
        "widths": case.widths,
        "first": case.first,
        "heads": case.heads,
        "stride": stride,
    }
    return (np.asarray(x, dtype), positions, np.asarray(inputs, dtype)), options


def convolution_in_float64(x, positions, inputs, *, weight, bias, widths, first, heads, stride):
    """Return the parts, and the exact new inputs in the dtype of `inputs`."""
    columns, begin = [], first
    for width in widths:
        own = begin + stride * np.arange(heads)[:, None] + np.arange(width)
        columns.append(own.ravel())
        begin += width
    taps, t = weight.shape[1], x.shape[1]
    joined = np.concatenate([inputs, x[..., np.concatenate(columns)]], axis=1)
    windows = np.float64([joined[:, j : j + t] for j in range(taps)])
    sums = np.einsum("jbtc,cj->btc", windows, np.float64(weight))
    if bias is not None:
        sums = sums + np.float64(bias)
    ends = np.cumsum([len(own) for own in columns])[:-1]
    present = (positions < PADDING).sum(1)
    last = [row[count : count + taps - 1] for row, count in zip(joined, present, strict=True)]
    return np.split(sums / (1 + np.exp(-sums)), ends, axis=-1), np.stack(last)


jitted_convolution = jax.jit(meaning, static_argnames=("widths", "first", "heads", "stride"))


def plain_convolution(operands, options):
    """Return the parts in plain XLA."""
    return jitted_convolution(*operands, **options)[0]


def check_zeros(run, case, dtype):
    """Check that the results of padding are zeros, even if its inputs are NaN."""
    (x, positions, inputs), options = make_convolution(case, jnp.dtype(dtype))
    x, padding = x.copy(), positions >= PADDING
    x[padding] = np.nan
    for part in run(x, positions, inputs, **options)[0]:
        assert np.isfinite(part).all()
        assert not np.asarray(part)[padding].any()


class ConvolutionSuite:
    """The causal convolution for the tokens of a prompt."""

    def test_matches_float64(self, run, case, dtype):
        """The results have at most twice the error of plain XLA; the new inputs are exact."""
        operands, options = make_convolution(case, jnp.dtype(dtype))
        parts, inputs = run(*operands, **options)
        exact, last = convolution_in_float64(*operands, **options)
        true = operands[1] < PADDING
        for got, plain, want in zip(
            parts, plain_convolution(operands, options), exact, strict=True
        ):
            assert got.dtype == np.float32
            assert np.isfinite(got).all()
            assert_as_accurate_as(np.asarray(got)[true], np.asarray(plain)[true], want[true])
        assert inputs.dtype == dtype
        np.testing.assert_array_equal(np.float32(inputs), np.float32(last))

    @pytest.mark.parametrize("fault", ["x", "inputs", "weight", "bias"])
    def test_a_wrong_operand_is_found(self, run, fault):
        """One number is off by a unit in the last place of bfloat16."""
        operands, options = make_convolution("Mamba-2", jnp.dtype("bfloat16"))
        exact, _ = convolution_in_float64(*operands, **options)
        plain = plain_convolution(operands, options)
        wrong = {name: x.copy() for name, x in zip(("x", "p", "inputs"), operands, strict=True)}
        wrong |= {name: options[name].copy() for name in ("weight", "bias")}
        place = {"x": (0, 33, 31), "inputs": (0, 2, 7), "weight": (7, 1), "bias": (7,)}[fault]
        wrong[fault][place] *= 1 + 2.0**-7
        options = options | {name: wrong[name] for name in ("weight", "bias")}
        parts, _ = run(wrong["x"], wrong["p"], wrong["inputs"], **options)
        with pytest.raises(AssertionError, match=r"over 2\.0 x"):
            assert_as_accurate_as(parts[0], plain[0], exact[0])

    @pytest.mark.parametrize("case", ["whole runs", "eight taps", "delta net, head by head"])
    def test_pieces_compute_what_the_whole_prompt_does(self, run, case):
        """Bit for bit, wherever a piece ends."""
        (x, positions, inputs), options = make_convolution(case, jnp.dtype("float16"))
        x, positions, inputs = x[:1], positions[:1], inputs[:1]
        whole, last = run(x, positions, inputs, **options)
        pieces = []
        for start, end in ((0, 9), (9, 18), (18, x.shape[1])):
            tokens = slice(start, end)
            parts, inputs = run(x[:, tokens], positions[:, tokens], inputs, **options)
            pieces.append(parts)
        for i, part in enumerate(whole):
            joined = np.concatenate([parts[i] for parts in pieces], axis=1)
            np.testing.assert_array_equal(joined, part)
        np.testing.assert_array_equal(inputs, last)

    @pytest.mark.parametrize("case", ["rows of unequal length", "eight taps"])
    def test_padding_reaches_no_other_token(self, run, case):
        """Nor does it reach the new inputs, even if it is NaN."""
        (x, positions, inputs), options = make_convolution(case, jnp.dtype("float16"))
        true = positions < PADDING
        spoiled = x.copy()
        spoiled[~true] = np.nan
        parts, last = run(x, positions, inputs, **options)
        again, kept = run(spoiled, positions, inputs, **options)
        for one, other in zip(parts, again, strict=True):
            np.testing.assert_array_equal(np.asarray(one)[true], np.asarray(other)[true])
        np.testing.assert_array_equal(kept, last)

    @pytest.mark.parametrize("row", [2, 4, 5])
    def test_one_token_too_few_is_found(self, run, row):
        """If the last token of a row is taken for padding, the new inputs are wrong."""
        (x, positions, inputs), options = make_convolution(
            "rows of unequal length", jnp.dtype("bfloat16")
        )
        _, want = convolution_in_float64(x, positions, inputs, **options)
        positions = positions.copy()
        positions[row, CONVOLUTIONS["rows of unequal length"].present[row] - 1] = PADDING
        _, last = run(x, positions, inputs, **options)
        assert (np.float32(last) != np.float32(want)).any(axis=(1, 2)).tolist() == [
            other == row for other in range(len(x))
        ]

    def test_not_a_number_reaches_the_tokens_that_see_it(self, run):
        (x, positions, inputs), options = make_convolution("delta net", jnp.dtype("bfloat16"))
        x = x.copy()
        x[0, 30, 5] = np.nan
        parts, _ = run(x, positions, inputs, **options)
        spoiled = np.zeros(parts[0].shape, bool)
        spoiled[0, 30:34, 5] = True
        np.testing.assert_array_equal(np.isnan(parts[0]), spoiled)
        assert np.isfinite(parts[1]).all()
