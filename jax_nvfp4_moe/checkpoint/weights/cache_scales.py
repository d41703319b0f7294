"""Find the scales with which attention modules store keys and values in FP8, under any name.

| tool | names after the attention module, for keys |
|---|---|
| ModelOpt, llm-compressor | ``k_proj.k_scale``, ``k_scale`` |
| vLLM's own | ``attn.k_scale``, ``mla_attn.k_scale`` |
| tools that merge projections | ``qkv_proj.k_scale`` |
| Quark, AutoFP8 and older llm-compressor | ``k_proj.output_scale`` |
| HYV3 | ``k_cache.scale`` |
| older files, for keys and values | ``kv_scale``, ``kv_b_proj.output_scale`` of latents |

Source: https://github.com/vllm-project/vllm, `maybe_remap_kv_scale_name` and `get_cache_scale`.
"""

import functools
import logging
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from jax_nvfp4_moe.checkpoint.errors import quoted
from jax_nvfp4_moe.checkpoint.reading.unread import Piece, Unread
from jax_nvfp4_moe.checkpoint.weights.finder import FLOATS, Finder

log = logging.getLogger("jax_nvfp4_moe")

_BOTH = "kv"
_NAME = re.compile(
    r"(?:^|[._])(?:"
    r"(?P<plain>k|v|kv|q|prob|attn)_scale"
    r"|(?P<output>k|v|kv|kv_b|q)_proj\.output_scale"
    r"|(?P<cache>k|v|kv|q)_cache[._]scale"
    r"|(?P<attention>prob)_output_scale)$"
)
_INDEXER = "indexer."  # chooses keys, and has a cache of its own
_SMALL = 1 << 16  # bytes of the largest tensor that is read to compare it with 1
_F32 = np.dtype(np.float32)


def find_part(name: str) -> str | None:
    """Return what a tensor scales: "k", "v", "kv", "q", "prob" or "attn"; None if it is no scale.

    Args:
      name: the name of the tensor, or what follows the name of the attention module.
    """
    found = _NAME.search(name)
    return found and next(filter(None, found.groups())).removesuffix("_b")


class CacheScaleFinder:
    """Finds the scales of attention modules, and finds those that nobody reads."""

    def __init__(self, finder: Finder, where: str):
        """Make a finder.

        Args:
          finder: looks tensors up, and collects problems.
          where: the checkpoint's folder, for messages.
        """
        self._finder, self._where = finder, where
        self._asked: list[str] = []  # attention modules
        self._missing: list[str] = []
        self._doubled: list[tuple[str, str]] = []  # a scale that is used, and another one

    def find(self, prefix: str, heads: Mapping[str, int]) -> dict[str, Unread]:
        """Find the scales of one attention module.

        A module that has a scale for its keys or its values alone uses it for both, as vLLM does.

        Args:
          prefix: the attention module.
          heads: "k" or "v" -> the number of heads.

        Returns:
          "k" or "v" -> float32 ``[heads]``.
        """
        stored: dict[str, list[str]] = {part: [] for part in (*heads, _BOTH)}
        names = self._finder.tensors.under(f"{prefix}.")
        for name in sorted(names, key=lambda name: (-len(name), name)):
            rest = name.removeprefix(f"{prefix}.")
            part = None if rest.startswith(_INDEXER) else find_part(rest)
            if part in stored:
                stored[part].append(name)
        self._asked.append(prefix)
        found = {part: next(iter(stored[part] + stored[_BOTH]), None) for part in heads}
        known = sorted({name for name in found.values() if name is not None})
        for part, used in found.items():
            self._doubled += [
                (used, other) for other in stored[part] + stored[_BOTH] if used not in (None, other)
            ]
        if not known:
            self._missing.append(prefix)
        elif None in found.values():
            self._finder.warn(
                "one cache scale",
                prefix,
                f"{quoted(prefix)}: the file stores {quoted(known[0])} alone as a scale of the KV "
                "cache; it is used for keys and values, as vLLM does",
            )
        return {
            part: self._scale(prefix, part, found[part] or next(iter(known), None), count)
            for part, count in heads.items()
        }

    def _scale(self, prefix: str, part: str, name: str | None, heads: int) -> Unread:
        """Return a scale for each head from one tensor, which has one number or one for each."""
        stored = Unread((heads,), _F32)
        info = self._finder.find(name) if name else None
        if name is not None and info is not None:
            shapes = [(), (1,), (heads,)]
            if tuple(size for size in info.shape if size > 1) in ((), (heads,)):
                shapes.append(info.shape)
            taken = self._finder.take(name, FLOATS, *shapes)
            single = taken is None or math.prod(taken.shape) == 1
            stored.pieces.append(Piece(name, shape=() if single else (heads,)))
        return Unread((heads,), _F32, decode=functools.partial(_read_scale, stored, prefix, part))

    def report(self, declared: str | None, scopes: Iterable[str], num_layers: int | None) -> None:
        """Log which modules have no scale, and which scales are not used and are not 1.

        Args:
          declared: the file and the key that declare a cache in FP8, or None.
          scopes: the modules that are loaded. None of them means all.
          num_layers: the number of layers that are loaded; None if it is not known.
        """
        if self._missing:
            log.warning(
                "%s: %s declares an FP8 KV cache, but the file has no scale for it in %d of %d "
                "attention modules, such as %s: 1 is used",
                self._where,
                declared,
                len(self._missing),
                len(self._asked),
                quoted(self._missing[0]),
            )
        for used, other in self._doubled:
            self._finder.taken.add(other)
            if not np.array_equal(self._read(used), self._read(other)):
                log.warning(
                    "%s: the file stores two scales of the KV cache that differ: %s is used, and "
                    "%s is not",
                    self._where,
                    quoted(used),
                    quoted(other),
                )
        unused = {part: [] for part in ("k", "v", _BOTH, "q", "prob", "attn")}
        for name, part in self._unused(list(scopes) or [""], num_layers):
            unused[part].append(name)
        keys_and_values = [name for part in ("k", "v", _BOTH) for name in unused[part]]
        others = [name for part in ("q", "prob", "attn") for name in unused[part]]
        if declared is None:
            self._say(
                keys_and_values,
                "the file stores scales of an FP8 KV cache, but no configuration declares such a "
                "cache: keys and values keep the model's dtype",
            )
        self._say(
            others,
            "the file stores scales of queries or of attention weights in FP8, and no module here "
            "rounds these: they keep the model's dtype",
        )

    def _unused(self, scopes: Sequence[str], num_layers) -> Iterator[tuple[str, str]]:
        """Yield the scales in the layers of the language model that were not asked for."""
        for scope in scopes:
            for name in self._finder.tensors.under(f"{scope}." if scope else "model.layers."):
                if name in self._finder.taken:
                    continue
                layer = re.match(r"model\.layers\.(\d{1,9})\.", name)
                if layer is None:
                    continue
                part = find_part(name)
                if part is not None and (num_layers is None or int(layer[1]) < num_layers):
                    yield name, part

    def _say(self, names, sentence) -> None:
        """Log a sentence about those of the scales `names` that are not 1."""
        different = [name for name in names if not self._is_one(name)]
        if different:
            log.warning("%s (%s and %d others)", sentence, quoted(different[0]), len(different) - 1)

    def _is_one(self, name) -> bool:
        return bool((self._read(name) == 1).all())

    def _read(self, name) -> np.ndarray:
        """Return a small tensor of floats as float32; NaN, which equals nothing, for any other."""
        info = self._finder.tensors.info(name)
        if info.dtype not in FLOATS or info.nbytes > _SMALL:
            return np.full(1, np.nan, _F32)
        return self._finder.tensors.read(name).astype(_F32).reshape(-1)


def _read_scale(stored: Unread, prefix: str, part: str, reader: Any) -> np.ndarray:
    """Read the scales with which an attention module stores its keys or values in FP8.

    A scale that is missing, or not a positive finite number of normal size, becomes 1. Numbers
    below the smallest normal float32 are 0 on many devices.
    """
    scale = reader.open(stored)[()]
    if not stored.pieces:
        scale[...] = 1
    valid = np.isfinite(scale) & (scale >= np.finfo(np.float32).tiny)
    if not valid.all():
        log.warning(
            "%s: a scale of the KV cache (%s) is not a positive finite number of normal size and "
            "becomes 1",
            prefix,
            part,
        )
    return np.where(valid, scale, np.float32(1))
