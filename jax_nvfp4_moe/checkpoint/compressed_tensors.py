"""The format of compressed-tensors (llm-compressor): NVFP4 packed, and FP8 beside it.

NVFP4: ``w = e2m1 * (float32(weight_scale) / weight_global_scale)`` and the same sense for
``input_global_scale``: both scalars divide. FP8: ``w = e4m3 * weight_scale``, one of the matrix or
of each row.
"""

import re
from collections.abc import Iterable, Mapping
from typing import Any

from jax_nvfp4_moe.checkpoint.errors import CheckpointError, quoted
from jax_nvfp4_moe.checkpoint.formats import (
    CheckpointFormat,
    Decision,
    KVCache,
    TensorNames,
    check_group_size,
    equivalent_names,
    names_in,
    object_in,
)
from jax_nvfp4_moe.numerics.nvfp4 import BLOCK
from jax_nvfp4_moe.scheme import CheckpointScheme, FP8ActivationScaling, Scheme

PACKED_FORMAT = "nvfp4-pack-quantized"
FP8_FORMATS = ("float-quantized", "naive-quantized")
_MIXED = "mixed-precision"  # of the whole file: groups have formats of their own
_LINEARS = ("Linear", "LinearBase")  # the class of linears, here and in runtimes
_REGEX = "re:"
# A pattern is untrusted and Python's `re` backtracks: with these limits a name of 200 characters
# takes at most seconds, where a nested repetition could take for ever. Digits do not overlap with
# what stands around them in names, so that their repetitions come for free.
_MOST_REPEATS = 4
_DIGITS = re.compile(r"(\\d|\[0-9\])[*+]")
_NESTED_REPEAT = re.compile(r"[*+}]\??\)+[*+{]")
_FP8_INPUTS: Mapping[tuple[bool, Any], FP8ActivationScaling] = {
    (True, "token"): FP8ActivationScaling.TOKEN,
    (True, "tensor"): FP8ActivationScaling.TENSOR,
    (False, "tensor"): FP8ActivationScaling.STATIC,
}


class _Matcher:
    """Module names: whole, or regular expressions that match from the start."""

    def __init__(self, patterns: Iterable[str], source: str):
        self._names = frozenset(p for p in patterns if not p.startswith(_REGEX))
        self._patterns = [
            (_compile(p.removeprefix(_REGEX), source), p)
            for p in sorted(patterns)
            if p.startswith(_REGEX)
        ]

    def find(self, module: str) -> str | None:
        """Return the entry that matches `module`: a name first, then the first pattern."""
        names = equivalent_names(module)
        for name in names:
            if name in self._names:
                return name
        for regex, pattern in self._patterns:
            if any(regex.match(name) for name in names):
                return pattern
        return None


class _Group:
    """One entry of ``config_groups``: which modules it targets and how it quantizes them."""

    def __init__(self, group: Mapping[str, Any], whole_format: Any, source: str):
        self.targets = names_in(group, "targets", source)
        self.source = source
        self._format = group.get("format") or whole_format
        self._weights = object_in(group, "weights", source)
        self._inputs = object_in(group, "input_activations", source)
        if not self._weights:
            raise CheckpointError(
                [f"{source}: weights: missing; quantized activations alone are not supported"]
            )
        if group.get("output_activations"):
            raise CheckpointError([f"{source}: output_activations are not supported"])

    def scheme(self) -> CheckpointScheme:
        """Return the scheme; CheckpointError where the group is neither NVFP4 nor FP8."""
        eight = _kind(self._weights) == ("float", 8)
        supported = (*FP8_FORMATS, _MIXED) if eight else (PACKED_FORMAT, _MIXED)
        if self._format not in supported:
            named = ", ".join((PACKED_FORMAT, *FP8_FORMATS))
            raise CheckpointError(
                [
                    f"{self.source}: format {quoted(self._format)} is not supported for weights "
                    f"of type {_described(self._weights)}; supported: {named}"
                ]
            )
        return self._fp8() if eight else self._nvfp4()

    def _nvfp4(self):
        self._check("weights", self._weights)
        if not self._inputs:
            return Scheme.W4A16
        self._check("input_activations", self._inputs)
        return Scheme.W4A4

    def _check(self, key, arguments):
        source = f"{self.source}: {key}"
        if _kind(arguments) != ("float", 4):
            raise CheckpointError(
                [f"{source}: expected type 'float' of 4 bits, got {_described(arguments)}"]
            )
        check_group_size(arguments.get("group_size"), source)

    def _fp8(self):
        strategy = self._weights.get("strategy")
        self._require("weights", strategy in ("tensor", "channel"), f"strategy {quoted(strategy)}")
        symmetric = self._weights.get("symmetric", True) is not False
        self._require("weights", symmetric, "symmetric false")
        if not self._inputs:
            return FP8ActivationScaling.WEIGHTS
        kind = _kind(self._inputs) == ("float", 8)
        self._require("input_activations", kind, f"type {_described(self._inputs)}")
        how = bool(self._inputs.get("dynamic")), self._inputs.get("strategy")
        described = f"strategy {quoted(how[1])}, dynamic {how[0]}"
        self._require("input_activations", how in _FP8_INPUTS, described)
        return _FP8_INPUTS[how]

    def _require(self, key, holds, found):
        if not holds:
            raise CheckpointError(
                [
                    f"{self.source}: {key}: {found} is not supported for FP8; supported: weights "
                    "by tensor or channel, activations dynamic by token or tensor, or static by "
                    "tensor"
                ]
            )


class CompressedTensorsRules:
    """`formats.Rules` of ``config_groups`` and ``ignore``."""

    def __init__(self, section: Mapping[str, Any], source: str):
        self.source = source
        self.summary = str(section.get("format"))
        self.kv_cache = _kv_cache(section, source)
        groups = object_in(section, "config_groups", source)
        if not groups:
            raise CheckpointError([f"{source}: config_groups: expected at least one group"])
        read = [
            _Group(
                object_in(groups, name, f"{source}: config_groups"),
                section.get("format"),
                f"{source}: config_groups: {quoted(name)}",
            )
            for name in groups
        ]
        self._groups = {target: group for group in read for target in group.targets}
        self._targets = _Matcher(self._groups, source)
        self._ignored = _Matcher(names_in(section, "ignore", source), source)
        if len(read) == 1:  # nothing else can be meant: say at once if it is not supported
            read[0].scheme()

    def decide(self, module: str) -> Decision:
        """Return how `module`, a linear, is quantized: by name, by pattern, then as any linear."""
        ignored = self._ignored.find(module)
        if ignored:
            return Decision(None, f"{self.source}: ignore {quoted(ignored)}")
        target = self._targets.find(module)
        for name in (target, *_LINEARS):
            if name in self._groups:
                group = self._groups[name]
                return Decision(group.scheme(), f"{group.source}: targets {quoted(name)}")
        return Decision(None, f"{self.source}: no target of config_groups matches")


def _kv_cache(section, source) -> KVCache | None:
    scheme = object_in(section, "kv_cache_scheme", source)
    if not scheme:
        return None
    plain = _kind(scheme) == ("float", 8) and not scheme.get("dynamic")
    plain = plain and scheme.get("strategy") in (None, "tensor", "attn_head")
    algorithm = (
        "FP8" if plain else f"{_described(scheme)}, strategy {quoted(scheme.get('strategy'))}"
    )
    return KVCache(algorithm, f"{source}: kv_cache_scheme", multiply_by_reciprocal=False)


def declaration(activations: bool, exclude: Iterable[str], version: str) -> dict[str, Any]:
    """Write ``quantization_config`` of a model in NVFP4, such as `CompressedTensorsRules` reads.

    Args:
      activations: whether they are rounded too, with calibrated global scales.
      exclude: modules that are not quantized, each by its name.
      version: of compressed-tensors, whose fields these are.
    """
    weights = {
        "num_bits": 4,
        "type": "float",
        "symmetric": True,
        "group_size": BLOCK,
        "strategy": "tensor_group",
        "dynamic": False,
        "scale_dtype": "torch.float8_e4m3fn",
    }
    group = {"targets": ["Linear"], "weights": weights, "format": PACKED_FORMAT}
    group["input_activations"] = {**weights, "dynamic": "local"} if activations else None
    return {
        "quant_method": "compressed-tensors",
        "format": PACKED_FORMAT,
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": sorted(exclude),
        "version": version,
    }


def _kind(arguments):
    return arguments.get("type"), arguments.get("num_bits")


def _described(arguments) -> str:
    kind, bits = _kind(arguments)
    return f"{quoted(kind)} of {quoted(bits)} bits"


def _compile(pattern, source):
    alternatives = [pattern] if "(" in pattern else pattern.split("|")
    repeats = max(len(re.findall(r"[*+{]", _DIGITS.sub("", part))) for part in alternatives)
    if repeats > _MOST_REPEATS or _NESTED_REPEAT.search(pattern):
        raise CheckpointError(
            [
                f"{source}: pattern {quoted(pattern)} repeats too much to be safe; at most "
                f"{_MOST_REPEATS} repetitions, none inside another"
            ]
        )
    try:
        return re.compile(pattern)
    except (re.error, RecursionError, OverflowError) as error:
        raise CheckpointError(
            [f"{source}: {quoted(pattern)} is no regular expression: {error}"]
        ) from None


COMPRESSED_TENSORS = CheckpointFormat(
    name="compressed-tensors",
    quant_method="compressed-tensors",
    names=TensorNames(
        packed="weight_packed",
        block_scale="weight_scale",
        weight_global="weight_global_scale",
        input_global="input_global_scale",
        divides=True,
        fp8_by_factor=False,
    ),
    parse=CompressedTensorsRules,
)
