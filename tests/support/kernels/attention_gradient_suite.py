"""Tests that every backward pass of attention must pass: gradients as accurate as plain XLA's."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from support.kernels.attention_suite import find_seen
from support.kernels.axes import axis

from jax_nvfp4_moe.ops.causal_attention.meaning import attend
from jax_nvfp4_moe.ops.positions import PADDING
from jax_nvfp4_moe.testing import assert_as_accurate_as


def differentiate_plainly(operands, positions, cotangent, dtype, scale=None, **options):
    """Return the gradients of ``sum(cotangent * y)`` for queries, keys, values and sinks.

    Attention is plain XLA in `dtype`, with all scores at once and a mask. Each query has its own
    sinks: their gradients are ``[b, n, t, 1]``.
    """
    heads, width, (key_heads, keys) = *operands[0].shape[2:], operands[1].shape[1:3]
    seen = find_seen(positions, keys, **options)[:, None]

    def loss(operands):
        q, k, v, sinks = operands
        k, v = (jnp.repeat(x, heads // key_heads, axis=1) for x in (k, v))
        scores = (scale or width**-0.5) * jnp.einsum("btnd,bnsd->bnts", q, k)
        scores = jnp.where(seen, scores, -jnp.inf)
        if sinks is not None:
            scores = jnp.concatenate([scores, sinks], axis=-1)
        weights = jax.nn.softmax(scores, axis=-1)[..., : k.shape[2]]
        return jnp.sum(jnp.einsum("bnts,bnsd->btnd", weights, v) * cotangent)

    q, k, v, sinks = operands
    if sinks is not None:
        sinks = np.broadcast_to(sinks[None, :, None, None], (len(q), heads, q.shape[1], 1))
    with jax.enable_x64(dtype == np.float64):
        cotangent = np.asarray(cotangent, dtype)
        operands = jax.tree.map(lambda x: np.asarray(x, dtype), (q, k, v, sinks))
        return jax.tree.map(np.array, jax.jit(jax.grad(loss))(operands))


@dataclasses.dataclass(frozen=True)
class Case:
    """One backward pass.

    Attributes:
      t: number of tokens and of keys.
      heads: query heads and key heads.
      widths: widths of keys and of values.
      lengths: tokens of each row before its padding.
      options: options of `ops.attention`.
      together: number of tokens at each position; with 2, they are not at the places of their keys.
    """

    t: int
    heads: tuple[int, int]
    widths: tuple[int, int]
    lengths: tuple[int, ...]
    options: dict = dataclasses.field(default_factory=dict)
    together: int = 1


CASES = {
    "several blocks of queries": Case(640, (4, 1), (128, 128), (640, 640)),
    "whole tiles": Case(256, (2, 2), (64, 64), (256,)),
    "an odd number of tokens": Case(261, (2, 1), (128, 128), (261,)),
    "padding": Case(300, (4, 2), (64, 64), (300, 120, 0)),
    "window": Case(300, (2, 1), (64, 64), (300,), {"window": 100}),
    "window of two": Case(258, (2, 2), (64, 64), (258,), {"window": 2}),
    "window as long as the text": Case(260, (2, 2), (64, 64), (260,), {"window": 260}),
    "widest": Case(259, (2, 1), (256, 256), (259,)),
    "values narrower than keys": Case(270, (2, 2), (192, 128), (270,)),
    "scale": Case(280, (2, 1), (64, 64), (280,), {"scale": 0.3}),
    "pairs of tokens": Case(290, (2, 2), (64, 64), (290, 290), together=2),
    "few tokens": Case(60, (2, 1), (64, 64), (60, 31)),
}
IN_ORDER = [name for name, case in CASES.items() if case.together == 1 and case.t >= 256]


def place(case):
    """Return the positions of a case, int32 ``[b, t]``."""
    at = np.broadcast_to(np.arange(case.t, dtype=np.int32), (len(case.lengths), case.t))
    is_token = at < np.asarray(case.lengths)[:, None]
    return np.where(is_token, at // case.together, PADDING + at).astype(np.int32)


@functools.cache
def make(name, dtype):
    """Return queries, keys, values, positions and a cotangent of the result."""
    case, rng = CASES[name], np.random.default_rng(len(name))
    (n, m), (d, dv), b = case.heads, case.widths, len(case.lengths)
    shapes = (b, case.t, n, d), (b, m, case.t, d), (b, m, case.t, dv), (b, case.t, n, dv)
    q, k, v, cotangent = (np.asarray(rng.normal(size=shape), dtype) for shape in shapes)
    positions = place(case)
    # The result for padding is undefined, so that nothing depends on it.
    cotangent = np.where((positions < PADDING)[..., None, None], cotangent, np.zeros((), dtype))
    return q, k, v, positions, cotangent


@functools.cache
def in_float64(name, dtype):
    """Return the exact gradients to queries, keys and values."""
    q, k, v, positions, cotangent = make(name, dtype)
    options = CASES[name].options
    return differentiate_plainly((q, k, v, None), positions, cotangent, np.float64, **options)[:3]


def pull_back(run, name, dtype, **changes):
    """Return the gradients to queries, keys and values of a case, through ``run``."""
    q, k, v, positions, cotangent = map(jnp.asarray, make(name, dtype))
    options = {**CASES[name].options, **changes}

    @jax.jit
    def gradients(q, k, v, positions, cotangent):
        return jax.vjp(lambda *qkv: run(*qkv, positions, **options), q, k, v)[1](cotangent)

    return gradients(q, k, v, positions, cotangent)


def attend_plainly(q, k, v, positions, scale=None, window=None):
    """Compute attention by its definition in plain JAX."""
    scale = q.shape[3] ** -0.5 if scale is None else scale
    return attend(q, k, v, positions, None, scale=scale, window=window, chunk=None)


def all_as_accurate(gradients, yardsticks, truth):
    """Return whether each of the gradients keeps the rule of `assert_as_accurate_as`."""
    try:
        for got, yardstick, exact in zip(gradients, yardsticks, truth, strict=True):
            assert_as_accurate_as(got, yardstick, exact)
    except AssertionError:
        return False
    return True


class AttentionGradientSuite:
    """Tests of ``run(q, k, v, positions, scale=None, window=None)`` and its backward pass."""

    case = axis(*CASES)
    dtype = axis("bfloat16", "float16")

    def test_gradients(self, run, case, dtype):
        """They have at most twice the error of plain XLA; those of another window have more."""
        dtype = jnp.dtype(dtype)
        truth = in_float64(case, dtype)
        plain, own = (pull_back(f, case, dtype) for f in (attend_plainly, run))
        for got, yardstick, exact in zip(own, plain, truth, strict=True):
            assert got.dtype == dtype
            assert_as_accurate_as(got, yardstick, exact)  # which says what is wrong
        window = CASES[case].options.get("window", 100) // 2
        other = pull_back(run, case, dtype, window=window)
        assert not all_as_accurate(other, plain, truth)
