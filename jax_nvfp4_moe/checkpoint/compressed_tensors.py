"""The checkpoint format of compressed-tensors (llm-compressor): packed NVFP4, and FP8.

NVFP4 weights are ``w = e2m1 * (float32(weight_scale) / weight_global_scale)``. Activations use
``input_global_scale`` in the same way: both global scales divide. FP8 weights are ``w = e4m3 *
weight_scale``, with one scale per matrix or one per row.

Source: https://github.com/vllm-project/compressed-tensors
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
from jax_nvfp4_moe.checkpoint.refused_formats import why_refused
from jax_nvfp4_moe.numerics.fp8_blocks import SQUARE, BlockFP8
from jax_nvfp4_moe.numerics.nvfp4 import BLOCK
from jax_nvfp4_moe.scheme import CheckpointScheme, FP8ActivationScaling, Scheme

PACKED_FORMAT = "nvfp4-pack-quantized"
FP8_FORMATS = ("float-quantized", "naive-quantized")
_MIXED = "mixed-precision"  # the format of a file in which each group states its own format
_LINEARS = ("Linear", "LinearBase")  # targets that mean every linear: torch's class, and vLLM's
_REGEX = "re:"
# A pattern comes from an untrusted file, and Python's `re` backtracks. A nested repetition could
# run forever; within these limits, a name of 200 characters takes a few seconds at most.
# Repeated digits are not counted: the characters around them in a module's name are no digits, so
# they cause no backtracking.
_MOST_REPEATS = 4
_DIGITS = re.compile(r"(\\d|\[0-9\])[*+]")
_NESTED_REPEAT = re.compile(r"[*+}]\??\)+[*+{]")
_FP8_INPUTS: Mapping[tuple[bool, Any], FP8ActivationScaling] = {
    (True, "token"): FP8ActivationScaling.TOKEN,
    (True, "tensor"): FP8ActivationScaling.TENSOR,
    (False, "tensor"): FP8ActivationScaling.STATIC,
}


class _Matcher:
    """Finds the entry of a list that matches a module.

    An entry is either the whole name of a module or a regular expression that matches from the
    start of the name.
    """

    def __init__(self, patterns: Iterable[str], source: str):
        self._names = frozenset(p for p in patterns if not p.startswith(_REGEX))
        self._patterns = [
            (_compile(p.removeprefix(_REGEX), source), p)
            for p in sorted(patterns)
            if p.startswith(_REGEX)
        ]

    def find(self, module: str) -> str | None:
        """Return the entry that matches `module`, or None.

        A whole name takes precedence over a pattern. Patterns are tried in alphabetical order.
        """
        names = equivalent_names(module)
        for name in names:
            if name in self._names:
                return name
        for regex, pattern in self._patterns:
            if any(regex.match(name) for name in names):
                return pattern
        return None


class _Group:
    """One entry of ``config_groups``: the modules that it targets and how it quantizes them."""

    def __init__(self, group: Mapping[str, Any], whole_format: Any, source: str):
        self.targets = names_in(group, "targets", source)
        self.source = source
        self._format = group.get("format") or whole_format
        self._weights = object_in(group, "weights", source)
        self._inputs = object_in(group, "input_activations", source)
        if not self._weights:
            raise CheckpointError(
                [
                    f"{source}: weights: missing; a group that quantizes activations alone is not "
                    "supported"
                ]
            )
        if group.get("output_activations"):
            raise CheckpointError([f"{source}: output_activations are not supported"])

    def scheme(self) -> CheckpointScheme:
        """Return the scheme of the group.

        Raises:
          CheckpointError: the group is neither NVFP4 nor a supported form of FP8.
        """
        eight = _kind(self._weights) == ("float", 8)
        supported = (*FP8_FORMATS, _MIXED) if eight else (PACKED_FORMAT, _MIXED)
        if self._format not in supported:
            named = ", ".join((PACKED_FORMAT, *FP8_FORMATS))
            raise CheckpointError(
                [
                    f"{self.source}: format {quoted(self._format)} is not supported for weights "
                    f"of type {_described(self._weights)}{why_refused(self._format)}; "
                    f"supported formats: {named}"
                ]
            )
        return self._fp8() if eight else self._nvfp4()

    def _nvfp4(self):
        """Return the scheme of a group with 4-bit weights."""
        self._check("weights", self._weights)
        if not self._inputs:
            return Scheme.W4A16
        self._check("input_activations", self._inputs)
        return Scheme.W4A4

    def _check(self, key, arguments):
        """Check that the weights or the activations, named by `key`, are NVFP4."""
        source = f"{self.source}: {key}"
        if _kind(arguments) != ("float", 4):
            raise CheckpointError(
                [f"{source}: expected type 'float' with 4 bits, got {_described(arguments)}"]
            )
        check_group_size(arguments.get("group_size"), source)

    def _fp8(self):
        """Return the scheme of a group with 8-bit weights."""
        strategy = self._weights.get("strategy")
        if strategy == "block":
            return self._fp8_blocks()
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

    def _fp8_blocks(self):
        """Return the scheme of blocks; inputs are rounded in groups by the tool, and kept here."""
        size = self._weights.get("block_structure")
        self._require("weights", size == list(SQUARE), f"block_structure {quoted(size)}")
        inputs = self._inputs
        grouped = (
            _kind(inputs) == ("float", 8)
            and inputs.get("dynamic") is True
            and inputs.get("strategy") == "group"
        )
        described = f"strategy {quoted(inputs.get('strategy'))} beside weights by block"
        self._require("input_activations", not inputs or grouped, described)
        return BlockFP8.SQUARE

    def _require(self, key, holds, found):
        """Raise `CheckpointError` with the supported forms of FP8, unless `holds`."""
        if not holds:
            raise CheckpointError(
                [
                    f"{self.source}: {key}: {found} is not supported for FP8. Supported are "
                    "symmetric weights with strategy tensor or channel, dynamic activations with "
                    "strategy token or tensor, and static activations with strategy tensor; also "
                    "weights in blocks of 128 x 128, with dynamic activations by group"
                ]
            )


class CompressedTensorsRules:
    """Applies ``config_groups`` and ``ignore`` to modules; implements `formats.Rules`."""

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
        # If there is only one group, every quantized module belongs to it. An unsupported group
        # then raises here, before the headers of the files are read.
        if len(read) == 1:
            read[0].scheme()

    def decide(self, module: str) -> Decision:
        """Return how the linear `module` is quantized.

        An entry of ``ignore`` comes first, then a target that names the module. A target whose
        pattern matches the module follows, and a target that means all linears comes last.
        """
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
    """Read ``kv_cache_scheme``.

    Returns:
      None if the key is missing. Otherwise a `KVCache`, whose algorithm is "FP8" or a description
      of an unsupported form.
    """
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
    """Return the ``quantization_config`` of a model in NVFP4, in the form that runtimes read.

    Args:
      activations: whether activations are rounded to NVFP4 too, with calibrated global scales.
      exclude: the full names of the modules that are not quantized.
      version: the version of compressed-tensors that defines the fields.
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
    """Return the type and the bits of weights or activations as text for a message."""
    kind, bits = _kind(arguments)
    return f"{quoted(kind)} of {quoted(bits)} bits"


def _compile(pattern, source):
    """Compile a pattern of the config.

    Raises:
      CheckpointError: the pattern is no regular expression, or matching it could take too long.
    """
    alternatives = [pattern] if "(" in pattern else pattern.split("|")
    repeats = max(len(re.findall(r"[*+{]", _DIGITS.sub("", part))) for part in alternatives)
    if repeats > _MOST_REPEATS or _NESTED_REPEAT.search(pattern):
        raise CheckpointError(
            [
                f"{source}: pattern {quoted(pattern)} repeats too much to be safe: expected at "
                f"most {_MOST_REPEATS} repetitions, and none inside another"
            ]
        )
    try:
        return re.compile(pattern)
    except (re.error, RecursionError, OverflowError) as error:
        raise CheckpointError(
            [f"{source}: pattern {quoted(pattern)} is no regular expression: {error}"]
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
