"""Named algorithms that round weights to NVFP4; plain `jax.numpy`.

All algorithms write the same format: ``w = code * (block_scale * global_scale)``, with the code
nearest to ``w / scale``. They differ in the E4M3 scale that they choose for each block of 16, and
so in the error that they minimize. A reader of the weights does not need to know the algorithm.
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

# The bytes of 2^-9 and 448. Positive E4M3 values have the same order as their bytes.
_SMALLEST, _LARGEST = 1, 126
_ONE = 56  # the byte of 1.0, the scale of a block of zeros
# `search` tries this many bytes below and above the one that "max" chooses.
_BELOW, _ABOVE = 14, 7
# A candidate replaces the best scale so far only if its error is smaller by more than rounding
# noise. Each residual has a rounding error of 2^-22 of the block's largest magnitude, and their sum
# is rounded too.
_NOISE, _LESS = 2.0**-44, 1 - 2.0**-20
# The smallest normal float32; smaller numbers are subnormal.
_SMALLEST_NORMAL = 2.0**-126

Blocks = Float[Array, "16 n b"]
Bytes = UInt8[Array, "n b"]


@dataclasses.dataclass(frozen=True)
class Algorithm:
    """An algorithm that rounds weights to NVFP4.

    Attributes:
      choose: function of blocks ``[16, n, b]``, the global scale g, and importance ``[16, b]`` or
        None. It returns the bytes of the block scales, uint8 ``[n, b]``.
      largest: block scale that "max" gives to the block with the largest magnitude of a matrix. The
        default global scale follows from it.
      needs_importance: whether the algorithm weights errors by the mean square of the inputs.
      meaning: one sentence that describes the algorithm.
    """

    choose: Callable[[Blocks, Array, Array | None], Bytes]
    largest: float
    needs_importance: bool
    meaning: str

    def global_scale(self, largest: Float[Array, "..."]) -> Float[Array, "..."]:
        """Return the global scale ``largest / (6 * self.largest)`` for matrices with that amax.

        Args:
          largest: float32, the largest magnitude of each matrix.

        Returns:
          float32 of the same shape.
        """
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

    Each block gets the scale ``s = e4m3 * g`` that the algorithm chooses, and
    ``codes = e2m1(x / s)``, in float32 with ties to even. As in ModelOpt, a block of zeros gets
    scale 1, and no block scale is below 2^-9. Memory holds the results, a copy of `x`, and a few
    float32 copies of one matrix.

    Args:
      x: array ``[..., n, k]`` of any float dtype; k is a multiple of 16. The function does not
        check that it is finite.
      global_scale: g, float32, of a shape that broadcasts to ``x.shape[:-2]``. None, the default,
        takes `Algorithm.global_scale` of the largest magnitude of each matrix.
      algorithm: a key of `ALGORITHMS`; "max" by default.
      importance: float32, the mean square of each of the k inputs, of a shape that broadcasts to
        ``[..., k]``. Only the algorithms that weight errors take it, and they require it; None for
        the others. Only ratios within a block matter, and values below 2^-126 count as 0. A block
        whose 16 values are all 0 is rounded as by "max". The function does not check that the
        values are finite and not negative.

    Returns:
      A tuple ``(packed, block_scale, global_scale)``: uint8 ``[..., n, k/2]``, float8_e4m3fn
      ``[..., n, k/16]`` and float32 ``x.shape[:-2]``.

    Raises:
      ValueError: if k is not a multiple of 16, or the algorithm is unknown.
      ValueError: if `importance` is missing, or is given to an algorithm that does not use it.

    Example:
      >>> import jax
      >>> from jax_nvfp4_moe.numerics.rounding import quantize_weight
      >>> weight = jax.random.normal(jax.random.key(0), (4, 32))
      >>> packed, block_scale, global_scale = quantize_weight(weight, algorithm="search")
      >>> packed.shape, block_scale.shape, global_scale.shape
      ((4, 16), (4, 2), ())

    Source: "max" has the same bits as NVIDIA ModelOpt's export (`NVFP4QTensor`).
    """
    check_blocks("x", x.shape)
    row = find_algorithm(algorithm)
    if row.needs_importance != (importance is not None):
        wanted = "one value for each input" if row.needs_importance else "None"
        came = "None" if importance is None else "an array"
        raise ValueError(f"importance: algorithm {algorithm!r} expects {wanted}, got {came}")
    *lead, n, k = x.shape
    # The loop carries integers, because XLA's CPU compiler widens a whole array of small floats in
    # order to slice it.
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
    """Return the entry of `ALGORITHMS` called `name`.

    Args:
      name: "max", "four_or_six", "search" or "weighted_search".

    Raises:
      ValueError: if there is no such algorithm; the message lists the known ones.

    Example:
      >>> from jax_nvfp4_moe.numerics.rounding import find_algorithm
      >>> find_algorithm("weighted_search").needs_importance
      True
    """
    if name not in ALGORITHMS:
        raise ValueError(f"algorithm: expected one of {', '.join(ALGORITHMS)}; got {name!r}")
    return ALGORITHMS[name]


def _quantize_matrix(row, x, g=None, importance=None):
    """Quantize one matrix ``[n, k]``; return packed codes, bytes of the block scales, and g."""
    n, k = x.shape
    x = x.astype(jnp.float32)
    g = row.global_scale(amax(x, (0, 1))) if g is None else g
    x = jnp.where(x == 0, 0.0, x)  # negative zero gets code 0, not code 8
    # The elements of a block form the first axis, so that a sum over a block is a sum of whole
    # arrays, which vectorizes.
    blocks = jnp.moveaxis(x.reshape(n, k // BLOCK, BLOCK), -1, 0)
    if importance is not None:
        importance = _within_blocks(importance.reshape(-1, BLOCK).T)
    chosen = jnp.where(amax(blocks, 0) == 0, jnp.uint8(_ONE), row.choose(blocks, g, importance))
    s = jnp.repeat(_value(chosen) * g, BLOCK, axis=-1)
    y = jnp.where(s == 0, 0.0, divide(x, s))
    return pack(encode(y)), chosen, g


def _within_blocks(importance):
    """Scale importance ``[16, b]`` so that the largest value of each block is 1.

    Without this, the products with squared errors could vanish. Subnormal importance becomes zero
    here, because some devices and programs flush it to zero and others do not. Ratios of subnormal
    numbers are too coarse to be useful.
    """
    importance = jnp.where(importance < _SMALLEST_NORMAL, 0.0, importance)
    largest = jnp.max(importance, axis=0, keepdims=True)
    return jnp.where(largest > 0, importance / jnp.where(largest > 0, largest, 1.0), 0.0)


def nearest_scale(blocks: Blocks, g, importance=None) -> Bytes:
    """Give the largest magnitude of each block code 6: ``e4m3(amax / (6 g))``.

    The scale is at least 2^-9 and at most 448.

    Args:
      blocks: float32 ``[16, n, b]``.
      g: global scale, a float32 scalar.
      importance: not used.

    Returns:
      Bytes of the E4M3 scales, uint8 ``[n, b]``.
    """
    del importance
    return _scale_for(amax(blocks, 0), E2M1_MAX, g)


def four_or_six(blocks: Blocks, g, importance=None) -> Bytes:
    """Give the largest magnitude of each block code 6 or code 4, whichever has less squared error.

    There is no code between 4 and 6. Values between two thirds of the block's largest value and
    that value are represented better if the largest value gets code 4. Scales are then 1.5 times
    larger, so the global scale should leave room for them: `largest` is 256 instead of 448.

    Args:
      blocks: float32 ``[16, n, b]``.
      g: global scale, a float32 scalar.
      importance: float32 ``[16, b]``, the weights of squared errors; None, the default, for equal
        weights.

    Returns:
      Bytes of the E4M3 scales, uint8 ``[n, b]``.

    Source: Cook, Guo, Xiao, Lin, Han, "Four Over Six: More Accurate NVFP4 Quantization with
    Adaptive Block Scaling", arXiv:2512.02010, 2025.
    """
    largest = amax(blocks, 0)
    six, four = (_scale_for(largest, code, g) for code in (E2M1_MAX, 4.0))
    return _best(blocks, g, importance, six, lambda _: four, 1)


def search(blocks: Blocks, g, importance=None) -> Bytes:
    """Choose the E4M3 scale of least squared error, weighted by `importance` if it is given.

    The search tries the 7 bytes above and the 14 bytes below the byte of s, the scale of "max". If
    these are normal numbers, the best E4M3 scale is among them:

    * For t >= s, a scale of 2 t is no better than t for any element, because the grid of 2 t up to
      7 t is part of the grid of t.
    * A scale below 0.2885 s clips the largest element. That error alone exceeds the largest
      possible error of all 16 elements at s (1 s for 15 of them, 0.4 s for the largest).

    With importance, a scale that clips the largest element by two thirds or more may be best. Such
    a scale may lie below the range, and the search does not try it.

    Args:
      blocks: float32 ``[16, n, b]``.
      g: global scale, a float32 scalar.
      importance: float32 ``[16, b]``, the weights of squared errors; None, the default, for equal
        weights.

    Returns:
      Bytes of the E4M3 scales, uint8 ``[n, b]``.
    """
    first = nearest_scale(blocks, g)
    reach = jnp.int32(_BELOW + _ABOVE + 1)

    def candidate(index):
        moved = first.astype(jnp.int32) + index - _BELOW
        return jnp.clip(moved, _SMALLEST, _LARGEST).astype(jnp.uint8)

    return _best(blocks, g, importance, first, candidate, reach)


def _best(blocks, g, importance, first, candidate, count):
    """Return the scale of least error among `first` and the candidates; a tie keeps the earlier.

    Squared errors are in units of g, so that they neither underflow nor overflow.
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
    """Return ``decode(encode(magnitude))`` by arithmetic, which is faster than a table."""
    halves = jnp.round(2 * magnitude) * 0.5
    wholes = jnp.where(magnitude < 4, jnp.round(magnitude), 2 * jnp.round(0.5 * magnitude))
    return jnp.minimum(jnp.where(magnitude < 2, halves, wholes), E2M1_MAX)


def _scale_for(largest, code, g):
    """Return the byte of ``e4m3(largest / (code * g))``, clamped to 2^-9 and 448."""
    ratio = jnp.where(largest == 0, 1.0, divide(largest, jnp.float32(code) * g))
    scale = jnp.clip(ratio, 2.0**-9, E4M3_MAX).astype(jnp.float8_e4m3fn)
    return lax.bitcast_convert_type(scale, jnp.uint8)


def _scale(chosen):
    """View bytes of block scales as float8_e4m3fn."""
    return lax.bitcast_convert_type(chosen, jnp.float8_e4m3fn)


def _value(chosen):
    """Return the float32 values of bytes of block scales."""
    return decode_scale(_scale(chosen))


ALGORITHMS: Mapping[str, Algorithm] = {
    "max": Algorithm(
        nearest_scale,
        E4M3_MAX,
        False,
        "scales each block so that its largest magnitude gets code 6, as ModelOpt does",
    ),
    "four_or_six": Algorithm(
        four_or_six,
        256.0,
        False,
        "scales each block so that its largest magnitude gets code 6 or code 4, whichever has the "
        "smaller squared error",
    ),
    "search": Algorithm(
        search, 256.0, False, "searches for the block scale with the least squared error"
    ),
    "weighted_search": Algorithm(
        search,
        256.0,
        True,
        "searches for the block scale with the least squared error, where the mean squared input "
        "of its channel weights each error",
    ),
}
