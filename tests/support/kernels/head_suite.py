"""Tests that every kernel of `prepare_heads` must pass: accuracy, and nothing else is written."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.kernels.cache_suite import CacheCall, CacheOp, CacheSuite, normalize, rotate

from jax_nvfp4_moe import ops
from jax_nvfp4_moe.numerics.rope import Rope
from jax_nvfp4_moe.ops.heads import HeadOptions


@dataclasses.dataclass(frozen=True)
class Case:
    """One call: sizes, channels that rotate, the first position of each row, and the norms."""

    t: int
    heads: tuple[int, int]  # query heads and key heads
    width: int
    rotated: int
    starts: tuple[int, ...]
    room: int
    norms: bool = True
    rotates_first: bool = False
    scale: float = 1.0
    gated: bool = False


CASES = {
    "decoding": Case(1, (8, 2), 128, 128, (30, 0, 63), 64),
    "prefill": Case(13, (4, 1), 64, 64, (0, 7), 32),
    "past 2^17": Case(3, (2, 1), 128, 128, (2**18 - 3,), 8, norms=False),
    "a part rotates": Case(2, (3, 1), 96, 36, (5,), 9, scale=1.3),
    "normalized last": Case(2, (2, 2), 128, 128, (600,), 700, rotates_first=True),
    "no rotation": Case(1, (5, 5), 64, 0, (1, 2), 3),
    "neither": Case(1, (1, 1), 8, 0, (0,), 1, norms=False),
    "widest": Case(2, (2, 1), 256, 64, (100,), 128),
    "all of the widest": Case(1, (2, 1), 256, 256, (100,), 128, rotates_first=True),
    "smallest": Case(1, (1, 1), 4, 4, (3,), 4),
    "the end of the cache": Case(4, (2, 1), 64, 64, (6, 9), 8),
    "no rows": Case(1, (2, 1), 64, 64, (), 8),
    "gates": Case(3, (3, 2), 64, 16, (5, 0), 20, gated=True),
    "gates of the widest": Case(1, (16, 2), 256, 64, (40,), 64, gated=True),
    # More heads than take a warp each, in groups of 8 or 4 that do not come out even.
    "many heads": Case(100, (17, 2), 64, 64, (5, 0), 90),
    "many heads last": Case(230, (9, 5), 128, 32, (0,), 240, rotates_first=True),
    "many heads with gates": Case(380, (5, 3), 256, 64, (0,), 380, gated=True),
    "gates and nothing else": Case(1, (1, 1), 8, 0, (0,), 1, norms=False, gated=True),
}
PAIRS = ("bfloat16-bfloat16", "bfloat16-float32", "float16-float16", "float16-float32")
NAMES = ("q", "keys", "values")


@dataclasses.dataclass(frozen=True)
class Call(CacheCall):
    """The operands of `ops.heads.meaning`, as numpy arrays, and its options."""

    by_row = ("qkv", "positions", "keys", "values")

    qkv: np.ndarray
    positions: np.ndarray
    keys: np.ndarray
    values: np.ndarray
    weights: tuple[np.ndarray, np.ndarray] | None
    options: HeadOptions
    scales: tuple[np.ndarray, np.ndarray] | None = None  # of keys and values in FP8

    @property
    def operands(self):
        return self.qkv, self.positions, self.keys, self.values, self.weights, self.scales


@functools.cache
def make(name, pair):
    case, (dtype, weight_dtype) = CASES[name], (jnp.dtype(part) for part in pair.split("-"))
    rng = np.random.default_rng(len(name))
    b, (n, m), d = len(case.starts), case.heads, case.width

    def normal(*shape):
        return np.asarray(rng.normal(0, 1.5, shape), dtype)

    starts = np.asarray(case.starts, np.int32).reshape(-1, 1)
    weights = tuple(np.asarray(rng.normal(1, 0.3, d), weight_dtype) for _ in range(2))
    half = case.rotated // 2
    frequencies = tuple(float(1e4 ** (-i / half)) for i in range(half))
    return Call(
        normal(b, case.t, ((2 if case.gated else 1) * n + 2 * m) * d),
        starts + np.arange(case.t, dtype=np.int32),
        normal(b, m, case.room, d),
        normal(b, m, case.room, d),
        weights if case.norms else None,
        HeadOptions(
            Rope(frequencies, case.scale) if half else None, 1e-6, case.rotates_first, case.gated
        ),
    )


def in_float64(call: Call):
    """Return queries, keys and values in float64."""
    (b, t, _), (_, m, room, d) = call.qkv.shape, call.keys.shape
    heads = call.qkv.astype(np.float64).reshape(b, t, call.qkv.shape[2] // d, d)
    n = heads.shape[2] - 2 * m
    if call.options.gated:
        n //= 2
        heads = np.concatenate([heads[:, :, : 2 * n : 2], heads[:, :, 2 * n :]], axis=2)

    def scale(heads):
        q_weight, k_weight = (np.float64(weight) for weight in call.weights)
        weight = np.where(np.arange(n + 2 * m)[:, None] < n, q_weight, k_weight)
        return normalize(heads, weight, call.options.eps)

    values, qk = heads[:, :, n + m :], heads
    if call.weights is not None and not call.options.rotates_first:
        qk = scale(qk)
    if call.options.rope is not None:
        qk = rotate(qk, call.positions, call.options.rope)
    if call.weights is not None and call.options.rotates_first:
        qk = scale(qk)
    entries = [np.float64(call.keys), np.float64(call.values)]
    for row, token in np.argwhere(call.positions < room):
        at = call.positions[row, token]
        entries[0][row, :, at] = qk[row, token, n : n + m]
        entries[1][row, :, at] = values[row, token]
    return qk[:, :, :n], *entries


def exchange_gates(call: Call):
    """Return projected tokens in which queries and their gates have changed places."""
    heads = call.qkv.reshape(*call.qkv.shape[:2], -1, 2, call.keys.shape[3])
    gated = heads.shape[2] - call.keys.shape[1]
    return np.concatenate([heads[:, :, :gated, ::-1], heads[:, :, gated:]], axis=2).reshape(
        call.qkv.shape
    )


def plain(call: Call):
    """Return the results of plain XLA."""
    return jitted(call, backend="reference")


def prepare(operands, options, **given):
    """Call the op with the operands and the options of a `Call`."""
    *arrays, weights, scales = operands
    q_weight, k_weight = weights or (None, None)
    k_scale, v_scale = scales or (None, None)
    return ops.prepare_heads(
        *arrays,
        q_weight=q_weight,
        k_weight=k_weight,
        eps=options.eps,
        rope=options.rope,
        rotates_first=options.rotates_first,
        gated=options.gated,
        k_scale=k_scale,
        v_scale=v_scale,
        multiply_by_reciprocal=options.multiply_by_reciprocal,
        **given,
    )


def jitted(call: Call, **given):
    """Return the results of the op under `jax.jit`, as numpy arrays."""
    return tuple(map(np.asarray, _jitted(call.operands, call.options, tuple(given.items()))))


@functools.partial(jax.jit, static_argnums=(1, 2))
def _jitted(operands, options, given):
    return prepare(operands, options, **dict(given))


HEADS = CacheOp(make, in_float64, plain, NAMES, "decoding", "prefill")
assert_accurate = HEADS.assert_accurate


class HeadSuite(CacheSuite):
    """Subclasses have the axes `case` and `pair`, and a fixture `run(call)`."""

    op = HEADS

    @pytest.mark.parametrize("fault", ["position", "norm", "order", "scale", "gate"])
    def test_bound_catches_a_fault(self, run, pair, fault):
        name = {"position": "past 2^17", "gate": "gates"}.get(fault, "a part rotates")
        call = make(name, pair)
        rope, other = call.options.rope, functools.partial(dataclasses.replace, call.options)
        wrong = {
            "position": {"positions": call.positions - 1},
            "norm": {"weights": call.weights and call.weights[::-1]},
            "gate": {"qkv": exchange_gates(call) if fault == "gate" else call.qkv},
            "order": {"options": other(rotates_first=True)},
            "scale": {"options": other(rope=dataclasses.replace(rope, scale=1.32))},
        }[fault]
        self.assert_found(run, call, **wrong)
