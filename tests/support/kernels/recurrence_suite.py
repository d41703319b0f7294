"""Tests that the kernels of both recurrences over prompts must pass.

A subclass of `RecurrenceSuite` sets `recurrence`, and has the axis `case` and a fixture
``run(*operands, lengths=None) -> (y, state)``.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import numpy as np
import pytest

from jax_nvfp4_moe.testing import assert_as_accurate_as

RAGGED = "rows of unequal length"  # the case of the tests of lengths


@dataclasses.dataclass(frozen=True)
class Recurrence:
    """A recurrence with its cases.

    Attributes:
      cases: the cases by name, each with `tokens` and `lengths`. That of `RAGGED` has a row without
        tokens first, and a whole one. ``full widths, ragged rows`` has 2 rows of 150 tokens.
      make: returns the operands of a case; the last one is the state.
      exact: computes the recurrence in float64, ``exact(*operands, lengths)``.
      plain: computes what XLA does on tensor cores, ``plain(operands, monkeypatch, lengths)``.
      without_padding: returns copies of the operands in which padding has a value,
        ``without_padding(operands, lengths, value)``.
      weights: indices of the operands that do not belong to rows.
    """

    cases: Mapping[str, Any]
    make: Callable
    exact: Callable
    plain: Callable
    without_padding: Callable
    weights: tuple[int, ...] = ()

    def lengths(self, name):
        """Return the lengths of the rows of a case, or None."""
        lengths = self.cases[name].lengths
        return np.array(lengths, np.int32) if lengths else None

    def each(self, function, operands):
        """Return the operands with `function` applied to those that have rows."""
        return [x if i in self.weights else function(x) for i, x in enumerate(operands)]


def find_padding(lengths, tokens):
    """Return which tokens ``[b, tokens]`` are padding."""
    return np.arange(tokens) >= np.asarray(lengths)[:, None]


def assert_same_bits(one, other):
    """Compare results and states."""
    for x, y in zip(one, other, strict=True):
        np.testing.assert_array_equal(x, y)


class RecurrenceSuite:
    """Accuracy, and rows of unequal length."""

    recurrence: ClassVar[Recurrence]

    def test_matches_float64(self, run, case, monkeypatch):
        """Both y and the state have at most twice the error of plain XLA on tensor cores."""
        own = self.recurrence
        operands, lengths = own.make(case), own.lengths(case)
        exact = own.exact(*operands, lengths)
        plain = own.plain(operands, monkeypatch, lengths)
        for got, want, yardstick in zip(run(*operands, lengths=lengths), exact, plain, strict=True):
            assert got.dtype == np.float32
            assert_as_accurate_as(got, yardstick, want)

    def test_padding_is_not_read(self, run):
        """The results of padding are 0, and others are the same bits whatever padding holds."""
        operands, lengths = self.recurrence.make(RAGGED), self.recurrence.lengths(RAGGED)
        y, state = (np.asarray(x) for x in run(*operands, lengths=lengths))
        assert not y[find_padding(lengths, y.shape[1])].any()
        np.testing.assert_array_equal(state[0], operands[-1][0])  # a row without tokens
        for value in (0.0, 3.0, np.inf):
            given = self.recurrence.without_padding(operands, lengths, value)
            assert_same_bits(run(*given, lengths=lengths), (y, state))

    def test_lengths_out_of_range_are_no_tokens_and_all_tokens(self, run):
        operands, lengths = self._without_padding(0.0)
        tokens = self.recurrence.cases[RAGGED].tokens
        wild = np.where(lengths == 0, -7, np.where(lengths == tokens, 1 << 30, lengths))
        assert_same_bits(run(*operands, lengths=lengths), run(*operands, lengths=wild))

    def test_whole_rows_need_no_lengths(self, run):
        """Lengths of t change no bit."""
        operands = self.recurrence.make("full widths, ragged rows")
        whole = np.full(2, 150, np.int32)
        assert_same_bits(run(*operands), run(*operands, lengths=whole))

    @pytest.mark.parametrize("row", [2, 5, 7])
    @pytest.mark.parametrize("change", [-1, 1])
    def test_a_wrong_length_is_found(self, run, row, change, monkeypatch):
        """One token too few or too many in one row is over the bound, in y or in the state."""
        operands, lengths = self._without_padding(0.5)
        exact = self.recurrence.exact(*operands, lengths)
        plain = self.recurrence.plain(operands, monkeypatch, lengths)
        wrong = lengths.copy()
        wrong[row] += change
        found = run(*operands, lengths=wrong)
        for got, want, yardstick in zip(found, exact, plain, strict=True):
            with pytest.raises(AssertionError, match=r"over 2\.0 x"):
                assert_as_accurate_as(got, yardstick, want)

    def _without_padding(self, value):
        """Return the operands of the case of unequal lengths, and these lengths."""
        lengths = self.recurrence.lengths(RAGGED)
        return self.recurrence.without_padding(
            self.recurrence.make(RAGGED), lengths, value
        ), lengths


class RowsAloneSuite:
    """What kernels promise beside a `RecurrenceSuite`. XLA may divide several rows otherwise."""

    recurrence: ClassVar[Recurrence]

    @pytest.mark.parametrize("row", range(1, 8))
    def test_a_row_is_the_same_bits_alone(self, run, row):
        """The other rows and their padding change nothing."""
        own = self.recurrence
        operands, lengths = own.make(RAGGED), own.lengths(RAGGED)
        y, state = run(*operands, lengths=lengths)
        *tokens, before = own.each(lambda x: x[row : row + 1], operands)
        alone = run(*own.each(lambda x: x[:, : lengths[row]], tokens), before)
        assert_same_bits((y[row, : lengths[row]], state[row]), (alone[0][0], alone[1][0]))
