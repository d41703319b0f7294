"""Tests that every kernel of the gated delta rule for prompts must pass.

A subclass has the axis `case` and a fixture ``run(*operands, lengths=None, normalize=False) -> (y,
state)``.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_nvfp4_moe.backends.gated_delta import delta_chunks
from jax_nvfp4_moe.testing import assert_as_accurate_as


@dataclasses.dataclass(frozen=True)
class RuleCase:
    """Sizes of a call, and what is special about its tokens."""

    sizes: tuple[int, int, int, int]  # key heads, value heads of each, their widths
    tokens: int
    rows: int = 1
    fade: float = 1.0  # factor of the logarithms of the decays
    keys: int | None = None  # number of different keys; None for random ones
    padding: int = 0  # last tokens of the last row that are padding, by their g and beta
    lengths: tuple[int, ...] = ()  # of the rows, with NaN behind them; () for one whole row


RAGGED = RuleCase((1, 2, 32, 48), 130, lengths=(0, 1, 31, 63, 64, 65, 130, 128))


RULE_CASES = {
    "full widths, whole chunks": RuleCase((1, 2, 128, 128), 128),
    "full widths, ragged rows": RuleCase((2, 1, 128, 128), 150, rows=2, padding=70),
    "one token": RuleCase((1, 1, 128, 128), 1),
    "less than a chunk": RuleCase((2, 2, 64, 64), 31, fade=0.01),
    "one more token than a chunk": RuleCase((1, 3, 32, 48), 65),
    "more heads of a key than a block has warps": RuleCase((1, 11, 32, 16), 70),
    "narrow keys and values": RuleCase((3, 2, 4, 4), 70),
    "widths that no tile divides": RuleCase((2, 1, 20, 76), 100),
    "strong decays": RuleCase((1, 2, 64, 32), 130, fade=30.0),
    "three keys and no decay": RuleCase((1, 2, 64, 32), 200, fade=0.0, keys=3),
    "rows of unequal length": RAGGED,
    "full widths of unequal length": RuleCase((2, 1, 128, 128), 193, lengths=(70, 193)),
    "narrow rows of unequal length": RuleCase((3, 2, 4, 4), 70, lengths=(70, 32, 33)),
}


@functools.cache
def make_rule(name):
    """Return q, k, v, g, beta and the state of a case."""
    case, rng = RULE_CASES[name], np.random.default_rng(len(name))
    (m, r, d, e), b, t = case.sizes, len(case.lengths) or case.rows, case.tokens
    q, k = (rng.normal(size=(b, t, m, d)) for _ in range(2))
    if case.keys is not None:
        k = k[:, rng.integers(0, case.keys, t)]
    q, k = (x / np.linalg.norm(x, axis=-1, keepdims=True) for x in (q, k))
    v = rng.normal(size=(b, t, m, r, e))
    g = -case.fade * np.logaddexp(3 * rng.normal(size=(b, t, m, r)), 0)
    beta = 1 / (1 + np.exp(-2 * rng.normal(size=(b, t, m, r))))
    if case.keys is not None:
        beta = np.ones_like(beta)
    if case.padding:
        for x in (g, beta):
            x[-1, -case.padding :] = 0
    state = rng.normal(size=(b, m, r, d, e))
    for row, length in enumerate(case.lengths):
        for x in (q, k, v, g, beta):
            x[row, length:] = np.nan
    return tuple(np.float32(x) for x in (q / np.sqrt(d), k, v, g, beta, state))


def make_lengths(name):
    """Return the lengths of the rows of a case, or None."""
    lengths = RULE_CASES[name].lengths
    return np.array(lengths, np.int32) if lengths else None


def find_padding(lengths, tokens):
    """Return which tokens ``[b, tokens]`` are padding."""
    return np.arange(tokens) >= np.asarray(lengths)[:, None]


def rule_in_float64(q, k, v, g, beta, state, lengths=None):
    """Compute the rule token by token, and row by row if there are lengths."""
    if lengths is not None:
        y, last = np.zeros(v.shape), np.float64(state)
        for row, length in enumerate(lengths):
            if length:
                tokens = (x[row : row + 1, :length] for x in (q, k, v, g, beta))
                y[row, :length], last[row] = rule_in_float64(*tokens, state[row : row + 1])
        return y, last
    q, k, v, g, beta, state = (np.asarray(x, np.float64) for x in (q, k, v, g, beta, state))
    results = []
    for i in range(q.shape[1]):
        state = state * np.exp(g[:, i])[..., None, None]
        missing = v[:, i] - np.einsum("bmd,bmrde->bmre", k[:, i], state)
        state = state + np.einsum("bmd,bmr,bmre->bmrde", k[:, i], beta[:, i], missing)
        results.append(np.einsum("bmd,bmrde->bmre", q[:, i], state))
    return np.stack(results, axis=1), state


jitted_chunks = jax.jit(
    functools.partial(delta_chunks, chunk=64, precision=jax.lax.Precision.DEFAULT)
)


def rule_in_tf32(operands, monkeypatch, lengths=None):
    """Return what XLA computes on tensor cores: products of operands with 11 bits."""
    if lengths is not None:
        operands = without_padding(operands, lengths)
    exact = jnp.matmul

    def rounded(x, y, precision):
        if precision == jax.lax.Precision.DEFAULT:
            x, y = (jax.lax.reduce_precision(part, 8, 10) for part in (x, y))
        return exact(x, y, precision=jax.lax.Precision.HIGHEST)

    with monkeypatch.context() as patch:
        patch.setattr(jnp, "matmul", rounded)
        return jitted_chunks(*operands)


def without_padding(operands, lengths, value=0.0):
    """Return copies of the operands in which the numbers of padding are `value`."""
    *tokens, state = (x.copy() for x in operands)
    for x in tokens:
        x[find_padding(lengths, x.shape[1])] = value
    return *tokens, state


class DeltaRuleSuite:
    """The gated delta rule for prompts in TensorFloat-32."""

    def test_matches_float64(self, run, case, monkeypatch):
        """Both y and the state have at most twice the error of plain XLA on tensor cores."""
        operands, lengths = make_rule(case), make_lengths(case)
        exact = rule_in_float64(*operands, lengths)
        plain = rule_in_tf32(operands, monkeypatch, lengths)
        for got, want, yardstick in zip(run(*operands, lengths=lengths), exact, plain, strict=True):
            assert got.dtype == np.float32
            assert_as_accurate_as(got, yardstick, want)

    @pytest.mark.parametrize("fault", range(6))
    def test_a_wrong_operand_is_found(self, run, fault, monkeypatch):
        """The last token of the first chunk, or one row of the state, is off by a fiftieth."""
        operands = make_rule("one more token than a chunk")
        exact, plain = rule_in_float64(*operands), rule_in_tf32(operands, monkeypatch)
        wrong = [x.copy() for x in operands]
        if fault == 5:
            wrong[5][..., -1, :] *= 1.02
        else:
            wrong[fault][:, 63] *= 1.02
        y, _ = run(*wrong)
        with pytest.raises(AssertionError, match=r"over 2\.0 x"):
            assert_as_accurate_as(y, plain[0], exact[0])

    @pytest.mark.parametrize("length", [0.0, 1e-3, 30.0])
    def test_keys_and_queries_of_any_length_are_normalized(self, run, length, monkeypatch):
        q, k, *rest = make_rule("one more token than a chunk")
        d = q.shape[-1]
        q, k = length * q, length * k

        def unit(x):
            x = np.float64(x)
            return x / np.sqrt((x * x).sum(-1, keepdims=True) + 1e-6)

        exact = rule_in_float64(unit(q) / np.sqrt(d), unit(k), *rest)
        rounded = tuple(np.float32(x) for x in (unit(q) / np.sqrt(d), unit(k)))
        plain = rule_in_tf32((*rounded, *rest), monkeypatch)
        for got, want, yardstick in zip(
            run(q, k, *rest, normalize=True), exact, plain, strict=True
        ):
            assert_as_accurate_as(got, yardstick, want)

    def test_padding_is_not_read(self, run):
        """The results of padding are 0, and others are the same bits whatever padding holds."""
        operands, lengths = make_rule("rows of unequal length"), np.array(RAGGED.lengths, np.int32)
        y, state = (np.asarray(x) for x in run(*operands, lengths=lengths))
        assert not y[find_padding(lengths, y.shape[1])].any()
        np.testing.assert_array_equal(state[0], operands[5][0])  # a row without tokens
        for value in (0.0, 3.0, np.inf):
            again = run(*without_padding(operands, lengths, value), lengths=lengths)
            np.testing.assert_array_equal(again[0], y)
            np.testing.assert_array_equal(again[1], state)

    def test_lengths_out_of_range_are_no_tokens_and_all_tokens(self, run):
        operands = without_padding(make_rule("rows of unequal length"), RAGGED.lengths)
        lengths = np.array(RAGGED.lengths, np.int32)
        wild = np.where(lengths == 0, -7, np.where(lengths == RAGGED.tokens, 1 << 30, lengths))
        for one, other in zip(
            run(*operands, lengths=lengths), run(*operands, lengths=wild), strict=True
        ):
            np.testing.assert_array_equal(one, other)

    def test_whole_rows_need_no_lengths(self, run):
        """Lengths of t change no bit."""
        operands = make_rule("full widths, ragged rows")
        whole = run(*operands), run(*operands, lengths=np.full(2, 150, np.int32))
        for one, other in zip(*whole, strict=True):
            np.testing.assert_array_equal(one, other)

    @pytest.mark.parametrize("row", [2, 5, 7])
    @pytest.mark.parametrize("change", [-1, 1])
    def test_a_wrong_length_is_found(self, run, row, change, monkeypatch):
        """One token too few or too many in one row is over the bound, in y or in the state."""
        lengths = np.array(RAGGED.lengths, np.int32)
        operands = without_padding(make_rule("rows of unequal length"), lengths, 0.5)
        exact = rule_in_float64(*operands, lengths)
        plain = rule_in_tf32(operands, monkeypatch, lengths)
        wrong = lengths.copy()
        wrong[row] += change
        found = run(*operands, lengths=wrong)
        for got, want, yardstick in zip(found, exact, plain, strict=True):
            with pytest.raises(AssertionError, match=r"over 2\.0 x"):
                assert_as_accurate_as(got, yardstick, want)

    def test_padding_keeps_the_state_bit_for_bit(self, run):
        q, k, v, g, _, state = make_rule("full widths, whole chunks")
        nothing = np.zeros_like(g)
        _, kept = run(q, k, v, nothing, nothing, state)
        np.testing.assert_array_equal(kept, state)

    def test_not_a_number_reaches_the_tokens_behind_it(self, run):
        """A value that is NaN spoils its column from its token on, and nothing before it."""
        q, k, v, g, beta, state = (x.copy() for x in make_rule("full widths, whole chunks"))
        v[:, 70, :, 1, 3] = np.nan
        y, last = (np.asarray(x) for x in run(q, k, v, g, beta, state))
        assert np.isnan(y[:, 70:, :, 1, 3]).all()
        assert np.isnan(last[:, :, 1, :, 3]).all()
        assert np.isfinite(y[:, :64]).all()
        assert np.isfinite(y[:, :, :, 0]).all()
