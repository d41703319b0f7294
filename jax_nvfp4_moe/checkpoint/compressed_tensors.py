"""The form of compressed-tensors (llm-compressor), ``nvfp4-pack-quantized``.

``w = e2m1 * (float32(weight_scale) / weight_global_scale)`` and the same sense for
``input_global_scale``: both scalars divide.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from jax_nvfp4_moe.checkpoint.errors import CheckpointError, quoted
from jax_nvfp4_moe.checkpoint.forms import (
    Form,
    TensorNames,
    check_group_size,
    names_in,
    object_in,
    spellings,
)
from jax_nvfp4_moe.scheme import Scheme

PACKED_FORMAT = "nvfp4-pack-quantized"
_LINEAR = "Linear"
_REGEX = "re:"
# A pattern is untrusted and Python's `re` backtracks: with these limits a name of 200 characters
# takes at most seconds, where a nested repetition could take for ever.
_MOST_REPEATS = 4
_NESTED_REPEAT = re.compile(r"[*+}]\??\)+[*+{]")


class _Matcher:
    """Module names: whole, or regular expressions that match from the start."""

    def __init__(self, patterns: Sequence[str], source: str):
        self._names = frozenset(p for p in patterns if not p.startswith(_REGEX))
        self._patterns = [
            _compile(p.removeprefix(_REGEX), source) for p in patterns if p.startswith(_REGEX)
        ]

    def __contains__(self, module: str) -> bool:
        names = spellings(module)
        return not self._names.isdisjoint(names) or any(
            pattern.match(name) for pattern in self._patterns for name in names
        )


class _Group:
    """One entry of ``config_groups``: which modules it targets and how it quantizes them."""

    def __init__(self, group: Mapping[str, Any], whole_format: Any, source: str):
        targets = names_in(group, "targets", source)
        self.names = _Matcher([target for target in targets if target != _LINEAR], source)
        self.all_linears = _LINEAR in targets
        self._source = source
        self._format = group.get("format") or whole_format
        self._weights = object_in(group, "weights", source)
        self._inputs = object_in(group, "input_activations", source)

    def scheme(self) -> Scheme:
        """Return the scheme; CheckpointError where the group is not NVFP4."""
        if self._format != PACKED_FORMAT:
            raise CheckpointError(
                [
                    f"{self._source}: format {quoted(self._format)} is not supported; "
                    f"supported: {PACKED_FORMAT}"
                ]
            )
        self._check("weights", self._weights)
        if not self._inputs:
            return Scheme.W4A16
        self._check("input_activations", self._inputs)
        return Scheme.W4A4

    def _check(self, key, arguments):
        source = f"{self._source}: {key}"
        found = arguments.get("type"), arguments.get("num_bits")
        if found != ("float", 4):
            raise CheckpointError(
                [
                    f"{source}: expected type 'float' of 4 bits, got {quoted(found[0])} of "
                    f"{quoted(found[1])}"
                ]
            )
        check_group_size(arguments.get("group_size"), source)


class CompressedTensorsRules:
    """`forms.Rules` of ``config_groups`` and ``ignore``."""

    def __init__(self, section: Mapping[str, Any], source: str):
        self.source = source
        self.summary = str(section.get("format"))
        groups = object_in(section, "config_groups", source)
        if not groups:
            raise CheckpointError([f"{source}: config_groups: expected at least one group"])
        self._groups = [
            _Group(
                object_in(groups, name, f"{source}: config_groups"),
                section.get("format"),
                f"{source}: config_groups: {quoted(name)}",
            )
            for name in groups
        ]
        self._ignored = _Matcher(names_in(section, "ignore", source), source)
        if len(self._groups) == 1:  # nothing else can be meant: say at once if it is no NVFP4
            self._groups[0].scheme()

    def declared(self, module: str) -> Scheme | None:
        """Return the scheme of `module`, a linear: by its name first, then as any linear."""
        if module in self._ignored:
            return None
        for group in self._groups:
            if module in group.names:
                return group.scheme()
        for group in self._groups:
            if group.all_linears:
                return group.scheme()
        return None


def _compile(pattern, source):
    alternatives = [pattern] if "(" in pattern else pattern.split("|")
    repeats = max(len(re.findall(r"[*+{]", part)) for part in alternatives)
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


COMPRESSED_TENSORS = Form(
    name="compressed-tensors",
    quant_method="compressed-tensors",
    names=TensorNames(
        packed="weight_packed",
        block_scale="weight_scale",
        weight_global="weight_global_scale",
        input_global="input_global_scale",
        divides=True,
    ),
    parse=CompressedTensorsRules,
)
