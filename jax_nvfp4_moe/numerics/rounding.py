"""Named ways to round weights to NVFP4: which E4M3 scale each block of 16 takes; pure jnp.

All of them write the same format, ``w = code * (block_scale * global_scale)`` with codes nearest to
``w / scale``, so a reader cannot tell them apart. What differs is the scale of each block, and what
error it makes small.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, UInt8

from jax_nvfp4_moe.numerics.nvfp4 import (
    BLOCK,
    E2M1_MAX,
    E4M3_MAX,
    amax,
    check_blocks,
    decode_scale,
    divide,
    encode,
    pack,
)

_SMALLEST, _LARGEST = 1, 126  # bytes of 2^-9 and 448: positive E4M3 values are ordered as integers
_ONE = 56  # byte of 1.0, the scale of a block of zeros
_BELOW, _ABOVE = 14, 7  # bytes around that of "max" that can be best, see `search`
# What counts as less: beyond the roundings of residuals (2^-22 of the block's largest magnitude
# each), and of their sum.
_NOISE, _LESS = 2.0**-44, 1 - 2.0**-20
# Of float32: what is below is subnormal.
_SMALLEST_NORMAL = 2.0**-126

Blocks = Float[Array, "16 n b"]
Bytes = UInt8[Array, "n b"]


@dataclasses.dataclass(frozen=True)
class Algorithm:
    """One way to round weights.

    Attributes:
      choose: blocks ``[16, n, b]``, g and importance ``[16, b]`` or None -> bytes of the block
        scales ``[n, b]``.
      largest: block scale that the largest magnitude of a matrix gets under "max".
      needs_importance: whether it weights errors by the inputs that the weights meet.
      meaning: one sentence.
    """

    choose: Callable[[Blocks, Array, Array | None], Bytes]
    largest: float
    needs_importance: bool
    meaning: str

    def global_scale(self, largest: Float[Array, "..."]) -> Float[Array, "..."]:
        """Return ``largest / (6 * self.largest)``, the global scale of matrices with that amax."""
        return divide(largest, jnp.float32(E2M1_MAX * self.largest))


@functools.partial(jax.jit, static_argnames="algorithm")
def quantize_weight(
    x: Float[Array, "... n k"],
    global_scale: Float[Array, "..."] | None = None,
    *,
    algorithm: str = "max",
    importance: Float[Array, "... k"] | None = None,
) -> tuple[UInt8[Array, "... n half_k"], Array, Float[Array, "..."]]:
    """Quantize weights to NVFP4 by a named algorithm, one matrix after the other.

    ``s = e4m3 * g`` of each block as the algorithm chooses, ``codes = e2m1(x / s)``, in float32,
    ties to even. As in ModelOpt, a block of zeros has scale 1, and no block scale is below 2^-9.

    Args:
      x: any float dtype; last axis a multiple of 16. Not checked: finite.
      global_scale: g, float32, broadcastable to ``x.shape[:-2]``; `Algorithm.global_scale` of the
        largest magnitude of each matrix where not given.
      algorithm: a key of `ALGORITHMS`.
      importance: mean square of each of the k inputs, broadcastable to ``[..., k]`` of each matrix;
        needed by the algorithms that weight errors. Not checked: finite, none negative. Only ratios
        within a block count. Values below 2^-126, the subnormal ones, count as 0. Where all 16 are
        0, the block is rounded as by "max".

    Returns:
      packed uint8 ``[..., n, k/2]``, block_scale float8_e4m3fn ``[..., n, k/16]`` and
      global_scale float32 ``x.shape[:-2]``. Memory: results, a copy of x, some
      float32 copies of one matrix.

    Raises:
      ValueError: the last axis is not a multiple of 16, the algorithm is unknown, or importance is
        missing, or given to an algorithm that takes none.

    Source: "max" is NVIDIA ModelOpt's export to the bit (`NVFP4QTensor`).
    """
    check_blocks("x", x.shape)
    row = find_algorithm(algorithm)
    if row.needs_importance != (importance is not None):
        wanted = "one value for each input" if row.needs_importance else "None"
        raise ValueError(f"importance: algorithm {algorithm!r} expects {wanted}")
    *lead, n, k = x.shape
    # The loop carries integers: XLA's CPU compiler slices small floats by widening all of them.
    bits, kind = f"uint{8 * x.dtype.itemsize}", x.dtype
    operands = {"x": lax.bitcast_convert_type(x, bits).reshape(-1, n, k)}
    if global_scale is not None:
        spread = jnp.broadcast_to(jnp.asarray(global_scale, jnp.float32), lead)
        operands["g"] = spread.reshape(-1)
    if importance is not None:
        spread = jnp.broadcast_to(jnp.asarray(importance, jnp.float32), (*lead, k))
        operands["importance"] = spread.reshape(-1, k)

    def one(operands):
        x = lax.bitcast_convert_type(operands.pop("x"), kind)
        return _quantize_matrix(row, x, **operands)

    packed, chosen, scale = lax.map(one, operands)
    block_scale = _scale(chosen).reshape(*lead, n, k // BLOCK)
    return packed.reshape(*lead, n, k // 2), block_scale, scale.reshape(lead)


def find_algorithm(name: str) -> Algorithm:
    """Return the row of `ALGORITHMS` called `name`.

    Raises:
      ValueError: there is none; lists those that there are.
    """
    if name not in ALGORITHMS:
        raise ValueError(f"algorithm: expected one of {', '.join(ALGORITHMS)}; got {name!r}")
    return ALGORITHMS[name]


def _quantize_matrix(row, x, g=None, importance=None):
    n, k = x.shape
    x = x.astype(jnp.float32)
    g = row.global_scale(amax(x, (0, 1))) if g is None else g
    x = jnp.where(x == 0, 0.0, x)  # -0 gets code 0
    # Blocks along the first axis: sums over them are sums of whole arrays, which vectorize.
    blocks = jnp.moveaxis(x.reshape(n, k // BLOCK, BLOCK), -1, 0)
    if importance is not None:
        importance = _within_blocks(importance.reshape(-1, BLOCK).T)
    chosen = jnp.where(amax(blocks, 0) == 0, jnp.uint8(_ONE), row.choose(blocks, g, importance))
    s = jnp.repeat(_value(chosen) * g, BLOCK, axis=-1)
    y = jnp.where(s == 0, 0.0, divide(x, s))
    return pack(encode(y)), chosen, g


def _within_blocks(importance):
    """Scale importance ``[16, b]`` such that the largest of a block is 1: no square vanishes.

    Subnormal importance becomes zero here, because some devices and programs flush it to zero and
    others do not. Ratios of subnormal numbers are too coarse to mean anything.
    """
    importance = jnp.where(importance < _SMALLEST_NORMAL, 0.0, importance)
    largest = jnp.max(importance, axis=0, keepdims=True)
    return jnp.where(largest > 0, importance / jnp.where(largest > 0, largest, 1.0), 0.0)


def nearest_scale(blocks: Blocks, g, importance=None) -> Bytes:
    """Map each block's largest magnitude to code 6: ``e4m3(amax / (6 g))`` within 2^-9 and 448."""
    del importance
    return _scale_for(amax(blocks, 0), E2M1_MAX, g)


def four_or_six(blocks: Blocks, g, importance=None) -> Bytes:
    """Map each block's largest magnitude to code 6 or to code 4, whichever has less squared error.

    There is no code between 4 and 6: a block with many values there fares better where its largest
    is 4. Scales are half as large again then, so "max" should leave room for them (largest 256).

    Source: Cook, Guo, Xiao, Lin, Han, "Four Over Six: More Accurate NVFP4 Quantization with
    Adaptive Block Scaling", arXiv:2512.02010, 2025.
    """
    largest = amax(blocks, 0)
    six, four = (_scale_for(largest, code, g) for code in (E2M1_MAX, 4.0))
    return _best(blocks, g, importance, six, lambda _: four, 1)


def search(blocks: Blocks, g, importance=None) -> Bytes:
    """Take the E4M3 scale of least squared error, weighted by importance where it is given.

    With s of "max", any 2 t with t >= s is no better than t, element by element: its grid up to
    7 t is part of that of t. And t below 0.2885 s loses more on the largest element alone, which it
    clips, than all 16 lose at s (1 s for 15 of them, 0.4 s for the largest). So the 7 bytes above
    that of s and the 14 below hold the best of all E4M3 scales, where those are normal numbers.
    With importance, one that gives the largest element up for lost, and clips it by two thirds or
    more, may lie below them and is not looked at.
    """
    first = nearest_scale(blocks, g)
    reach = jnp.int32(_BELOW + _ABOVE + 1)

    def candidate(index):
        moved = first.astype(jnp.int32) + index - _BELOW
        return jnp.clip(moved, _SMALLEST, _LARGEST).astype(jnp.uint8)

    return _best(blocks, g, importance, first, candidate, reach)


def _best(blocks, g, importance, first, candidate, count):
    """Return of `first` and `count` candidates those of least error; of equal ones the first.

    Squared errors are in units of g, so that they neither vanish nor overflow.
    """
    weights = jnp.ones((BLOCK, 1), jnp.float32) if importance is None else importance
    noise = _NOISE * jnp.square(amax(blocks, 0) / g) * jnp.sum(weights, axis=0)[None, :]

    def error(chosen):
        s8 = _value(chosen)
        inverse = 1.0 / (s8 * g)
        total = jnp.zeros_like(s8)
        for magnitude, weight in zip(jnp.abs(blocks), weights, strict=True):
            y = magnitude * inverse
            total += weight[None, :] * jnp.square(y - _nearest_code(y))
        return total * jnp.square(s8)

    def step(index, best):
        chosen, least = best
        other = candidate(index)
        found = error(other)
        better = found < least * _LESS - noise
        return jnp.where(better, other, chosen), jnp.where(better, found, least)

    return lax.fori_loop(0, count, step, (first, error(first)))[0]


def _nearest_code(magnitude):
    """Return ``decode(encode(magnitude))`` by arithmetic, which is faster than the table."""
    halves = jnp.round(2 * magnitude) * 0.5
    wholes = jnp.where(magnitude < 4, jnp.round(magnitude), 2 * jnp.round(0.5 * magnitude))
    return jnp.minimum(jnp.where(magnitude < 2, halves, wholes), E2M1_MAX)


def _scale_for(largest, code, g):
    """Return the byte of ``e4m3(largest / (code * g))``, within 2^-9 and 448."""
    ratio = jnp.where(largest == 0, 1.0, divide(largest, jnp.float32(code) * g))
    scale = jnp.clip(ratio, 2.0**-9, E4M3_MAX).astype(jnp.float8_e4m3fn)
    return lax.bitcast_convert_type(scale, jnp.uint8)


def _scale(chosen):
    return lax.bitcast_convert_type(chosen, jnp.float8_e4m3fn)


def _value(chosen):
    return decode_scale(_scale(chosen))


ALGORITHMS: Mapping[str, Algorithm] = {
    "max": Algorithm(
        nearest_scale, E4M3_MAX, False, "round to nearest, the block's largest at code 6 (ModelOpt)"
    ),
    "four_or_six": Algorithm(
        four_or_six, 256.0, False, "the block's largest at code 6 or 4, by squared error"
    ),
    "search": Algorithm(search, 256.0, False, "the scale of least squared error"),
    "weighted_search": Algorithm(
        search, 256.0, True, "the scale of least squared error weighted by mean squared inputs"
    ),
}
