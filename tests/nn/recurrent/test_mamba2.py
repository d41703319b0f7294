"""Test the recurrence of Mamba-2: chunks equal steps, padding does nothing, sums stay exact."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_nvfp4_moe.numerics.convolution import convolve
from jax_nvfp4_moe.ops.recurrent import mamba2
from jax_nvfp4_moe.ops.recurrent.delta_chunks import choose_precision
from jax_nvfp4_moe.testing import assert_as_accurate_as

HEADS, WIDTH, GROUPS, STATE = 4, 8, 2, 16
ssd, convolved = jax.jit(mamba2.ssd_chunks), jax.jit(convolve)


def operands(t, seed=0, batch=2):
    """Return random tokens and a state before them; some heads forget at once and others never."""
    normal = functools.partial(np.random.default_rng(seed).standard_normal, dtype=np.float32)
    x = normal((batch, t, HEADS, WIDTH))
    dt = np.log1p(np.exp(2 * normal((batch, t, HEADS)) - 2))
    B, C = (normal((batch, t, GROUPS, STATE)) for _ in range(2))
    state = normal((batch, HEADS, WIDTH, STATE))
    return x, dt, -np.array([0.01, 1.0, 8.0, 60.0], np.float32), B, C, state


def by_equation(x, dt, a, B, C, state, dtype):
    """Return the outputs and the last state by the module's equation, step by step."""
    x, dt, a, B, C, state = (np.asarray(v, dtype) for v in (x, dt, a, B, C, state))
    B, C = (np.repeat(v, HEADS // GROUPS, axis=2) for v in (B, C))
    y = np.zeros_like(x)
    for t in range(x.shape[1]):
        added = (dt[:, t, :, None] * x[:, t])[..., None] * B[:, t, :, None, :]
        state = np.exp(dt[:, t] * a)[..., None, None] * state + added
        y[:, t] = (state * C[:, t, :, None, :]).sum(-1)
    return y, state


def assert_is_its_equation(actual, given):
    truth = by_equation(*given, np.float64)
    yardstick = by_equation(*given, np.float32)
    for ours, float32, exact in zip(actual, yardstick, truth, strict=True):
        assert_as_accurate_as(ours, float32, exact, factor=4.0)


@pytest.mark.parametrize("t", [1, 2, 7, 63, 64, 65, 130, 200])
def test_chunks_are_the_steps(t, monkeypatch):
    """Some lengths do not fill a chunk or a piece. A piece has two chunks of one row."""
    monkeypatch.setattr(mamba2, "_BATCH_TOKENS", 256)
    given = operands(t)
    # The function is new, because JAX would reuse a trace with the other number of tokens.
    assert_is_its_equation(jax.jit(lambda *given: mamba2.ssd_chunks(*given))(*given), given)


def test_the_bound_of_chunks_catches_a_state_that_is_left_out():
    given = operands(70)
    y, state = ssd(*given[:-1], np.zeros_like(given[-1]))
    with pytest.raises(AssertionError, match="over"):
        assert_is_its_equation((y, state), given)


@pytest.mark.parametrize("cuts", [(1, 1, 64), (2, 70, 1), (64, 1, 65)])
def test_pieces_are_the_whole(cuts):
    """Any split of a text gives the result of the whole, because only the state carries over."""
    given = operands(sum(cuts))
    *tokens, state = given
    pieces, start = [], 0
    for count in cuts:
        x, dt, a, B, C = (v if v.ndim == 1 else v[:, start : start + count] for v in tokens)
        y, state = ssd(x, dt, a, B, C, state)
        pieces.append(y)
        start += count
    assert_is_its_equation((np.concatenate(pieces, axis=1), state), given)


def test_a_small_decay_after_large_ones_stays_exact():
    """The first 32 of 64 tokens forget everything, and the others almost nothing.

    Differences of sums from the start would round each exponent to the ulp of 16,000.
    """
    x, dt, a, B, C, state = operands(64)
    a = np.full_like(a, -1.0)
    dt[:, :32], dt[:, 32:] = 500.0, 1e-3
    given = (x, dt, a, B, C, state)
    assert_is_its_equation(ssd(*given), given)
    total = np.cumsum(dt[0, :, 0] * a[0], dtype=np.float32)
    exact = np.cumsum(np.asarray(dt[0, :, 0] * a[0], np.float64))
    rounded = np.exp(total[60] - total[40]) / np.exp(exact[60] - exact[40])
    assert abs(rounded - 1) > 1e-4


@pytest.mark.parametrize("t", [1, 2, 64, 70])
def test_steps_of_zero_leave_the_state(t):
    """A time step of zero marks padding, whose other values may be anything finite."""
    x, dt, a, B, C, state = operands(t)
    _, behind = ssd(x, np.zeros_like(dt), a, B, C, state)
    np.testing.assert_array_equal(behind, state)


def by_rounded_products(bits, monkeypatch):
    """Return the error of chunks, in bfloat16 results, relative to rounding exact results.

    Both are root mean squares. Products of lower precision round their operands to `bits` behind
    the binary point, as a GPU does with TensorFloat-32.
    """
    exact, given = jnp.einsum, operands(256)

    def rounded(subscripts, x, y, precision):
        if precision == jax.lax.Precision.DEFAULT:
            x, y = (jax.lax.reduce_precision(part, 8, bits) for part in (x, y))
        return exact(subscripts, x, y, precision=jax.lax.Precision.HIGHEST)

    monkeypatch.setattr(jnp, "einsum", rounded)
    rule = functools.partial(mamba2.ssd_chunks, chunk=128, precision=choose_precision(jnp.bfloat16))
    y, _ = jax.jit(rule)(*given)
    want, _ = by_equation(*given, np.float64)
    results = [np.asarray(one).astype(jnp.bfloat16).astype(np.float64) for one in (y, want)]
    errors = [np.sqrt(np.mean(np.square(one - want))) for one in results]
    return errors[0] / errors[1]


def test_tensor_cores_are_accurate_enough_for_bfloat16(monkeypatch):
    assert by_rounded_products(10, monkeypatch) <= 2


def test_the_bound_catches_products_of_bfloat16(monkeypatch):
    assert by_rounded_products(7, monkeypatch) > 2


def test_a_convolution_keeps_the_last_tokens_of_each_row():
    rng, shapes = np.random.default_rng(0), ((4, 6, 3), (4, 3, 3), (3, 4))
    x, past, taps = (rng.standard_normal(shape, np.float32) for shape in shapes)
    counts = np.array([0, 1, 3, 6])
    y, kept = convolved(x, past, taps, np.arange(6)[None] < counts[:, None])
    seen = np.concatenate([past, x], axis=1, dtype=np.float64)
    for row, count in enumerate(counts):
        np.testing.assert_array_equal(kept[row], seen[row, count : count + 3])
    windows = np.lib.stride_tricks.sliding_window_view(seen, 4, axis=1)
    truth = (windows * np.asarray(taps, np.float64)[None, None]).sum(-1)
    yardstick = (windows.astype(np.float32) * np.asarray(taps)[None, None]).sum(-1)
    assert_as_accurate_as(y, yardstick, truth)
    assert kept.dtype == past.dtype


def test_a_convolution_of_one_token_keeps_nothing():
    x, taps = np.ones((1, 2, 3), np.float32), np.full((3, 1), 2.0, np.float32)
    y, kept = convolved(x, np.zeros((1, 0, 3), np.float32), taps, np.ones((1, 2), bool))
    np.testing.assert_array_equal(y, 2 * x)
    assert kept.shape == (1, 0, 3)
