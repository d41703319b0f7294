"""Read what a quantization config declares about the KV cache."""

from collections.abc import Mapping
from typing import Any

from jax_nvfp4_moe.checkpoint.errors import CheckpointError, quoted
from jax_nvfp4_moe.checkpoint.formats.rules import KVCache

FP8 = "FP8"
NVFP4 = "NVFP4"
# Names of algorithms in lower case. Others are not supported.
_NONE = frozenset({"", "none", "null", "auto", "bfloat16", "bf16", "float16", "fp16", "half"})
_FP8 = frozenset({"fp8", "fp8_e4m3", "fp8_e4m3fn", "float8_e4m3fn", "e4m3"})
_NVFP4 = frozenset({"nvfp4", "nvfp4_affine"})
_KEYS = ("kv_cache_quant_algo", "kv_cache_scheme")


def read_kv_cache(
    section: Mapping[str, Any], source: str, *, multiply_by_reciprocal: bool
) -> KVCache | None:
    """Read ``kv_cache_quant_algo`` and ``kv_cache_scheme``, of which tools write either.

    Args:
      section: the quantization config.
      source: the file and the key of the config, for messages.
      multiply_by_reciprocal: as for `rules.KVCache`.

    Returns:
      None if the cache keeps the model's dtype. Otherwise a `KVCache`, whose algorithm is "FP8",
      "NVFP4" or the description of one that is not supported.

    Raises:
      CheckpointError: a value is neither a name nor an object.
    """
    for key in _KEYS:
        value = section.get(key)
        if value is None:
            continue
        if not isinstance(value, (str, dict)):
            raise CheckpointError(
                f"{source}: {key}: expected a name or an object, got {quoted(value)}"
            )
        algorithm = _named(value) if isinstance(value, str) else _described(value)
        if algorithm is not None:
            return KVCache(algorithm, f"{source}: {key}", multiply_by_reciprocal)
    return None


def _named(name: str) -> str | None:
    """Return the algorithm that a name means, or None for a cache that is not quantized."""
    lower = name.strip().lower()
    if lower in _NONE:
        return None
    if lower in _NVFP4:
        return NVFP4
    return FP8 if lower in _FP8 else name.upper()


def _described(scheme: Mapping[str, Any]) -> str | None:
    """Return the algorithm of an object as compressed-tensors writes it."""
    if not any(scheme.values()):
        return None
    strategy, kind = scheme.get("strategy"), (scheme.get("type"), scheme.get("num_bits"))
    plain = kind == ("float", 8) and strategy in (None, "tensor", "attn_head")
    if plain and not scheme.get("dynamic") and scheme.get("symmetric", True) is not False:
        return FP8
    if kind == ("float", 4):
        return NVFP4
    described = f"{quoted(kind[0])} of {quoted(kind[1])} bits, strategy {quoted(strategy)}"
    dynamic = ", dynamic" if scheme.get("dynamic") else ""
    return described + dynamic + (", not symmetric" if scheme.get("symmetric") is False else "")
