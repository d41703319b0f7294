"""Tests that every kernel of `prepare_latents` must pass: accuracy, and nothing else is written."""

import dataclasses
import functools

import jax.numpy as jnp
import numpy as np
import pytest

from jax_nvfp4_moe.numerics.rope import Rope
from jax_nvfp4_moe.ops.latents import LatentOptions, meaning
from jax_nvfp4_moe.ops.positions import PADDING
from jax_nvfp4_moe.testing import assert_as_accurate_as


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
class Call:
    """The operands of `ops.latents.meaning`, as numpy arrays, and its options."""

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
    """Return queries and the cache in float64; angles are rounded to float32."""
    rank, width = len(call.kv_weight), call.cache.shape[3]
    down = np.float64(call.down)
    q, latent, key = np.split(down, [down.shape[2] - width, down.shape[2] - width + rank], axis=2)

    def normalize(x, weight):
        return x / np.sqrt(np.mean(x**2, axis=-1, keepdims=True) + call.options.eps) * weight

    q = q if call.q_weight is None else normalize(q, np.float64(call.q_weight))
    latent = normalize(latent, np.float64(call.kv_weight))
    if (rope := call.options.rope) is not None:
        angles = np.float32(call.positions)[..., None] * np.float32(rope.frequencies)
        cos, sin = (f(np.float64(angles)) * rope.scale for f in (np.cos, np.sin))
        pairs = (
            (key[..., 0::2], key[..., 1::2]) if call.options.interleaved else np.split(key, 2, 2)
        )
        first, second = pairs
        key = np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    cache = np.float64(call.cache)
    for row, token in np.argwhere(call.positions < cache.shape[2]):
        at = call.positions[row, token]
        cache[row, 0, at] = np.concatenate([latent[row, token], key[row, token]])
    return q, cache


def plain(call: Call):
    """Return the results of plain XLA."""
    operands = (None if x is None else jnp.asarray(x) for x in call.operands)
    return meaning(*operands, options=call.options)


def assert_accurate(call, got, expected=None):
    """Assert that queries and the cache have at most twice the error of plain XLA."""
    expected = in_float64(call) if expected is None else expected
    for name, y, yardstick, truth in zip(("q", "cache"), got, plain(call), expected, strict=True):
        assert (y.shape, y.dtype) == (yardstick.shape, yardstick.dtype), name
        assert_as_accurate_as(np.asarray(y), np.asarray(yardstick), truth)


class LatentsSuite:
    """Subclasses have the axes `case` and `pair`, and a fixture `run(call)`."""

    def test_matches_float64(self, run, case, pair):
        call = make(case, pair)
        got = run(call)
        assert_accurate(call, got)
        new = np.zeros(call.cache.shape[:3], bool)
        for row, token in np.argwhere(call.positions < call.cache.shape[2]):
            new[row, :, call.positions[row, token]] = True
        assert call.cache[~new].tobytes() == np.asarray(got[1])[~new].tobytes()

    @pytest.mark.parametrize("fault", ["position", "norm", "pairs", "scale", "weight"])
    def test_bound_catches_a_fault(self, run, pair, fault):
        call = make("eight tokens", pair)
        expected, options = in_float64(call), call.options
        wrong = {
            "position": {"positions": np.where(call.positions > 25, 1, call.positions)},
            "norm": {"q_weight": None},
            "weight": {"kv_weight": call.kv_weight[::-1].copy()},
            "pairs": {"options": dataclasses.replace(options, interleaved=True)},
            "scale": {
                "options": dataclasses.replace(
                    options, rope=dataclasses.replace(options.rope, scale=1.32)
                )
            },
        }[fault]
        got = run(dataclasses.replace(call, **wrong))
        with pytest.raises(AssertionError, match="yardstick"):
            assert_accurate(call, got, expected)

    def test_bits_repeat_and_rows_are_alone(self, run, pair):
        call = make("deepseek", pair)
        first, second = run(call), run(call)
        parts = (array[1:2] for array in call.operands[:3])
        alone = run(Call(*parts, call.q_weight, call.kv_weight, call.options))
        for one, two, few in zip(first, second, alone, strict=True):
            one = np.asarray(one)
            assert one.tobytes() == np.asarray(two).tobytes()
            assert one[1:2].tobytes() == np.asarray(few).tobytes()

    def test_padding_is_finite_and_is_not_written(self, run, pair):
        call = make("eight tokens", pair)
        padded = call.positions.copy()
        padded[:, 5:] = PADDING + np.arange(3)
        got = tuple(map(np.asarray, run(dataclasses.replace(call, positions=padded))))
        assert np.isfinite(got[0].astype(np.float32)).all()
        expected = tuple(map(np.asarray, run(call)))
        assert got[0][:, :5].tobytes() == expected[0][:, :5].tobytes()
        for row, start in enumerate(call.positions[:, 0]):
            end = start + 5
            assert got[1][row, :, :end].tobytes() == expected[1][row, :, :end].tobytes()
            assert got[1][row, :, end:].tobytes() == call.cache[row, :, end:].tobytes()
