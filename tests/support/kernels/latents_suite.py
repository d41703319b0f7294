"""Tests that every kernel of `prepare_latents` must pass: accuracy, and nothing else is written."""

import dataclasses
import functools

import jax.numpy as jnp
import numpy as np
import pytest
from support.kernels.cache_suite import CacheCall, CacheOp, CacheSuite, normalize, rotate

from jax_nvfp4_moe.numerics.rope import Rope
from jax_nvfp4_moe.ops.latents import LatentOptions, meaning


@dataclasses.dataclass(frozen=True)
class Case:
    """One call: sizes, the first position of each row, and how the key rotates."""

    t: int
    widths: tuple[int, int, int]  # latents of queries and of keys, and the rotated key
    starts: tuple[int, ...]
    room: int
    norms: bool = True  # of queries
    rotates: bool = True
    interleaved: bool = True
    scale: float = 1.0


CASES = {
    "deepseek": Case(1, (1536, 512, 64), (30, 0, 63), 64),
    "kimi": Case(1, (1152, 512, 64), (7,), 9, norms=False, rotates=False),
    "eight tokens": Case(8, (96, 64, 16), (3, 20), 32, interleaved=False, scale=1.3),
    "queries of no latent": Case(2, (2052, 32, 8), (600,), 700, norms=False),
    "past 2^17": Case(3, (4, 4, 64), (2**18 - 3,), 8),
    "widest": Case(1, (3000, 4096, 256), (100,), 128, interleaved=False),
    "smallest": Case(1, (4, 4, 4), (3,), 4),
    "the end of the cache": Case(4, (64, 32, 8), (6, 9), 8),
    "no rows": Case(1, (64, 32, 8), (), 8),
}
PAIRS = ("bfloat16-bfloat16", "bfloat16-float32", "float16-float16", "float16-float32")


@dataclasses.dataclass(frozen=True)
class Call(CacheCall):
    """The operands of `ops.latents.meaning`, as numpy arrays, and its options."""

    by_row = ("down", "positions", "cache")

    down: np.ndarray
    positions: np.ndarray
    cache: np.ndarray
    q_weight: np.ndarray | None
    kv_weight: np.ndarray
    options: LatentOptions

    @property
    def operands(self):
        return self.down, self.positions, self.cache, self.q_weight, self.kv_weight


@functools.cache
def make(name, pair):
    case, (dtype, weight_dtype) = CASES[name], (jnp.dtype(part) for part in pair.split("-"))
    rng = np.random.default_rng(len(name))
    b, (r, k, e) = len(case.starts), case.widths
    down, cache = (
        np.asarray(rng.normal(0, 1.5, shape), dtype)
        for shape in ((b, case.t, r + k + e), (b, 1, case.room, k + e))
    )
    starts = np.asarray(case.starts, np.int32).reshape(-1, 1)
    weights = [np.asarray(rng.normal(1, 0.3, width), weight_dtype) for width in (r, k)]
    frequencies = tuple(float(1e4 ** (-i / (e // 2))) for i in range(e // 2))
    rope = Rope(frequencies, case.scale) if case.rotates else None
    return Call(
        down,
        starts + np.arange(case.t, dtype=np.int32),
        cache,
        weights[0] if case.norms else None,
        weights[1],
        LatentOptions(rope, 1e-6, case.interleaved),
    )


def in_float64(call: Call):
    """Return queries and the cache in float64."""
    rank, width, options = len(call.kv_weight), call.cache.shape[3], call.options
    down = np.float64(call.down)
    q, latent, key = np.split(down, [down.shape[2] - width, down.shape[2] - width + rank], axis=2)
    q = q if call.q_weight is None else normalize(q, np.float64(call.q_weight), options.eps)
    latent = normalize(latent, np.float64(call.kv_weight), options.eps)
    if options.rope is not None:
        key = rotate(key, call.positions, options.rope, interleaved=options.interleaved)
    cache = np.float64(call.cache)
    for row, token in np.argwhere(call.positions < cache.shape[2]):
        at = call.positions[row, token]
        cache[row, 0, at] = np.concatenate([latent[row, token], key[row, token]])
    return q, cache


def plain(call: Call):
    """Return the results of plain XLA."""
    operands = (None if x is None else jnp.asarray(x) for x in call.operands)
    return meaning(*operands, options=call.options)


LATENTS = CacheOp(make, in_float64, plain, ("q", "cache"), "deepseek", "eight tokens")


class LatentsSuite(CacheSuite):
    """Subclasses have the axes `case` and `pair`, and a fixture `run(call)`."""

    op = LATENTS

    @pytest.mark.parametrize("fault", ["position", "norm", "pairs", "scale", "weight"])
    def test_bound_catches_a_fault(self, run, pair, fault):
        call = make("eight tokens", pair)
        rope, other = call.options.rope, functools.partial(dataclasses.replace, call.options)
        wrong = {
            "position": {"positions": np.where(call.positions > 25, 1, call.positions)},
            "norm": {"q_weight": None},
            "weight": {"kv_weight": call.kv_weight[::-1].copy()},
            "pairs": {"options": other(interleaved=True)},
            "scale": {"options": other(rope=dataclasses.replace(rope, scale=1.32))},
        }[fault]
        self.assert_found(run, call, **wrong)
