"""Embeddings of the last few tokens, which a hash of their ids finds in a table.

For each n from 2 to the largest, some heads look up the last n tokens. Head k has p rows, where p
is a prime of its own, and its row is::

  (id[0] * m[0] xor id[1] * m[1] xor ... ) mod p

``id[j]`` is the j-th token before the current one, and the multipliers ``m`` are constants of up to
63 bits. Tokens before an end-of-text token count as such tokens.

Source: `modeling_qwen4_exp` of transformers; SplitMix64 by Steele et al., 2014.
"""

import dataclasses
import math
from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Int32, UInt32

_MASK = (1 << 64) - 1
_GAMMA = 0x9E3779B97F4A7C15
_SEEDS = 10007  # between those of two layers
# JAX has no integers of 64 bits by default. Products have so many digits, of so many bits each. A
# token id of 20 bits times a digit, and a carry, fit 32 bits.
_DIGITS, _BITS = 6, 12
_STEP = 4  # bits by which a remainder of up to 28 bits can be shifted within 32 bits


@dataclasses.dataclass(frozen=True)
class NGramSizes:
    """The sizes of one table. All fields are static.

    Attributes:
      largest: the largest n.
      heads: the number of heads for each n.
      width: the number of channels of a row.
      primes: the number of rows of each head.
      rows: the number of rows of the table, which may have some more at its end.
      multipliers: ``m``, one for each of the `largest` tokens.
      end: the id of the end-of-text token.
      shards: the number of tensors that hold the table in the file.
    """

    largest: int
    heads: int
    width: int
    primes: tuple[int, ...]
    rows: int
    multipliers: tuple[int, ...]
    end: int
    shards: int


def size_table(
    *,
    vocab: int,
    largest: int,
    heads: int,
    width: int,
    base: int,
    divisor: int,
    seed: int,
    end: int,
    shards: int,
    index: int,
) -> NGramSizes:
    """Return the sizes of a table.

    Args:
      vocab: the number of token ids.
      largest: the largest n.
      heads: the number of heads for each n.
      width: the number of channels of all heads together.
      base: the smallest number of rows of a head.
      divisor: divides the number of rows of the table.
      seed: the seed of the multipliers.
      end: the id of the end-of-text token.
      shards: the number of tensors that hold the table in the file.
      index: the number of layers with a table before this one.
    """
    count = (largest - 1) * heads
    primes = _primes_from(base, (index + 1) * count)[index * count :]
    half = max(1, ((1 << 63) - 1) // max(vocab, 1) // 2)
    start = seed + _SEEDS * index
    multipliers = [
        2 * (_split_mix((start + _GAMMA * (n + 1)) & _MASK) % half) + 1 for n in range(largest)
    ]
    rows = math.ceil(sum(primes) / divisor) * divisor
    return NGramSizes(
        largest, heads, width // count, tuple(primes), rows, tuple(multipliers), end, shards
    )


def _split_mix(value: int) -> int:
    value = (value + _GAMMA) & _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


def _primes_from(base: int, count: int) -> list[int]:
    """Return the first `count` primes of at least `base`."""
    found, value = [], max(base, 2)
    while len(found) < count:
        if value < 4 or (value % 2 and all(value % n for n in range(3, math.isqrt(value) + 1, 2))):
            found.append(value)
        value += 1
    return found


def find_rows(
    sizes: NGramSizes, ids: Int32[Array, "b t"], before: Int32[Array, "b m"]
) -> Int32[Array, "b t k"]:
    """Return the rows of the table that each token reads, one for each head.

    Args:
      sizes: the sizes of the table.
      ids: the tokens.
      before: the last ``largest - 1`` tokens before them, the oldest first. End-of-text tokens
        stand before the first token of a text.
    """
    t = ids.shape[1]
    history = jnp.concatenate([before, ids], axis=1)
    last, mixed, rows, offset = ids, _multiply(ids, sizes.multipliers[0]), [], 0
    heads = iter(sizes.primes)
    open_ = jnp.ones(ids.shape, jnp.bool_)  # whether no text has ended between the two tokens
    for back in range(1, sizes.largest):
        first = sizes.largest - 1 - back
        last = lax.slice_in_dim(history, first, first + t, axis=1)
        open_ = open_ & (last != sizes.end)
        own = jnp.where(open_, last, sizes.end)
        product = _multiply(own, sizes.multipliers[back])
        mixed = [one ^ other for one, other in zip(mixed, product, strict=True)]
        for _ in range(sizes.heads):
            prime = next(heads)
            rows.append(_remainder(mixed, prime).astype(jnp.int32) + offset)
            offset += prime
    return jnp.stack(rows, axis=-1)


def _multiply(ids: Int32[Array, "b t"], factor: int) -> list[UInt32[Array, "b t"]]:
    """Return the digits of ``ids * factor``, the lowest first."""
    wide, carry, digits = ids.astype(jnp.uint32), jnp.zeros(ids.shape, jnp.uint32), []
    for index in range(_DIGITS):
        digit = np.uint32((factor >> (_BITS * index)) & ((1 << _BITS) - 1))
        total = wide * digit + carry
        digits.append(total & np.uint32((1 << _BITS) - 1))
        carry = total >> _BITS
    return digits


def _remainder(digits: Sequence[UInt32[Array, "b t"]], prime: int) -> UInt32[Array, "b t"]:
    """Return the number with these digits modulo `prime`."""
    found = jnp.zeros_like(digits[0])
    for digit in reversed(digits):
        for shift in reversed(range(0, _BITS, _STEP)):
            part = (digit >> shift) & np.uint32((1 << _STEP) - 1)
            found = ((found << _STEP) | part) % np.uint32(prime)
    return found
