"""Tests that every kernel of the recurrence of Mamba-2 for prompts must pass.

See recurrence_suite.py for what a subclass has.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.kernels.recurrence_suite import Recurrence, RecurrenceSuite, find_padding

from jax_nvfp4_moe.ops.recurrent.mamba2 import ssd_chunks
from jax_nvfp4_moe.testing import assert_as_accurate_as


@dataclasses.dataclass(frozen=True)
class ScanCase:
    """Sizes of a call, and what is special about its tokens."""

    sizes: tuple[int, int, int, int]  # heads, groups, their widths p and n
    tokens: int
    rows: int = 1
    fade: float = 1.0  # factor of the rates of the decays
    padding: int = 0  # last tokens of the last row that are padding, by their dt
    lengths: tuple[int, ...] = ()  # of the rows, with NaN behind them; () for one whole row


SCAN_CASES = {
    "usual widths, whole chunks": ScanCase((4, 2, 64, 128), 128),
    "full widths, ragged rows": ScanCase((2, 2, 128, 128), 150, rows=2, padding=70),
    "one token": ScanCase((1, 1, 128, 128), 1),
    "less than a chunk": ScanCase((4, 2, 64, 64), 31, fade=0.01),
    "one more token than a chunk": ScanCase((3, 1, 48, 32), 65),
    "more heads of a group than a block has": ScanCase((22, 2, 16, 32), 70),
    "narrow widths": ScanCase((6, 3, 4, 4), 70),
    "widths that no tile divides": ScanCase((2, 2, 76, 20), 100),
    "strong decays": ScanCase((2, 1, 32, 64), 130, fade=30.0),
    "no decay": ScanCase((2, 1, 32, 64), 200, fade=0.0),
    "rows of unequal length": ScanCase(
        (2, 1, 48, 32), 130, lengths=(0, 1, 31, 63, 64, 65, 130, 128)
    ),
    "full widths of unequal length": ScanCase((2, 2, 128, 128), 193, lengths=(70, 193)),
    "narrow rows of unequal length": ScanCase((6, 3, 4, 4), 70, lengths=(70, 32, 33)),
}


@functools.cache
def make_scan(name):
    """Return x, dt, a, B, C, D and the state of a case."""
    case, rng = SCAN_CASES[name], np.random.default_rng(len(name))
    (h, g, p, n), b, t = case.sizes, len(case.lengths) or case.rows, case.tokens
    x = rng.normal(size=(b, t, h, p))
    dt = np.logaddexp(2 * rng.normal(size=(b, t, h)) - 2, 0)
    a = -case.fade * np.exp(rng.normal(size=h))
    B, C = (rng.normal(size=(b, t, g, n)) / np.sqrt(n) for _ in range(2))
    D, state = rng.normal(size=h), rng.normal(size=(b, h, p, n))
    if case.padding:
        dt[-1, -case.padding :] = 0
    for row, length in enumerate(case.lengths):
        for tokens in (x, dt, B, C):
            tokens[row, length:] = np.nan
    return tuple(np.float32(part) for part in (x, dt, a, B, C, D, state))


def scan_in_float64(x, dt, a, B, C, D, state, lengths=None):
    """Compute the recurrence token by token."""
    lengths = np.full(len(x), x.shape[1]) if lengths is None else lengths
    x, dt, a, B, C, D, state = (np.asarray(part, np.float64) for part in (x, dt, a, B, C, D, state))
    B, C = (np.repeat(part, x.shape[2] // B.shape[2], axis=2) for part in (B, C))
    y, state = np.zeros_like(x), state.copy()
    for row, length in enumerate(lengths):
        for t in range(length):
            decay = np.exp(dt[row, t] * a)[:, None, None]
            state[row] = decay * state[row] + np.einsum(
                "h,hp,hn->hpn", dt[row, t], x[row, t], B[row, t]
            )
            y[row, t] = np.einsum("hpn,hn->hp", state[row], C[row, t]) + D[:, None] * x[row, t]
    return y, state


jitted_chunks = jax.jit(
    functools.partial(ssd_chunks, chunk=64, precision=jax.lax.Precision.DEFAULT)
)


def scan_in_tf32(operands, monkeypatch, lengths=None):
    """Return what XLA computes on tensor cores: products of operands with 11 bits."""
    if lengths is not None:
        operands = without_padding(operands, lengths)
    exact = jnp.einsum

    def rounded(subscripts, x, y, precision):
        if precision == jax.lax.Precision.DEFAULT:
            x, y = (jax.lax.reduce_precision(part, 8, 10) for part in (x, y))
        return exact(subscripts, x, y, precision=jax.lax.Precision.HIGHEST)

    x, dt, a, B, C, D, state = operands
    t = x.shape[1]
    if t == 1:  # which would be computed without products: a second token changes nothing
        x, dt, B, C = (np.concatenate([part, 0 * part], axis=1) for part in (x, dt, B, C))
    with monkeypatch.context() as patch:
        patch.setattr(jnp, "einsum", rounded)
        y, state = jitted_chunks(x, dt, a, B, C, state)
    return (y + D[None, None, :, None] * x)[:, :t], state


def without_padding(operands, lengths, value=0.0):
    """Return copies of the operands in which the numbers of padding are `value`."""
    x, dt, a, B, C, D, state = (part.copy() for part in operands)
    for tokens in (x, dt, B, C):
        tokens[find_padding(lengths, x.shape[1])] = value
    return x, dt, a, B, C, D, state


MAMBA2 = Recurrence(
    SCAN_CASES, make_scan, scan_in_float64, scan_in_tf32, without_padding, weights=(2, 5)
)


class Mamba2ScanSuite(RecurrenceSuite):
    """The recurrence of Mamba-2 for prompts in TensorFloat-32."""

    recurrence = MAMBA2

    @pytest.mark.parametrize("fault", range(7))
    def test_a_wrong_operand_is_found(self, run, fault, monkeypatch):
        """The last token of the first chunk, a head or a column of the state is a tenth off."""
        operands = make_scan("one more token than a chunk")
        exact, plain = scan_in_float64(*operands), scan_in_tf32(operands, monkeypatch)
        wrong = [x.copy() for x in operands]
        if fault == 6:
            wrong[6][..., -1] *= 1.1
        elif fault in (2, 5):
            wrong[fault][1] *= 1.1
        else:
            wrong[fault][:, 63] *= 1.1
        y, _ = run(*wrong)
        with pytest.raises(AssertionError, match=r"over 2\.0 x"):
            assert_as_accurate_as(y, plain[0], exact[0])

    def test_steps_of_zero_keep_the_state_bit_for_bit(self, run):
        x, dt, *rest, state = make_scan("usual widths, whole chunks")
        _, kept = run(x, np.zeros_like(dt), *rest, state)
        np.testing.assert_array_equal(kept, state)

    def test_a_small_decay_after_large_ones_stays_exact(self, run, monkeypatch):
        """The first 40 of 64 tokens forget everything, and the others almost nothing.

        Differences of float32 sums from the start would round each exponent to the ulp of 20,000.
        """
        x, dt, a, B, C, D, state = (part.copy() for part in make_scan("no decay"))
        a[:], dt[:, :40], dt[:, 40:], x[:, 40:] = -1.0, 500.0, 1e-3, 0.0
        operands = (x[:, :64], dt[:, :64], a, B[:, :64], C[:, :64], D, state)
        exact, plain = scan_in_float64(*operands), scan_in_tf32(operands, monkeypatch)
        for got, want, yardstick in zip(run(*operands), exact, plain, strict=True):
            assert_as_accurate_as(got, yardstick, want)


class Mamba2KernelSuite(Mamba2ScanSuite):
    """What holds for kernels beyond that. XLA computes the states before several chunks at once."""

    def test_not_a_number_reaches_the_tokens_behind_it(self, run):
        """An input that is NaN spoils its channel from its token on, and nothing before it."""
        x, *rest = (part.copy() for part in make_scan("usual widths, whole chunks"))
        x[:, 70, 1, 3] = np.nan
        y, last = (np.asarray(part) for part in run(x, *rest))
        assert np.isnan(y[:, 70:, 1, 3]).all()
        assert np.isnan(last[:, 1, 3]).all()
        assert np.isfinite(y[:, :64]).all()
        assert np.isfinite(y[:, :, :, 0]).all()
