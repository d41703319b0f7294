"""Tests that kernels must pass which prepare queries, and write keys and values into a cache."""

import dataclasses
from collections.abc import Callable
from typing import Any, ClassVar

import numpy as np
import pytest

from jax_nvfp4_moe.ops.positions import PADDING
from jax_nvfp4_moe.testing import assert_as_accurate_as


class CacheCall:
    """What the operands of such kernels share. A subclass is a dataclass.

    Attributes:
      by_row: names of the fields that have rows: projected tokens, `positions`, and the caches.
    """

    by_row: ClassVar[tuple[str, ...]]
    positions: np.ndarray

    @property
    def caches(self):
        return tuple(getattr(self, name) for name in self.by_row[2:])

    @property
    def written(self):
        """Return which entries ``[b, m, room]`` of the caches the tokens write."""
        new = np.zeros(self.caches[0].shape[:3], bool)
        for row, token in np.argwhere(self.positions < new.shape[2]):
            new[row, :, self.positions[row, token]] = True
        return new

    def of_rows(self, rows):
        return dataclasses.replace(
            self, **{name: getattr(self, name)[rows] for name in self.by_row}
        )


@dataclasses.dataclass(frozen=True)
class CacheOp:
    """An op with its cases.

    Attributes:
      make: returns the `CacheCall` of a case and a pair of dtypes.
      exact: returns queries and caches in float64.
      plain: returns those of plain XLA.
      names: of the results.
      decoding: a case of several rows with one token.
      filling: a case of rows with more than five tokens.
    """

    make: Callable[[str, str], Any]
    exact: Callable
    plain: Callable
    names: tuple[str, ...]
    decoding: str
    filling: str

    def assert_accurate(self, call, got, expected=None):
        """Assert that the results have at most twice the error of plain XLA."""
        expected = self.exact(call) if expected is None else expected
        for name, y, plain, truth in zip(self.names, got, self.plain(call), expected, strict=True):
            assert (y.shape, y.dtype) == (plain.shape, plain.dtype), name
            assert_as_accurate_as(np.asarray(y), np.asarray(plain), truth)


class CacheSuite:
    """Subclasses have `op`, the axes `case` and `pair`, and a fixture `run(call)`."""

    op: ClassVar[CacheOp]

    def test_matches_float64(self, run, case, pair):
        call = self.op.make(case, pair)
        got = run(call)
        self.op.assert_accurate(call, got)
        for kept, entry in zip(call.caches, got[1:], strict=True):
            others = ~call.written
            assert kept[others].tobytes() == np.asarray(entry)[others].tobytes()

    def assert_found(self, run, call, **wrong):
        """Assert that the results with wrong operands or options are over the bound."""
        got = run(dataclasses.replace(call, **wrong))
        with pytest.raises(AssertionError, match="yardstick"):
            self.op.assert_accurate(call, got, self.op.exact(call))

    def test_bits_repeat_and_rows_are_alone(self, run, pair):
        call = self.op.make(self.op.decoding, pair)
        one = slice(1, 2)
        for first, second, alone in zip(run(call), run(call), run(call.of_rows(one)), strict=True):
            assert np.asarray(first).tobytes() == np.asarray(second).tobytes()
            assert np.asarray(first)[one].tobytes() == np.asarray(alone).tobytes()

    def test_padding_is_finite_and_is_not_written(self, run, pair):
        call = self.op.make(self.op.filling, pair)
        padded = call.positions.copy()
        padded[:, 5:] = PADDING + np.arange(padded.shape[1] - 5)
        got = tuple(map(np.asarray, run(dataclasses.replace(call, positions=padded))))
        assert np.isfinite(got[0].astype(np.float32)).all()
        expected = tuple(map(np.asarray, run(call)))
        assert got[0][:, :5].tobytes() == expected[0][:, :5].tobytes()
        for kept, entry, whole in zip(call.caches, got[1:], expected[1:], strict=True):
            for row, end in enumerate(call.positions[:, 0] + 5):
                assert entry[row, :, :end].tobytes() == whole[row, :, :end].tobytes()
                assert entry[row, :, end:].tobytes() == kept[row, :, end:].tobytes()


def normalize(x, weight, eps):
    """Return ``x / rms(x) * weight`` in the dtype of `x`."""
    return x / np.sqrt(np.mean(x**2, axis=-1, keepdims=True) + eps) * weight


def rotate(x, positions, rope, *, interleaved=False):
    """Rotate the first channels of float64 ``x [b, t, ..., d]``; angles are rounded to float32."""
    half = len(rope.frequencies)
    angles = np.float32(positions)[..., None] * np.float32(rope.frequencies)
    angles = np.float64(angles).reshape(*positions.shape, *[1] * (x.ndim - 3), half)
    cos, sin = (f(angles) * rope.scale for f in (np.cos, np.sin))
    turning, others = x[..., : 2 * half], x[..., 2 * half :]
    pairs = turning[..., 0::2], turning[..., 1::2]
    first, second = pairs if interleaved else np.split(turning, 2, axis=-1)
    return np.concatenate([first * cos - second * sin, second * cos + first * sin, others], axis=-1)
