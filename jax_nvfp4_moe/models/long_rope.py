"""LongRoPE: one rotation for texts within the original context, and another one for longer texts.

Source: arXiv:2402.13753; `modeling_rope_utils` of transformers for the details.
"""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from jax_nvfp4_moe.checkpoint.errors import quoted
from jax_nvfp4_moe.models.config import Fields, is_finite
from jax_nvfp4_moe.numerics.rope import Rope

LONG_ROPE = "longrope"


def read_long_rope(
    fields: Fields, given: Mapping[str, Any], plain: Rope, original: int
) -> tuple[Rope, Rope]:
    """Read the rotation for texts of up to `original` tokens, and that for longer ones.

    Each frequency is divided by a factor of its own. Cosines and sines are multiplied by
    ``attention_factor``, or by ``sqrt(1 + log(factor) / log(original))`` if the config has none.

    Args:
      fields: the fields of ``config.json``, which receive the problems.
      given: the fields of the rotary embedding.
      plain: the rotation without these factors.
      original: the number of positions of the original context.
    """
    rope = Fields(given)
    positions = fields.size("max_position_embeddings")
    factor = rope.number("factor", positions / original)
    rope.require(factor > 0, f"rope factor: expected a positive number, got {factor}")
    default = 1.0
    if factor > 1:
        rope.relate(
            original > 1, f"original_max_position_embeddings: expected at least 2, got {original}"
        )
        default = math.sqrt(1 + math.log(factor) / math.log(max(original, 2)))
    scale = rope.number("attention_factor", default)
    found = [
        _divide(rope, given.get(name), name, plain.frequencies)
        for name in ("short_factor", "long_factor")
    ]
    fields.problems += rope.problems
    short, long = (dataclasses.replace(plain, frequencies=one, scale=scale) for one in found)
    return short, long


def _divide(rope, factors, name, frequencies):
    """Return the frequencies, each divided by its factor in the list `factors`."""
    count = len(frequencies)
    known = isinstance(factors, list) and len(factors) == count and all(map(_is_factor, factors))
    rope.relate(
        known, f"{name}: expected {count} positive numbers, one a frequency; got {quoted(factors)}"
    )
    if not known:
        return frequencies
    divided = np.asarray(frequencies, np.float32) / np.asarray(factors, np.float32)
    return tuple(divided.tolist())


def _is_factor(value: Any) -> bool:
    known = type(value) in (int, float) and is_finite(value)
    return known and 1e-6 <= value <= 1e6
