"""Tests that every kernel of a decoding step of a recurrent mixer must pass.

A subclass has the axes `dtype` and `case`, and a fixture ``run(*tokens, **weights)``.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_nvfp4_moe.numerics.activations import find_activation
from jax_nvfp4_moe.ops.positions import PADDING
from jax_nvfp4_moe.ops.recurrent.gated_delta import mix_gated_delta
from jax_nvfp4_moe.ops.recurrent.kimi_delta import mix_kimi_delta
from jax_nvfp4_moe.ops.recurrent.mamba2 import mix_mamba2
from jax_nvfp4_moe.testing import assert_as_accurate_as


def factor_for(dtype):
    """Return the allowed ratio of errors. In float32, both errors are a few roundings."""
    return 4.0 if dtype == np.float32 else 2.0


@dataclasses.dataclass(frozen=True)
class DeltaCase:
    """Sizes of a gated delta net, and the position of each row."""

    sizes: tuple[int, int, int, int]  # key heads, value heads of each, their widths
    taps: int = 4
    interleaved: bool = False
    positions: tuple[int, ...] = (5,)
    apart: bool = False  # whether rates and steps are an operand of their own


DELTA_CASES = {
    "full widths": DeltaCase((1, 2, 128, 128), positions=(0, PADDING, 9)),
    "full widths, one value head": DeltaCase((2, 1, 128, 128), interleaved=True),
    "three value heads": DeltaCase((2, 3, 16, 8), 3, True, (7, PADDING + 1)),
    "seven key heads": DeltaCase((7, 1, 20, 12), 2),
    "more value heads than a cluster has blocks": DeltaCase((2, 9, 16, 32)),
    "lanes that do not divide the threads": DeltaCase((1, 2, 128, 96), 4, True),
    "wide keys": DeltaCase((1, 2, 128, 4)),
    "no past": DeltaCase((2, 2, 4, 4), 1),
    "a long past": DeltaCase((2, 2, 16, 16), 7, False, (3, PADDING)),
    "rates apart": DeltaCase((2, 3, 16, 8), 3, False, (7, PADDING + 1, 0), True),
    "full widths, rates apart": DeltaCase((1, 2, 128, 128), 4, True, (0, 9), True),
    "full widths, a long past": DeltaCase((1, 2, 128, 128), 7, False, (3, PADDING)),
    "two kernels, rates apart": DeltaCase((2, 9, 16, 32), apart=True),
}


@functools.cache
def make_delta(name, dtype):
    """Return the tokens and the weights of a case."""
    case = DELTA_CASES[name]
    (m, r, d, e), b, rng = case.sizes, len(case.positions), np.random.default_rng(len(name))
    channels, heads = 2 * m * d + m * r * e, m * r
    projected = np.asarray(rng.normal(size=(b, 1, channels + heads * (e + 2))), dtype)
    positions = np.asarray(case.positions, np.int32)[:, None]
    inputs = np.asarray(rng.normal(size=(b, case.taps - 1, channels)), dtype)
    state = np.float32(rng.normal(size=(b, m, r, d, e)))
    weights = {
        "conv_weight": np.float32(rng.normal(size=(channels, case.taps))),
        "A_log": np.float32(rng.normal(size=heads)),
        "dt_bias": np.float32(rng.normal(size=heads)),
        "norm": np.float32(1 + rng.normal(size=e) / 4),
    }
    return (projected, positions, inputs, state), weights


def take_rates(name, tokens, weights, turn=0):
    """Return the tokens and the weights of a call, with the rates among the weights if apart.

    They are moved on by `turn` places.
    """
    case = DELTA_CASES[name]
    if not case.apart:
        return tokens, weights
    projected, rates = np.split(tokens[0], [-2 * case.sizes[0] * case.sizes[1]], axis=-1)
    rates = np.ascontiguousarray(np.roll(rates, turn, axis=-1))
    return (np.ascontiguousarray(projected), *tokens[1:]), {**weights, "rates": rates}


def delta_in_float64(name, tokens, weights, eps=1e-6):
    """Compute a step by its equations, row by row and head by head."""
    case, (projected, positions, inputs, state) = DELTA_CASES[name], tokens
    m, r, d, e = case.sizes
    projected, inputs, state = (np.array(x, np.float64) for x in (projected, inputs, state))
    weights = {name: np.asarray(value, np.float64) for name, value in weights.items()}
    y = np.zeros((len(state), 1, m * r * e))
    for row, numbers in enumerate(projected[:, 0]):
        if positions[row, 0] >= PADDING:
            continue
        qkv, z, rates, steps = parts_of(numbers, case)
        window = np.concatenate([inputs[row], qkv[None]])
        mixed = _silu((window.T * weights["conv_weight"]).sum(1))
        inputs[row] = window[1:]
        for head in range(m * r):
            own, within = divmod(head, r)
            q, k = (mixed[i * m * d :][own * d : (own + 1) * d] for i in range(2))
            v = mixed[2 * m * d :][head * e : (head + 1) * e]
            q, k = (x / np.sqrt((x * x).sum() + 1e-6) for x in (q, k))
            step = np.logaddexp(steps[head] + weights["dt_bias"][head], 0)
            decayed = np.exp(-np.exp(weights["A_log"][head]) * step) * state[row, own, within]
            correction = (v - k @ decayed) / (1 + np.exp(-rates[head]))
            state[row, own, within] = decayed + np.outer(k, correction)
            result = q @ state[row, own, within] / np.sqrt(d)
            result *= weights["norm"] / np.sqrt((result * result).mean() + eps)
            y[row, 0, head * e : (head + 1) * e] = result * _silu(z[head * e : (head + 1) * e])
    return y, inputs, state


def parts_of(numbers, case):
    """Return the channels of the convolution, z, the rates and the steps of one token."""
    m, r, d, e = case.sizes
    if not case.interleaved:
        return np.split(numbers, np.cumsum([2 * m * d + m * r * e, m * r * e, m * r]))
    first = numbers[: 2 * m * (d + r * e)].reshape(m, -1)
    rates, steps = numbers[2 * m * (d + r * e) :].reshape(m, 2, r).swapaxes(0, 1)
    q, k, v, z = np.split(first, np.cumsum([d, d, r * e]), axis=1)
    channels = np.concatenate([x.ravel() for x in (q, k, v)])
    return channels, z.ravel(), rates.ravel(), steps.ravel()


def _silu(x):
    return x / (1 + np.exp(-x))


jitted_delta = jax.jit(mix_gated_delta, static_argnames=("interleaved", "eps"))
jitted_kimi = jax.jit(mix_kimi_delta, static_argnames=("lower_bound", "eps"))
jitted_mamba = jax.jit(mix_mamba2, static_argnames=("activation", "step_limits", "eps"))


def plain_delta(name, tokens, weights):
    """Return the results of plain XLA."""
    return jitted_delta(*tokens, **weights, interleaved=DELTA_CASES[name].interleaved, eps=1e-6)


def check_step(results, plain, exact, tokens, dtype):
    """Check y, inputs and state of a step. `exact` is float64, and plain XLA is the yardstick."""
    results = [np.asarray(x) for x in results]
    real = tokens[1][:, 0] < PADDING
    assert results[0].dtype == results[1].dtype == dtype
    assert results[2].dtype == np.float32
    assert np.isfinite(results[0].astype(np.float32)).all()
    y, yardstick = results[0][real], np.asarray(plain[0])[real]
    assert_as_accurate_as(y, yardstick, exact[0][real], factor_for(y.dtype))
    np.testing.assert_array_equal(results[1], np.asarray(exact[1], dtype))
    assert_as_accurate_as(results[2], plain[2], exact[2], factor_for(np.float32))
    # Padding keeps its rows bit for bit.
    np.testing.assert_array_equal(results[1][~real], tokens[2][~real])
    np.testing.assert_array_equal(results[2][~real], tokens[3][~real])


def spoiled(weights, name):
    """Return the weights with the last entry of one of them off by a hundredth."""
    off = {**weights, name: weights[name].copy()}
    off[name].flat[-1] *= 1.01
    return off


TOKENS, STATES = 6, 7  # of a window, more than a block of delta_step.cu mixes at once


def many_tokens(projected, positions):
    """Return the projected tokens of a window, and their positions. The last row ends in it."""
    projected = np.concatenate([np.roll(projected, i, axis=-1) for i in range(TOKENS)], axis=1)
    positions = np.repeat(positions, TOKENS, axis=1)
    if len(positions) > 1:
        positions[-1, TOKENS // 2 :] = PADDING
    return projected, positions


def window_of(x, kept, seed):
    """Return a window of states of which `x` is the one at `kept`."""
    other = np.random.default_rng(seed).normal(size=(len(x), STATES, *x.shape[1:])).astype(x.dtype)
    other[:, kept] = x
    return other


class StepSuite:
    """A step of a mixer. Subclasses say how to make, to compute and to call it."""

    cases: ClassVar[Mapping]  # by their names
    make: ClassVar[Callable]  # of the name of a case and a dtype, returns tokens and weights
    exact: ClassVar[Callable]  # of the name, tokens and weights, in float64
    plain: ClassVar[Callable]  # of the same, in plain XLA

    def call(self, run, case, tokens, weights):
        raise NotImplementedError("a subclass says how to call its kernels")

    def check(self, case, tokens, weights, results, dtype=np.float32):
        """Check `results` against what the step is for these tokens and weights."""
        plain, exact = (step(case, tokens, weights) for step in (self.plain, self.exact))
        check_step(results, plain, exact, tokens, dtype)

    def assert_found(self, *step, match=r"over 4\.0 x"):
        """Assert that `check` finds results of wrong operands."""
        with pytest.raises(AssertionError, match=match):
            self.check(*step)

    def test_matches_float64(self, run, case, dtype):
        tokens, weights = self.make(case, jnp.dtype(dtype))
        self.check(case, tokens, weights, self.call(run, case, tokens, weights), dtype)

    @pytest.mark.parametrize("kept", [0, 1, 6])
    def test_a_window_is_as_accurate_as_steps(self, run, case, dtype, kept):
        """A window of tokens goes on from any state, and has the state after each token."""
        tokens, weights = self.make(case, jnp.dtype(dtype))
        found = self.call_window(run, case, tokens, weights, kept)
        self.check_window(run, case, tokens, weights, found)
        for index, (own, old) in enumerate(zip(found[1:], tokens[2:], strict=True)):
            rest = window_of(old, kept, index)[:, TOKENS:]
            np.testing.assert_array_equal(own[:, TOKENS:], rest, "a state behind the tokens")

    def test_a_window_from_another_state_is_found(self, run):
        case, dtype = next(iter(self.cases)), np.dtype("float32")
        tokens, weights = self.make(case, dtype)
        *first, state = tokens
        found = self.call_window(run, case, (*first, np.roll(state, 1, axis=-1)), weights, 1)
        with pytest.raises(AssertionError, match=r"over 4\.0 x"):
            self.check_window(run, case, tokens, weights, found)

    def check_window(self, run, case, tokens, weights, results):
        """Check the results of a window; steps for one token are the yardstick."""
        y, inputs, states = map(np.asarray, results)
        old = exact = tokens[2:]
        for token in range(TOKENS):
            now = [x[:, token : token + 1] for x in many_tokens(*tokens[:2])]
            own = self.weights_of_token(weights, token)
            step_y, *old = self.call(run, case, (*now, *old), own)
            exact_y, *exact = self.exact(case, (*now, *exact), own)
            real, factor = now[1][:, 0] < PADDING, factor_for(y.dtype)
            assert_as_accurate_as(
                y[real, token], np.asarray(step_y)[real, 0], exact_y[real, 0], factor
            )
            np.testing.assert_array_equal(inputs[:, token], old[0])
            assert_as_accurate_as(states[:, token], old[1], exact[1], factor_for(np.float32))

    def call_window(self, run, case, tokens, weights, kept):
        """Return the results of a window of `TOKENS` tokens, which goes on from state `kept`."""
        window = (
            *many_tokens(*tokens[:2]),
            *(window_of(x, kept, i) for i, x in enumerate(tokens[2:])),
        )
        more = {"kept": np.full(len(tokens[1]), kept, np.int32)}
        return self.call(run, case, window, self.weights_of_token(weights, slice(None)) | more)

    def weights_of_token(self, weights, token):
        """Return the weights of a call for a token of a window, or for all with ``slice(None)``."""
        del token
        return weights


class DeltaStepSuite(StepSuite):
    """The step of a gated delta net; `run` also takes `interleaved` and `eps`."""

    cases = DELTA_CASES
    make, exact, plain = map(staticmethod, (make_delta, delta_in_float64, plain_delta))

    def call(self, run, case, tokens, weights, turn=0):
        tokens, weights = take_rates(case, tokens, weights, turn)
        return run(*tokens, **weights, interleaved=DELTA_CASES[case].interleaved, eps=1e-6)

    def test_rates_of_other_heads_are_found(self, run):
        case = "rates apart"
        step = make_delta(case, np.dtype("float32"))
        self.assert_found(case, *step, self.call(run, case, *step, turn=1))

    @pytest.mark.parametrize("wrong", ["conv_weight", "A_log", "dt_bias", "norm"])
    def test_a_wrong_weight_is_found(self, run, wrong):
        case = "three value heads"
        tokens, weights = make_delta(case, np.dtype("float32"))
        results = self.call(run, case, tokens, spoiled(weights, wrong))
        self.assert_found(case, tokens, weights, results)


@dataclasses.dataclass(frozen=True)
class KimiCase:
    """Sizes of a Kimi delta attention, the position of each row, and an option."""

    sizes: tuple[int, int, int]  # heads, and the widths of a key and of a value
    taps: int = 4
    positions: tuple[int, ...] = (5,)
    apart: bool = False  # whether rates are an operand of their own
    lower_bound: float | None = None


KIMI_CASES = {
    "full widths": KimiCase((2, 128, 128), positions=(0, PADDING, 9)),
    "full widths, rates apart, bounded": KimiCase((1, 128, 128), 4, (0, 9), True, -5.0),
    "three heads": KimiCase((3, 16, 8), 3, (7, PADDING + 1)),
    "lanes that do not divide the threads": KimiCase((2, 128, 96)),
    "wide keys": KimiCase((1, 128, 4), lower_bound=-5.0),
    "no past": KimiCase((2, 4, 4), 1),
    "a long past, rates apart": KimiCase((2, 20, 12), 7, (3, PADDING), True),
}


@functools.cache
def make_kimi(name, dtype):
    """Return the tokens of a case, with decays and gates among its weights."""
    case = KIMI_CASES[name]
    (n, d, e), b, rng = case.sizes, len(case.positions), np.random.default_rng(len(name))
    channels = n * (2 * d + e)
    projected, rates, decays, gates = (
        np.asarray(rng.normal(size=(b, 1, width)), dtype) for width in (channels, n, n * d, n * e)
    )
    if not case.apart:
        projected, rates = np.concatenate([projected, rates], axis=-1), None
    positions = np.asarray(case.positions, np.int32)[:, None]
    inputs = np.asarray(rng.normal(size=(b, case.taps - 1, channels)), dtype)
    state = np.float32(rng.normal(size=(b, n, d, e)))
    weights = {
        "decays": decays,
        "gates": gates,
        "rates": rates,
        "conv_weight": np.float32(rng.normal(size=(channels, case.taps))),
        "A_log": np.float32(rng.normal(size=n)),
        "dt_bias": np.float32(rng.normal(size=n * d)),
        "norm": np.float32(1 + rng.normal(size=e) / 4),
    }
    return (projected, positions, inputs, state), weights


def kimi_in_float64(name, tokens, weights, eps=1e-5):
    """Compute a step by its equations, row by row and head by head."""
    case, (projected, positions, inputs, state) = KIMI_CASES[name], tokens
    n, d, e = case.sizes
    projected, inputs, state = (np.array(x, np.float64) for x in (projected, inputs, state))
    weights = {key: None if x is None else np.asarray(x, np.float64) for key, x in weights.items()}
    rates = weights["rates"]
    rates = projected[..., -n:] if rates is None else rates
    y = np.zeros((len(state), 1, n * e))
    for row, numbers in enumerate(projected[:, 0, : n * (2 * d + e)]):
        if positions[row, 0] >= PADDING:
            continue
        window = np.concatenate([inputs[row], numbers[None]])
        mixed = _silu((window.T * weights["conv_weight"]).sum(1))
        inputs[row] = window[1:]
        for head in range(n):
            keys, own = slice(head * d, (head + 1) * d), slice(head * e, (head + 1) * e)
            q, k, v = mixed[keys], mixed[n * d :][keys], mixed[2 * n * d :][own]
            q, k = (x / np.sqrt((x * x).sum() + 1e-6) for x in (q, k))
            rate = np.exp(weights["A_log"][head])
            x = weights["decays"][row, 0, keys] + weights["dt_bias"][keys]
            g = -rate * np.logaddexp(x, 0)
            if case.lower_bound is not None:
                g = case.lower_bound / (1 + np.exp(-rate * x))
            decayed = np.exp(g)[:, None] * state[row, head]
            correction = (v - k @ decayed) / (1 + np.exp(-rates[row, 0, head]))
            state[row, head] = decayed + np.outer(k, correction)
            result = q @ state[row, head] / np.sqrt(d)
            result *= weights["norm"] / np.sqrt((result * result).mean() + eps)
            y[row, 0, own] = result / (1 + np.exp(-weights["gates"][row, 0, own]))
    return y, inputs, state


def plain_kimi(name, tokens, weights):
    """Return the results of plain XLA."""
    return jitted_kimi(*tokens, **weights, lower_bound=KIMI_CASES[name].lower_bound, eps=1e-5)


class KimiStepSuite(StepSuite):
    """The step of Kimi delta attention; `run` also takes `lower_bound` and `eps`."""

    cases = KIMI_CASES
    make, exact, plain = map(staticmethod, (make_kimi, kimi_in_float64, plain_kimi))

    def weights_of_token(self, weights, token):
        apart = {name: weights[name] for name in ("decays", "gates", "rates")}
        each = {
            name: x if x is None else np.concatenate([x * (1 + i) for i in range(TOKENS)], axis=1)
            for name, x in apart.items()
        }
        if not isinstance(token, slice):
            token = slice(token, token + 1)
        return weights | {name: x if x is None else x[:, token] for name, x in each.items()}

    def call(self, run, case, tokens, weights):
        projected, positions, inputs, state = tokens
        options = {"lower_bound": KIMI_CASES[case].lower_bound, "eps": 1e-5}
        tokens = {"positions": positions, "inputs": inputs, "state": state}
        return run(projected, **tokens, **weights, **options)

    @pytest.mark.parametrize("case", ["full widths, rates apart, bounded", "three heads"])
    @pytest.mark.parametrize(
        "wrong", ["conv_weight", "A_log", "dt_bias", "norm", "decays", "gates", "projected"]
    )
    def test_a_wrong_operand_is_found(self, run, case, wrong):
        (projected, positions, *rest), weights = make_kimi(case, np.dtype("float32"))
        positions = np.full_like(positions, 5)  # the last row is no padding
        other, own = (1.01, weights) if wrong == "projected" else (1.0, spoiled(weights, wrong))
        results = self.call(run, case, (np.float32(other) * projected, positions, *rest), own)
        tokens = projected, positions, *rest
        self.assert_found(case, tokens, weights, results, match=r"over 4\.0 x|Mismatched")


@dataclasses.dataclass(frozen=True)
class MambaCase:
    """Sizes of a Mamba-2 mixer, the position of each row, and options of `ops.mamba2_step`."""

    sizes: tuple[int, int, int, int]  # heads, groups, the width of a head, the size of a state
    taps: int = 4
    positions: tuple[int, ...] = (5,)
    bias: bool = True
    activation: str = "silu_no_mul"
    step_limits: tuple[float, float] = (0.0, float("inf"))

    @property
    def options(self):
        """Keyword arguments of a call."""
        activation = find_activation(self.activation)
        return {"activation": activation, "step_limits": self.step_limits, "eps": 1e-5}


MAMBA_CASES = {
    "usual sizes": MambaCase((4, 2, 64, 128), positions=(0, PADDING, 9)),
    "usual sizes, a long past": MambaCase((2, 1, 64, 128), 7, (3, PADDING)),
    "one group": MambaCase((3, 1, 64, 128), bias=False),
    "small": MambaCase((6, 3, 16, 8), 3, (7, PADDING + 1), step_limits=(0.5, 1.0)),
    "largest": MambaCase((2, 1, 128, 128), 2),
    "lanes that do not divide the threads": MambaCase((2, 2, 60, 96)),
    "no past": MambaCase((4, 4, 4, 4), 1, activation="relu2"),
    "a long past": MambaCase((2, 1, 16, 16), 7, (3, PADDING), bias=False),
}


@functools.cache
def make_mamba(name, dtype):
    """Return the tokens and the weights of a case."""
    case = MAMBA_CASES[name]
    (heads, groups, p, n), b = case.sizes, len(case.positions)
    rng, inner = np.random.default_rng(len(name)), heads * p
    channels = inner + 2 * groups * n
    projected = np.asarray(rng.normal(size=(b, 1, inner + channels + heads)), dtype)
    positions = np.asarray(case.positions, np.int32)[:, None]
    inputs = np.asarray(rng.normal(size=(b, case.taps - 1, channels)), dtype)
    state = np.float32(rng.normal(size=(b, heads, p, n)))
    weights = {
        "conv_weight": np.float32(rng.normal(size=(channels, case.taps))),
        "conv_bias": np.float32(rng.normal(size=channels)) if case.bias else None,
        **{name: np.float32(rng.normal(size=heads)) for name in ("A_log", "dt_bias", "D")},
        "norm": np.float32(1 + rng.normal(size=inner) / 4),
    }
    return (projected, positions, inputs, state), weights


def mamba_in_float64(name, tokens, weights):
    """Compute a step by its equations, row by row and head by head."""
    case, (projected, positions, inputs, state) = MAMBA_CASES[name], tokens
    heads, groups, p, n = case.sizes
    projected, inputs, state = (np.array(x, np.float64) for x in (projected, inputs, state))
    weights = {name: None if x is None else np.float64(x) for name, x in weights.items()}
    inner = heads * p
    y = np.zeros((len(state), 1, inner))
    act = {"silu_no_mul": _silu, "relu2": lambda x: np.maximum(x, 0) ** 2}[case.activation]
    for row, numbers in enumerate(projected[:, 0]):
        if positions[row, 0] >= PADDING:
            continue
        z, xbc, steps = np.split(numbers, [inner, len(numbers) - heads])
        window = np.concatenate([inputs[row], xbc[None]])
        inputs[row] = window[1:]
        mixed = (window.T * weights["conv_weight"]).sum(1)
        mixed = act(mixed if weights["conv_bias"] is None else mixed + weights["conv_bias"])
        for head in range(heads):
            own = slice(head * p, (head + 1) * p)
            at = inner + head // (heads // groups) * n
            b, c = mixed[at : at + n], mixed[at + groups * n : at + groups * n + n]
            dt = np.logaddexp(steps[head] + weights["dt_bias"][head], 0)
            dt = np.clip(dt, *case.step_limits)
            state[row, head] *= np.exp(-dt * np.exp(weights["A_log"][head]))
            state[row, head] += dt * np.outer(mixed[own], b)
            y[row, 0, own] = state[row, head] @ c + weights["D"][head] * mixed[own]
        y[row, 0] *= _silu(z)
        grouped = y[row, 0].reshape(groups, -1)
        scale = np.sqrt((grouped * grouped).mean(1, keepdims=True) + 1e-5)
        y[row, 0] = (grouped / scale).ravel() * weights["norm"]
    return y, inputs, state


def plain_mamba(name, tokens, weights):
    """Return the results of plain XLA."""
    return jitted_mamba(*tokens, **weights, **MAMBA_CASES[name].options)


class Mamba2StepSuite(StepSuite):
    """The step of Mamba-2; `run` also takes the options of a case."""

    cases = MAMBA_CASES
    make, exact, plain = map(staticmethod, (make_mamba, mamba_in_float64, plain_mamba))

    def call(self, run, case, tokens, weights):
        return run(*tokens, **weights, **MAMBA_CASES[case].options)

    @pytest.mark.parametrize("wrong", ["conv_weight", "conv_bias", "A_log", "dt_bias", "D", "norm"])
    def test_a_wrong_weight_is_found(self, run, wrong):
        case = "usual sizes"
        tokens, weights = make_mamba(case, np.dtype("float32"))
        results = self.call(run, case, tokens, spoiled(weights, wrong))
        self.assert_found(case, tokens, weights, results)
