"""MXFP4 as numbers, and its cast to NVFP4 without loss; in numpy, for the reader of files.

An MXFP4 weight is ``code * 2 ** (scale - 127)``, with one E8M0 byte ``scale`` for each 32
consecutive elements of a row. The codes are those of NVFP4, two in a byte, the even element low.

NVFP4 multiplies an E4M3 block scale by a global scale. E4M3 holds the powers of two from
``2 ** -9`` to ``2 ** 8``, the three lowest of them as subnormals. So a matrix whose exponents lie
within 18 consecutive powers of two keeps its codes, and its global scale is ``2 ** (highest - 8)``.

A block whose codes leave room allows more: codes of at most 3 can double while the scale halves,
and codes without 0.5 and 1.5 can halve while the scale doubles. `needed_range` counts that room. No
other choice of codes and E4M3 scales reaches further with a global scale that is a power of two.
"""

from collections.abc import Sequence
from typing import NamedTuple

import ml_dtypes
import numpy as np

from jax_nvfp4_moe.numerics.nvfp4 import BLOCK as NVFP4_BLOCK
from jax_nvfp4_moe.numerics.nvfp4 import CODE_VALUES

BLOCK = 32
NAN = 255  # the E8M0 byte that is no number
SPAN = 18  # powers of two that E4M3 holds
_BIAS = 127
_LOWEST, _HIGHEST = -9, 8  # exponents of those powers
_LOWEST_GLOBAL = -126  # of a float32 that is not subnormal, which XLA takes for zero
_REPEATS = BLOCK // NVFP4_BLOCK

# E4M3 bytes of 2 ** -9 to 2 ** 8.
_POWERS = np.array([2.0**power for power in range(_LOWEST, _HIGHEST + 1)]).astype(
    ml_dtypes.float8_e4m3fn
)
_MOST_STEPS = 3  # how often 0.5 doubles, and 4 halves, within the codes


def _count_steps(factor: float) -> np.ndarray:
    """Return how often each code can be multiplied by `factor` and stay a code; many for zero."""
    values = np.abs(CODE_VALUES)
    return np.array(
        [
            sum(bool(np.isin(value * factor**step, values)) for step in range(1, _MOST_STEPS + 1))
            if value
            else _MOST_STEPS
            for value in values
        ],
        np.int16,
    )


_DOUBLINGS, _HALVINGS = _count_steps(2.0), _count_steps(0.5)


def _find_shifted_codes() -> np.ndarray:
    """Return ``[steps + 3, code] -> code`` for ``value * 2 ** steps``; zero where there is none."""
    table = np.zeros((2 * _MOST_STEPS + 1, 16), np.uint8)
    magnitudes = np.abs(CODE_VALUES[:8])
    for row, steps in enumerate(range(-_MOST_STEPS, _MOST_STEPS + 1)):
        for code in range(16):
            found = np.flatnonzero(magnitudes == abs(CODE_VALUES[code]) * 2.0**steps)
            table[row, code] = (found[0] if found.size else 0) | (code & 8)
    return table


_SHIFTED_CODES = _find_shifted_codes()


class ExponentRange(NamedTuple):
    """The exponents that block scales of one global scale must cover, both inclusive."""

    lowest: int
    highest: int

    @property
    def fits(self) -> bool:
        """Whether one power of two as global scale serves them all."""
        return self.highest - self.lowest < SPAN


def join_ranges(ranges: Sequence[ExponentRange | None]) -> ExponentRange | None:
    """Return the range that covers all of `ranges`; None stands for matrices of zeros."""
    found = [one for one in ranges if one is not None]
    if not found:
        return None
    return ExponentRange(min(one.lowest for one in found), max(one.highest for one in found))


def dequantize(packed: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """Return the float32 values ``code * 2 ** (scale - 127)``; NaN where a scale is NaN.

    Args:
      packed: uint8 ``[..., k/2]``.
      scales: uint8 ``[..., k/32]``.

    Source: OCP Microscaling Formats v1.0, sections 5.3.3 and 5.4.1.
    """
    codes = np.stack([packed & 15, packed >> 4], axis=-1).reshape(*packed.shape[:-1], -1)
    with np.errstate(over="ignore"):
        factors = np.ldexp(np.float32(1), find_exponents(scales).astype(np.int32))
        factors = np.where(scales == NAN, np.float32(np.nan), factors)
        return CODE_VALUES[codes] * np.repeat(factors, BLOCK, axis=-1)


def find_exponents(scales: np.ndarray) -> np.ndarray:
    """Return the int16 exponents of E8M0 bytes; NaN is not looked for."""
    return scales.astype(np.int16) - np.int16(_BIAS)


def stored_range(scales: np.ndarray) -> ExponentRange:
    """Return the lowest and the highest exponent of E8M0 bytes, of which there is at least one."""
    return ExponentRange(int(scales.min()) - _BIAS, int(scales.max()) - _BIAS)


def needed_range(packed: np.ndarray, scales: np.ndarray) -> ExponentRange | None:
    """Return the exponents that the blocks need, as narrow as their codes allow.

    Blocks of zeros need none. Where codes can double, the highest exponent that they need is lower
    than the stored one; where they can halve, the lowest is higher.

    Args:
      packed: uint8 ``[..., k/2]``.
      scales: uint8 ``[..., k/32]``.

    Returns:
      None where all codes are zero.
    """
    exponents = np.repeat(find_exponents(scales), _REPEATS, axis=-1)
    blocks = packed.reshape(*exponents.shape, NVFP4_BLOCK // 2)
    low, high = blocks & 15, blocks >> 4
    used = ((low & 7) | (high & 7)).any(axis=-1)
    if not used.any():
        return None
    halvings, doublings = (
        np.minimum(table[low], table[high]).min(axis=-1) for table in (_HALVINGS, _DOUBLINGS)
    )
    return ExponentRange(
        int((exponents + halvings)[used].min()), int((exponents - doublings)[used].max())
    )


def find_problem(scales: np.ndarray, needed: ExponentRange | None) -> str | None:
    """Say why a matrix has no cast without loss, None where it has one.

    Args:
      scales: uint8 of the whole matrix.
      needed: of the matrix, see `needed_range`.
    """
    if (scales == NAN).any():
        return f"{np.count_nonzero(scales == NAN)} of {scales.size} MXFP4 scales are NaN"
    if needed is None or needed.fits:
        return None
    return (
        f"the nonzero blocks need scales from 2^{needed.lowest} to 2^{needed.highest}, but NVFP4 "
        f"holds {SPAN} consecutive powers of two in a matrix. A cast from MXFP4 would change "
        "values: dequantize the checkpoint to bfloat16 and quantize it instead"
    )


def find_global_exponent(needed: ExponentRange | None) -> int:
    """Return the exponent of the global scale that serves `needed`, which fits; 0 for None."""
    return 0 if needed is None else max(needed.highest - _HIGHEST, _LOWEST_GLOBAL)


def cast_scales(scales: np.ndarray, global_exponent: np.ndarray | int) -> np.ndarray:
    """Return the block scales of NVFP4 for those of MXFP4.

    Args:
      scales: uint8 ``[..., k/32]``.
      global_exponent: of the global scale, broadcast to `scales`.

    Returns:
      float8_e4m3fn ``[..., k/16]``; where no power of two fits, the nearest that E4M3 holds, which
      is right where `cast_codes` has shifted the codes.
    """
    powers = np.clip(find_exponents(scales) - global_exponent, _LOWEST, _HIGHEST) - _LOWEST
    return np.repeat(_POWERS[powers], _REPEATS, axis=-1)


def cast_codes(
    packed: np.ndarray, scales: np.ndarray, global_exponent: np.ndarray | int
) -> np.ndarray:
    """Return the codes of NVFP4: the same, but for blocks whose power of two E4M3 does not hold.

    Args:
      packed: uint8 ``[..., k/2]``; returned as it is where all blocks keep their codes.
      scales, global_exponent: as for `cast_scales`.
    """
    powers = find_exponents(scales) - global_exponent
    steps = powers - np.clip(powers, _LOWEST, _HIGHEST)
    if not steps.any():
        return packed
    # More steps than the table has are those of zeros, which all rows leave as they are.
    rows = np.clip(steps, -_MOST_STEPS, _MOST_STEPS)[..., None] + _MOST_STEPS
    blocks = packed.reshape(*scales.shape, BLOCK // 2)
    cast = _SHIFTED_CODES[rows, blocks & 15] | _SHIFTED_CODES[rows, blocks >> 4] << 4
    return cast.reshape(packed.shape)
