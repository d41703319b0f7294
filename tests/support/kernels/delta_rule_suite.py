"""Tests that every kernel of the gated delta rule for prompts must pass.

`DELTA` has one decay for each value head, and `CHANNEL_DELTA` one for each channel of a key. See
recurrence_suite.py for what a subclass has. The fixture `run` also has the argument
`normalize`, False by default.
"""

import dataclasses
import functools
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.kernels.recurrence_suite import Recurrence, RecurrenceSuite, find_padding

from jax_nvfp4_moe.ops.recurrent.channel_delta import channel_delta_chunks
from jax_nvfp4_moe.ops.recurrent.gated_delta import delta_chunks
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
    channel_decays: bool = False


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
    "rows of unequal length": RuleCase(
        (1, 2, 32, 48), 130, lengths=(0, 1, 31, 63, 64, 65, 130, 128)
    ),
    "full widths of unequal length": RuleCase((2, 1, 128, 128), 193, lengths=(70, 193)),
    "narrow rows of unequal length": RuleCase((3, 2, 4, 4), 70, lengths=(70, 32, 33)),
}


def _with_channel_decays(case):
    """Return a case in which each head has keys of its own, and each channel a decay."""
    m, r, d, e = case.sizes
    return dataclasses.replace(case, sizes=(m * r, 1, d, e), channel_decays=True)


CHANNEL_CASES = {name: _with_channel_decays(case) for name, case in RULE_CASES.items()}


@functools.cache
def make_rule(name, channel_decays=False):
    """Return q, k, v, g, beta and the state of a case."""
    case = (CHANNEL_CASES if channel_decays else RULE_CASES)[name]
    return make_case(case, np.random.default_rng(len(name)))


def make_case(case, rng):
    """Return q, k, v, g, beta and the state."""
    (m, r, d, e), b, t = case.sizes, len(case.lengths) or case.rows, case.tokens
    q, k = (rng.normal(size=(b, t, m, d)) for _ in range(2))
    if case.keys is not None:
        k = k[:, rng.integers(0, case.keys, t)]
    q, k = (x / np.linalg.norm(x, axis=-1, keepdims=True) for x in (q, k))
    v = rng.normal(size=(b, t, m, r, e))
    own = (d,) if case.channel_decays else ()
    g = -case.fade * np.logaddexp(3 * rng.normal(size=(b, t, m, r, *own)), 0)
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
        decay = np.exp(g[:, i])
        state = state * (decay[..., None] if decay.ndim == 4 else decay[..., None, None])
        missing = v[:, i] - np.einsum("bmd,bmrde->bmre", k[:, i], state)
        state = state + np.einsum("bmd,bmr,bmre->bmrde", k[:, i], beta[:, i], missing)
        results.append(np.einsum("bmd,bmrde->bmre", q[:, i], state))
    return np.stack(results, axis=1), state


@jax.jit
def jitted_chunks(q, k, v, g, *operands):
    """Apply the reference in chunks of 64 tokens."""
    chunks = channel_delta_chunks if g.ndim == 5 else delta_chunks
    return chunks(q, k, v, g, *operands, chunk=64, precision=jax.lax.Precision.DEFAULT)


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


DELTA = Recurrence(RULE_CASES, make_rule, rule_in_float64, rule_in_tf32, without_padding)
CHANNEL_DELTA = dataclasses.replace(
    DELTA, cases=CHANNEL_CASES, make=functools.partial(make_rule, channel_decays=True)
)


class DeltaRuleSuite(RecurrenceSuite):
    """The gated delta rule for prompts in TensorFloat-32."""

    recurrence: ClassVar[Recurrence] = DELTA

    @pytest.mark.parametrize("fault", range(6))
    def test_a_wrong_operand_is_found(self, run, fault, monkeypatch):
        """The last token of the first chunk, or one row of the state, is off by a twentieth."""
        operands = self.recurrence.make("one more token than a chunk")
        exact, plain = rule_in_float64(*operands), rule_in_tf32(operands, monkeypatch)
        wrong = [x.copy() for x in operands]
        if fault == 5:
            wrong[5][..., -1, :] *= 1.05
        else:
            wrong[fault][:, 63] *= 1.05
        y, _ = run(*wrong)
        with pytest.raises(AssertionError, match=r"over 2\.0 x"):
            assert_as_accurate_as(y, plain[0], exact[0])

    @pytest.mark.parametrize("length", [0.0, 1e-3, 30.0])
    def test_keys_and_queries_of_any_length_are_normalized(self, run, length, monkeypatch):
        q, k, *rest = self.recurrence.make("one more token than a chunk")
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

    def test_padding_keeps_the_state_bit_for_bit(self, run):
        q, k, v, g, beta, state = self.recurrence.make("full widths, whole chunks")
        _, kept = run(q, k, v, np.zeros_like(g), np.zeros_like(beta), state)
        np.testing.assert_array_equal(kept, state)

    def test_not_a_number_reaches_the_tokens_behind_it(self, run):
        """A value that is NaN spoils its column from its token on, and nothing else."""
        operands = self.recurrence.make("full widths, whole chunks")
        q, k, v, g, beta, state = (x.copy() for x in operands)
        v[:, 70, :, -1, 3] = np.nan
        y, last = (np.asarray(x) for x in run(q, k, v, g, beta, state))
        assert np.isnan(y[:, 70:, :, -1, 3]).all()
        assert np.isnan(last[:, :, -1, :, 3]).all()
        assert np.isfinite(y[:, :64]).all()
        assert np.isfinite(y[..., 4:]).all()


class ChannelDeltaRuleSuite(DeltaRuleSuite):
    """With a decay for each channel of a key."""

    recurrence = CHANNEL_DELTA

    def test_a_small_decay_after_large_ones_stays_exact(self, run, monkeypatch):
        """The first half of a chunk forgets everything, and the other half almost nothing.

        Differences of sums from the start of the chunk would lose the digits of small decays.
        """
        q, k, v, g, beta, state = (x.copy() for x in make_rule("full widths, whole chunks", True))
        g[:, :32], g[:, 32:] = -20000.0, -1e-3
        operands = q, k, v, g, beta, state
        exact, plain = rule_in_float64(*operands), rule_in_tf32(operands, monkeypatch)
        for got, want, yardstick in zip(run(*operands), exact, plain, strict=True):
            assert_as_accurate_as(got, yardstick, want)

    def test_each_channel_has_its_own_decay(self, run, monkeypatch):
        """A decay that is off in one channel of one token is over the bound."""
        operands = self.recurrence.make("one more token than a chunk")
        exact, plain = rule_in_float64(*operands), rule_in_tf32(operands, monkeypatch)
        for channel in (0, 13, 31):
            wrong = [x.copy() for x in operands]
            wrong[3][:, 40, :, :, channel] += 0.2
            y, _ = run(*wrong)
            with pytest.raises(AssertionError, match=r"over 2\.0 x"):
                assert_as_accurate_as(y, plain[0], exact[0])
