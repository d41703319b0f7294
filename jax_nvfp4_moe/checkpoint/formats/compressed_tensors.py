"""The checkpoint format of compressed-tensors (llm-compressor): packed NVFP4, and FP8.

NVFP4 weights are ``w = e2m1 * (float32(weight_scale) / weight_global_scale)``. Activations use
``input_global_scale`` in the same way: both global scales divide. FP8 weights are ``w = e4m3 *
weight_scale``, with one scale per matrix or one per row.

Source: https://github.com/vllm-project/compressed-tensors
"""

from collections.abc import Iterable, Mapping
from typing import Any

from jax_nvfp4_moe.checkpoint.errors import CheckpointError, Problems, quoted
from jax_nvfp4_moe.checkpoint.formats.config_keys import (
    ARGUMENT_KEYS,
    COMPRESSED_TENSORS_KEYS,
    GROUP_KEYS,
    find_unknown_keys,
)
from jax_nvfp4_moe.checkpoint.formats.kv_cache import read_kv_cache
from jax_nvfp4_moe.checkpoint.formats.refused_formats import why_refused
from jax_nvfp4_moe.checkpoint.formats.rules import (
    CheckpointFormat,
    Decision,
    TensorNames,
    check_group_size,
    names_in,
    object_in,
)
from jax_nvfp4_moe.checkpoint.formats.target_groups import Targets, names_of
from jax_nvfp4_moe.checkpoint.formats.transforms import find_transforms
from jax_nvfp4_moe.numerics import mxfp4
from jax_nvfp4_moe.numerics.fp8_blocks import SQUARE, BlockFP8
from jax_nvfp4_moe.numerics.nvfp4 import BLOCK
from jax_nvfp4_moe.scheme import CheckpointScheme, FP8ActivationScaling, Scheme

PACKED_FORMAT = "nvfp4-pack-quantized"
MXFP4_FORMAT = "mxfp4-pack-quantized"
FP8_FORMATS = ("float-quantized", "naive-quantized")
_MIXED = "mixed-precision"  # the format of a file in which each group states its own format
_E4M3 = ("torch.float8_e4m3fn", "float8_e4m3fn")
_E8M0 = ("torch.uint8", "uint8")
_UNORDERED = ("weight", "static")  # orders of columns that only calibration sees
_FP8_INPUTS: Mapping[tuple[Any, Any], FP8ActivationScaling] = {
    (True, "token"): FP8ActivationScaling.TOKEN,
    (True, "tensor"): FP8ActivationScaling.TENSOR,
    (False, "tensor"): FP8ActivationScaling.STATIC,
}


class _Group:
    """One entry of ``config_groups``: the modules that it targets and how it quantizes them."""

    def __init__(self, group: Mapping[str, Any], whole_format: Any, source: str):
        self.targets = names_in(group, "targets", source)
        self.source = source
        self._format = group.get("format") or whole_format
        self._weights = object_in(group, "weights", source)
        self._inputs = object_in(group, "input_activations", source)
        problems = Problems(find_unknown_keys(group, GROUP_KEYS, source))
        if not self._weights:
            problems.append(
                f"{source}: weights: missing; a group that quantizes activations alone is not "
                "supported"
            )
        if group.get("output_activations"):
            problems.append(f"{source}: output_activations are not supported")
        for key, arguments in (("weights", self._weights), ("input_activations", self._inputs)):
            problems += _find_wrong_arguments(arguments, f"{source}: {key}")
        problems.finish()

    def scheme(self) -> CheckpointScheme:
        """Return the scheme of the group.

        Raises:
          CheckpointError: the group is neither NVFP4 nor a supported form of FP8.
        """
        eight = _kind(self._weights) == ("float", 8)
        four = PACKED_FORMAT, MXFP4_FORMAT
        supported = (*FP8_FORMATS, _MIXED) if eight else (*four, _MIXED)
        if self._format not in supported:
            named = ", ".join((*four, *FP8_FORMATS))
            raise CheckpointError(
                f"{self.source}: format {quoted(self._format)} is not supported for weights "
                f"of type {_described(self._weights)}{why_refused(self._format)}; "
                f"supported formats: {named}"
            )
        if eight:
            return self._fp8()
        powers = self._format == _MIXED and self._weights.get("scale_dtype") in _E8M0
        return self._mxfp4() if powers or self._format == MXFP4_FORMAT else self._nvfp4()

    def _mxfp4(self):
        """Return the scheme of a group in MXFP4; activations are rounded by the tool alone."""
        expected = {"group_size": (mxfp4.BLOCK,), "dynamic": (None, False)}
        expected |= {"scale_dtype": (None, *_E8M0), "block_structure": (None,)}
        self._check_values("weights", self._weights, expected, "MXFP4")
        if self._inputs:
            expected |= {"strategy": ("group",), "dynamic": (True,)}
            self._check_values("input_activations", self._inputs, expected, "MXFP4")
        return Scheme.W4A16

    def _nvfp4(self):
        """Return the scheme of a group with 4-bit weights."""
        self._check("weights", self._weights, (False,))
        if not self._inputs:
            return Scheme.W4A16
        self._check("input_activations", self._inputs, (False, "local"))
        return Scheme.W4A4

    def _check(self, key, arguments, dynamic):
        """Check that the weights or the activations, named by `key`, are NVFP4.

        Args:
          key: "weights" or "input_activations".
          arguments: the object at that key.
          dynamic: the values of ``dynamic`` with which the global scale is stored.
        """
        expected = {
            "strategy": (None, "tensor_group"),
            "dynamic": (None, *dynamic),
            "scale_dtype": (None, *_E4M3),
            "block_structure": (None,),
        }
        self._check_values(key, arguments, expected, "NVFP4")

    def _check_values(self, key, arguments, expected, form):
        """Check that the weights or the activations, named by `key`, are FP4 of a form.

        Args:
          key: "weights" or "input_activations".
          arguments: the object at that key.
          expected: the name of an argument -> the values that it may have.
          form: the name of the form, for messages.
        """
        source = f"{self.source}: {key}"
        if _kind(arguments) != ("float", 4):
            raise CheckpointError(
                f"{source}: expected type 'float' with 4 bits, got {_described(arguments)}"
            )
        if "group_size" not in expected:
            check_group_size(arguments.get("group_size"), source)
        problems = Problems(
            f"{source}: {name} {quoted(arguments.get(name))} is not supported for {form}; "
            f"supported: {', '.join(map(quoted, allowed[1:] or allowed))}"
            for name, allowed in expected.items()
            if not any(_same(arguments.get(name), one) for one in allowed)
        )
        problems.finish()

    def _fp8(self):
        """Return the scheme of a group with 8-bit weights."""
        strategy = self._weights.get("strategy")
        if strategy == "block":
            return self._fp8_blocks()
        self._require("weights", strategy in ("tensor", "channel"), f"strategy {quoted(strategy)}")
        dynamic = self._weights.get("dynamic")
        self._require("weights", not dynamic, f"dynamic {quoted(dynamic)}")
        if not self._inputs:
            return FP8ActivationScaling.WEIGHTS
        kind = _kind(self._inputs) == ("float", 8)
        self._require("input_activations", kind, f"type {_described(self._inputs)}")
        how = self._inputs.get("dynamic") or False, self._inputs.get("strategy")
        described = f"strategy {quoted(how[1])}, dynamic {quoted(how[0])}"
        self._require("input_activations", how in tuple(_FP8_INPUTS), described)
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
                f"{self.source}: {key}: {found} is not supported for FP8. Supported are "
                "symmetric weights with strategy tensor or channel, dynamic activations with "
                "strategy token or tensor, and static activations with strategy tensor; also "
                "weights in blocks of 128 x 128, with dynamic activations by group"
            )


class CompressedTensorsRules:
    """Applies ``config_groups`` and ``ignore`` to modules; implements `rules.Rules`."""

    def __init__(self, section: Mapping[str, Any], source: str):
        self.source = source
        self.summary = str(section.get("format"))
        problems = Problems(find_unknown_keys(section, COMPRESSED_TENSORS_KEYS, source))
        problems += find_transforms(section, source)
        self._groups: list[_Group] = []
        with problems.collected():
            self.kv_cache = read_kv_cache(section, source, multiply_by_reciprocal=False)
            self._read_groups(section)
        problems.finish()

    def _read_groups(self, section):
        """Read the groups, their targets, and the modules that are ignored."""
        source = self.source
        groups = object_in(section, "config_groups", source)
        if not groups:
            raise CheckpointError(f"{source}: config_groups: expected at least one group")
        problems, place = Problems(), f"{source}: config_groups"
        for name in groups:
            with problems.collected():
                group = object_in(groups, name, place)
                found = _Group(group, section.get("format"), f"{place}: {quoted(name)}")
                self._groups.append(found)
        problems.finish()
        # If there is only one group, every quantized module belongs to it. An unsupported group
        # then raises here, before the headers of the files are read.
        self._schemes = [_try_scheme(group) for group in self._groups]
        if len(self._groups) == 1:
            self._groups[0].scheme()
        self.schemes = [scheme for scheme in self._schemes if scheme is not None]
        self._targets = [
            (target, number)
            for number, group in enumerate(self._groups)
            for target in group.targets
        ]
        self._matcher = Targets([target for target, _ in self._targets], source)
        self._ignore = names_in(section, "ignore", source)
        self._ignored = Targets(self._ignore, source)

    def choices(self, module: str) -> list[Decision]:
        """Return how the linear `module` may be quantized.

        An entry of ``ignore`` comes first. Targets that match the name of the module follow, in the
        order of the file, and then targets that name its class, such as Linear.
        """
        names = names_of(module)
        ignored = self._ignored.find(module, names)
        if ignored:
            return [Decision(None, f"{self.source}: ignore {quoted(self._ignore[ignored[0]])}")]
        matches = [self._targets[entry] for entry in self._matcher.find(module, names)]
        found = [
            Decision(scheme, f"{self._groups[number].source}: targets {quoted(target)}")
            for target, number in matches
            if (scheme := self._schemes[number]) is not None
        ]
        if not found and matches:
            self._groups[matches[0][1]].scheme()  # raises, because the group is not supported
        return found or [Decision(None, f"{self.source}: no target of config_groups matches")]


def _try_scheme(group) -> CheckpointScheme:
    """Return the scheme of a group, or None if it is not supported."""
    try:
        return group.scheme()
    except CheckpointError:
        return None


def _find_wrong_arguments(arguments, source) -> list[str]:
    """Return what weights or activations ask for that no scheme here has."""
    problems = find_unknown_keys(arguments, ARGUMENT_KEYS, source)
    if arguments.get("symmetric", True) is False:
        problems.append(
            f"{source}: symmetric false is not supported: every kernel of this package reads "
            "numbers without zero points"
        )
    order = arguments.get("actorder")
    if order and order not in _UNORDERED:
        problems.append(
            f"{source}: actorder {quoted(order)} is not supported: it permutes columns, and every "
            "kernel of this package reads the blocks of a row in order; supported: "
            f"{', '.join(map(quoted, _UNORDERED))}"
        )
    return problems


def _same(value, expected) -> bool:
    """Return whether two JSON values are equal and of one type: 0 is not false."""
    return type(value) is type(expected) and value == expected


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
