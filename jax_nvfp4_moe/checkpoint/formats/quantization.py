"""Read which modules of a checkpoint are quantized, and how.

A checkpoint may declare that in two places. Both are read, and both must agree. If ``config.json``
says that experts alone were quantized again, ``hf_quant_config.json`` lists these and excludes the
others, which keep the format that ``config.json`` declares.
"""

import dataclasses
import pathlib
from collections.abc import Mapping
from typing import Any

from jax_nvfp4_moe.checkpoint.errors import CheckpointError, Problems, quoted
from jax_nvfp4_moe.checkpoint.folder import CONFIG, exists, nested_configs, read_json
from jax_nvfp4_moe.checkpoint.formats.compressed_tensors import COMPRESSED_TENSORS
from jax_nvfp4_moe.checkpoint.formats.expert_numbers import (
    tells_experts_apart,
    without_expert_number,
)
from jax_nvfp4_moe.checkpoint.formats.fp8_blocks import (
    FP8_BLOCKS,
    FP8_WITH_NVFP4_EXPERTS,
    ExpertRules,
)
from jax_nvfp4_moe.checkpoint.formats.modelopt import (
    MODELOPT,
    QUANT_FILE,
    WEIGHTS_ONLY_NAMES,
    parse_file,
)
from jax_nvfp4_moe.checkpoint.formats.mxfp4 import MXFP4
from jax_nvfp4_moe.checkpoint.formats.refused_formats import why_refused
from jax_nvfp4_moe.checkpoint.formats.rules import (
    CheckpointFormat,
    Decision,
    KVCache,
    Rules,
    TensorNames,
)
from jax_nvfp4_moe.scheme import CheckpointScheme

FORMATS = (MODELOPT, COMPRESSED_TENSORS, MXFP4, FP8_BLOCKS)
_SECTIONS = ("quantization_config", "compression_config")  # the latter in old llm-compressor files
_MODELOPT_KEYS = frozenset({"quant_algo", "quantization"})  # of no other format


@dataclasses.dataclass(frozen=True)
class QuantConfig:
    """What a checkpoint declares about the quantization of its modules.

    Attributes:
      format: the checkpoint format. None if nothing is quantized.
      rules: the rules of each place that declares a quantization. They must agree on every module
        that is loaded.
      tells_experts_apart: whether the rules may say something else of one expert of a layer than of
        another; see `expert_numbers`.
    """

    format: CheckpointFormat | None = None
    rules: tuple[Rules, ...] = ()
    tells_experts_apart: bool = True
    _known: dict[str, list[Decision]] = dataclasses.field(default_factory=dict, compare=False)

    @property
    def names(self) -> TensorNames:
        """The names of a quantized linear's tensors. ModelOpt's names if nothing is quantized."""
        return (self.format or MODELOPT).names

    @property
    def kv_cache(self) -> KVCache | None:
        """What the checkpoint declares about the KV cache. None if it declares nothing."""
        return next((rules.kv_cache for rules in self.rules if rules.kv_cache), None)

    @property
    def schemes(self) -> list[CheckpointScheme]:
        """All schemes that the configs declare for any module, in their order."""
        return list(dict.fromkeys(scheme for rules in self.rules for scheme in rules.schemes))

    def decide(self, module: str) -> Decision:
        """Return what the configs say about `module`: the first of its `choices`."""
        return self.choices(module)[0]

    def choices(self, module: str) -> list[Decision]:
        """Return how `module` may be quantized, and what decided that; see `rules.Rules`.

        Args:
          module: the module, such as "model.layers.0.self_attn.q_proj".

        Raises:
          CheckpointError: two places disagree about the module, or its format is not supported.
        """
        key = module if self.tells_experts_apart else without_expert_number(module)
        if key not in self._known:
            self._known[key] = self._agreed(module)
        return self._known[key]

    def checkpoint_scheme(self, module: str) -> CheckpointScheme:
        """Return the scheme of `module`, or None if it is dense; otherwise as `decide`."""
        return self.decide(module).scheme

    def _agreed(self, module):
        """Return the choices on which all rules agree."""
        if not self.rules:
            return [Decision(None, "no quantization config")]
        said = {rules.source: rules.choices(module) for rules in self.rules}
        # Of a label and of a config that describes activations, the latter decides.
        first, *others = sorted(said.values(), key=lambda choices: choices[0].labelled)
        if not all(first[0].agrees(other[0]) for other in others):
            each = "; ".join(
                f"{source} says {choices[0].scheme or 'dense'}" for source, choices in said.items()
            )
            raise CheckpointError(f"{quoted(module)}: the quantization configs disagree: {each}")
        return first


def read_quant_config(folder: str | pathlib.Path, config: Mapping[str, Any]) -> QuantConfig:
    """Read the quantization config of a checkpoint from every place that may hold one.

    Args:
      folder: the checkpoint's folder, which may contain ``hf_quant_config.json``.
      config: the parsed ``config.json``, which may contain ``quantization_config``.

    Raises:
      CheckpointError: an algorithm is unknown or not supported, or two places disagree.
    """
    problems = Problems()
    declared: list[tuple[Any, CheckpointFormat, Rules | None]] = []
    for read in (_from_file, _from_config):
        with problems.collected():
            declared.extend(read(pathlib.Path(folder), config))
    found = _with_manifests([(format, rules) for _, format, rules in declared])
    verdicts = [_verdicts(format, rules) for format, rules in found]
    if not problems and verdicts and not set.intersection(*verdicts):
        problems.append(
            "the quantization configs disagree: "
            + "; ".join(_describe(format, rules) for format, rules in found)
        )
    problems.finish(str(folder))
    rules = tuple(rules for _, rules in found if rules is not None)
    if not rules:
        return QuantConfig()
    apart = any(tells_experts_apart(section) for section, _, _ in declared)
    return QuantConfig(found[0][0], rules, apart)


def _with_manifests(found):
    """Return `found` with a manifest of experts joined to the rules that it supplements."""
    base = next((rules for _, rules in found if isinstance(rules, ExpertRules)), None)
    if base is None:
        return found
    return [
        (FP8_WITH_NVFP4_EXPERTS, base if rules is base else rules and base.with_manifest(rules))
        for _, rules in found
    ]


def _from_file(folder, _):
    """Yield ``hf_quant_config.json``, its format and its rules if the file exists."""
    if exists(folder, QUANT_FILE):
        contents = read_json(folder, QUANT_FILE)
        yield contents, MODELOPT, parse_file(contents)


def _from_config(_, config):
    """Yield each quantization config in ``config.json``, its format and its rules.

    The config of a multimodal model may hold one beside ``text_config`` and one inside, which must
    agree.
    """
    holders = [("", config), *((f"{part}: ", inner) for part, inner in nested_configs(config))]
    seen: list[Any] = []
    for place, holder in holders:
        for key in _SECTIONS:
            section = holder.get(key)
            if section is not None and section not in seen:
                seen.append(section)
                yield section, *_parse_section(section, f"{CONFIG}: {place}{key}")


def _parse_section(section, source):
    """Return the format and the rules of one quantization config."""
    if not isinstance(section, dict):
        raise CheckpointError(f"{source}: expected an object, got {quoted(section)}")
    method = section.get("quant_method")
    if method is None and not _MODELOPT_KEYS.isdisjoint(section):
        method = MODELOPT.quant_method  # the contents of hf_quant_config.json
    elif method is None and "config_groups" in section:
        method = COMPRESSED_TENSORS.quant_method
    for format in FORMATS:
        if format.claims(method):
            return format, format.parse(section, source)
    supported = ", ".join(format.quant_method for format in FORMATS)
    raise CheckpointError(
        f"{source}: quant_method {quoted(method)} is not supported{why_refused(method)}; "
        f"supported: {supported}"
    )


def _verdicts(format, rules) -> set:
    """Return what two configs must agree on, in all spellings; None for one that does nothing."""
    if rules is None:
        return {None}
    summaries = [rules.summary]
    if getattr(rules, "weights_only", False):
        summaries.append(WEIGHTS_ONLY_NAMES.get(rules.summary, rules.summary))
    return {(format.name, summary) for summary in summaries}


def _describe(format, rules):
    """Return what one config says, for a message."""
    return (
        f"{format.name} without an algorithm"
        if rules is None
        else (f"{rules.source} says {format.name} {rules.summary}")
    )
