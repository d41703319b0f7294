"""Test the gated delta rule by chunks and by steps against its float64 recurrence, and padding."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.ops.recurrent_rules import check_gradients

from jax_nvfp4_moe.numerics.convolution import convolve
from jax_nvfp4_moe.ops.positions import PADDING
from jax_nvfp4_moe.ops.recurrent.delta_chunks import choose_precision
from jax_nvfp4_moe.ops.recurrent.gated_delta import delta_chunks, delta_step, mix_gated_delta
from jax_nvfp4_moe.testing import assert_as_accurate_as

# Batch, key heads, value heads per key head, key channels, value channels.
B, M, R, D, E = 2, 2, 3, 16, 8
CHUNK = 8
by_chunks = jax.jit(functools.partial(delta_chunks, chunk=CHUNK))


def case(t, fade=1.0):
    """Return random tokens and a state; `fade` scales the logarithm of the decay."""
    normal = functools.partial(np.random.default_rng(t).standard_normal, dtype=np.float32)
    q, k = (normal((B, t, M, D)) for _ in range(2))
    q, k = (x / np.linalg.norm(x, axis=-1, keepdims=True) for x in (q, k))
    v = normal((B, t, M, R, E))
    g = -fade * np.log1p(np.exp(3 * normal((B, t, M, R))))
    beta = 1 / (1 + np.exp(-2 * normal((B, t, M, R))))
    return (q, k, v, g, beta), normal((B, M, R, D, E))


def recurrence(tokens, state):
    """Compute ``S = a S + beta k (v - k.T a S)`` and ``y = q.T S`` token by token in float64."""
    q, k, v, g, beta = (np.asarray(x, np.float64) for x in tokens)
    state, results = np.asarray(state, np.float64), []
    for i in range(q.shape[1]):
        state = state * np.exp(g[:, i])[..., None, None]
        missing = v[:, i] - np.einsum("bmd,bmrde->bmre", k[:, i], state)
        state = state + np.einsum("bmd,bmr,bmre->bmrde", k[:, i], beta[:, i], missing)
        results.append(np.einsum("bmd,bmrde->bmre", q[:, i], state))
    return np.stack(results, axis=1), state


@jax.jit
def by_steps(tokens, state):
    def body(state, token):
        q, k, v, g, beta = (x[:, None] for x in token)
        y, state = delta_step(q, k, v, g, beta, state)
        return state, y[:, 0]

    state, y = jax.lax.scan(body, state, tuple(jnp.moveaxis(x, 1, 0) for x in tokens))
    return jnp.moveaxis(y, 0, 1), state


@pytest.mark.parametrize("fade", [0.01, 1.0, 30.0])
@pytest.mark.parametrize("t", [1, 7, 9, 31])
def test_chunks_and_steps_are_the_recurrence(t, fade):
    """Plain float32 steps are the yardstick. The factor is 4, as chunks sum in another order."""
    tokens, state = case(t, fade)
    expected = recurrence(tokens, state)
    steps = map(np.asarray, by_steps(tokens, state))
    for got, want, yardstick in zip(by_chunks(*tokens, state), expected, steps, strict=True):
        assert_as_accurate_as(got, yardstick, want, factor=4.0)
        # Each of t steps rounds sums of D products of the state's size.
        scale = np.abs(expected[1]).max() + np.abs(state).max()
        assert np.abs(yardstick - want).max() <= t * D * 2.0**-24 * scale


@pytest.mark.parametrize("fault", range(5))
def test_the_bounds_catch_one_wrong_token(fault):
    """The last token of a chunk has a query, key, value, decay or rate off by a thousandth."""
    tokens, state = case(9)
    expected, steps = recurrence(tokens, state), by_steps(tokens, state)
    wrong = list(tokens)
    wrong[fault] = wrong[fault].copy()
    wrong[fault][:, CHUNK - 1] *= 1.001
    y, _ = by_chunks(*wrong, state)
    with pytest.raises(AssertionError):
        assert_as_accurate_as(y, steps[0], expected[0], factor=4.0)


def test_pieces_hand_their_state_on():
    tokens, state = case(31)
    y, last = by_chunks(*tokens, state)
    pieces = []
    for start, end in ((0, 7), (7, 15), (15, 22), (22, 31)):
        piece, state = by_chunks(*(x[:, start:end] for x in tokens), state)
        pieces.append(piece)
    want = recurrence(*case(31))
    assert_as_accurate_as(np.concatenate(pieces, axis=1), y, want[0])
    assert_as_accurate_as(state, last, want[1])


def test_tokens_without_rate_and_decay_change_nothing():
    """Padding has no rate and no decay. A chunk of padding alone keeps the state bit for bit."""
    (q, k, v, g, beta), state = case(2 * CHUNK)
    nothing = np.zeros_like(g)
    _, same = by_chunks(q, k, v, nothing, nothing, state)
    np.testing.assert_array_equal(same, state)
    half = [np.where(np.arange(2 * CHUNK)[:, None, None] < CHUNK, x, 0) for x in (g, beta)]
    _, padded = by_chunks(q, k, v, *half, state)
    _, short = by_chunks(*(x[:, :CHUNK] for x in (q, k, v, g, beta)), state)
    np.testing.assert_array_equal(padded, short)


@jax.jit
def lengths_of_rows(inputs, positions, weights):
    """Return the lengths that the rule of a prompt is told."""
    seen, channels = [], weights["conv_weight"].shape[0]

    def rule(q, k, v, g, beta, state, *, lengths):
        seen.append(lengths)
        return v, state

    mix_gated_delta(
        inputs,
        positions,
        jnp.zeros((B, 3, channels)),
        jnp.zeros((B, M, R, D, E)),
        **weights,
        interleaved=False,
        eps=1e-6,
        rule=rule,
    )
    return seen[0]


@pytest.mark.parametrize("present", [(9, 4), (0, 9), (1, 1)])
def test_a_prompt_tells_the_rule_its_lengths(present):
    """They are the counts of the positions that are no padding."""
    rng = np.random.default_rng(0)
    channels, heads = 2 * M * D + M * R * E, M * R
    positions = np.tile(np.arange(9, dtype=np.int32), (B, 1)) + 100  # a cache holds earlier tokens
    positions[positions - 100 >= np.array(present)[:, None]] = PADDING
    weights = {"conv_weight": rng.normal(size=(channels, 4)), "norm": np.ones(E)}
    weights |= {name: rng.normal(size=heads) for name in ("A_log", "dt_bias")}
    inputs = rng.normal(size=(B, 9, channels + heads * (E + 2)))
    inputs, weights = jax.tree.map(np.float32, (inputs, weights))
    found = lengths_of_rows(inputs, positions, weights)
    assert found.dtype == jnp.int32
    assert found.tolist() == list(present)


def test_a_strong_decay_forgets_all():
    """Sums of logarithms of -3100 underflow to 0 and cause no NaN."""
    (q, k, v, g, beta), state = case(31)
    g = np.full_like(g, -100.0)
    y, last = map(np.asarray, by_chunks(q, k, v, g, beta, state))
    want, _ = recurrence((q, k, v, g, beta), state)
    assert np.isfinite(y).all() & np.isfinite(last).all()
    assert np.abs(y - want).max() <= D * 2.0**-24 * np.abs(v).max()


def by_rounded_products(bits, monkeypatch):
    """Return the error of chunks, in bfloat16 results, relative to rounding exact results.

    Products of lower precision round their operands to `bits` behind the binary point, as a GPU
    does with TensorFloat-32. All keys are one of three, and their rates are 1.
    """
    (q, k, v, g, _), state = case(256)
    k = k[:, np.random.default_rng(0).integers(0, 3, 256)]
    tokens, exact = (q, k, v, np.zeros_like(g), np.ones_like(g)), jnp.matmul

    def rounded(x, y, precision):
        if precision == jax.lax.Precision.DEFAULT:
            x, y = (jax.lax.reduce_precision(part, 8, bits) for part in (x, y))
        return exact(x, y, precision=jax.lax.Precision.HIGHEST)

    monkeypatch.setattr(jnp, "matmul", rounded)
    rule = functools.partial(delta_chunks, chunk=128, precision=choose_precision(jnp.bfloat16))
    y, _ = jax.jit(rule)(*tokens, state)
    want, _ = recurrence(tokens, state)
    results = [np.asarray(one).astype(jnp.bfloat16).astype(np.float64) for one in (y, want)]
    errors = [np.abs(one - want).max() for one in results]
    return errors[0] / errors[1]


def test_tensor_cores_are_accurate_enough_for_bfloat16(monkeypatch):
    assert by_rounded_products(10, monkeypatch) <= 2
    assert (
        choose_precision(jnp.float16) == choose_precision(jnp.float32) == jax.lax.Precision.HIGHEST
    )


def test_the_bound_catches_products_of_bfloat16(monkeypatch):
    assert by_rounded_products(7, monkeypatch) > 2


def test_gradients_are_those_of_the_steps():
    check_gradients(by_chunks, by_steps, *case(9))


@jax.jit
def convolve_pieces(x, past, taps):
    """Convolve nine tokens in three pieces."""
    pieces = []
    for start, end in ((0, 1), (1, 3), (3, 9)):
        present = jnp.ones((2, end - start), jnp.bool_)
        y, past = convolve(x[:, start:end], past, taps, present)
        pieces.append(y)
    return jnp.concatenate(pieces, axis=1), past


@pytest.mark.parametrize("count", [1, 2, 4])
def test_the_convolution_is_its_equation_in_pieces(count):
    rng = np.random.default_rng(count)
    x, taps = (rng.standard_normal(shape, np.float32) for shape in ((2, 9, 5), (5, count)))
    padded = np.pad(np.asarray(x, np.float64), ((0, 0), (count - 1, 0), (0, 0)))
    want = sum(padded[:, j : j + 9] * np.asarray(taps, np.float64)[:, j] for j in range(count))
    got, past = convolve_pieces(x, np.zeros((2, count - 1, 5), np.float32), taps)
    assert np.abs(got - want).max() <= count * 2.0**-23 * np.abs(want).max()
    np.testing.assert_array_equal(past, x[:, 9 - (count - 1) :])


def test_the_convolution_keeps_the_last_present_inputs():
    x = np.arange(2 * 4 * 1, dtype=np.float32).reshape(2, 4, 1)
    past = np.full((2, 3, 1), -1.0, np.float32)
    present = np.array([[True, True, False, False], [False] * 4])
    _, kept = jax.jit(convolve)(x, past, np.ones((1, 4), np.float32), present)
    np.testing.assert_array_equal(kept[..., 0], [[-1, 0, 1], [-1, -1, -1]])
