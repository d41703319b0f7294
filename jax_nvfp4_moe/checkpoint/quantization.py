"""Which modules of a checkpoint are quantized, and how: every place that says so, read at once."""

import dataclasses
import pathlib
from collections.abc import Mapping
from typing import Any

from jax_nvfp4_moe.checkpoint.compressed_tensors import COMPRESSED_TENSORS
from jax_nvfp4_moe.checkpoint.errors import CheckpointError, quoted
from jax_nvfp4_moe.checkpoint.folder import CONFIG, TEXT_CONFIGS, exists, read_json
from jax_nvfp4_moe.checkpoint.formats import CheckpointFormat, Decision, KVCache, Rules, TensorNames
from jax_nvfp4_moe.checkpoint.modelopt import MODELOPT, QUANT_FILE, parse_file
from jax_nvfp4_moe.scheme import CheckpointScheme

FORMATS = (MODELOPT, COMPRESSED_TENSORS)
_MXFP4 = "mxfp4"  # OpenAI's own gpt-oss
_SECTIONS = ("quantization_config", "compression_config")  # the second: old llm-compressor


@dataclasses.dataclass(frozen=True)
class QuantConfig:
    """What a checkpoint declares about its modules.

    Attributes:
      format: None where nothing is quantized.
      rules: one for each place that declares; they must agree on every module that is loaded.
    """

    format: CheckpointFormat | None = None
    rules: tuple[Rules, ...] = ()
    _known: dict[str, Decision] = dataclasses.field(default_factory=dict, compare=False)

    @property
    def names(self) -> TensorNames:
        """Names of the tensors of a quantized linear; ModelOpt's where nothing is quantized."""
        return (self.format or MODELOPT).names

    @property
    def kv_cache(self) -> KVCache | None:
        """What the first place that says anything says of the cache of keys and values."""
        return next((rules.kv_cache for rules in self.rules if rules.kv_cache), None)

    def decide(self, module: str) -> Decision:
        """Return how `module`, such as "model.layers.0.self_attn.q_proj", is quantized, and why.

        Raises:
          CheckpointError: two places disagree about it, or it is quantized to a format that is
            not supported.
        """
        if module not in self._known:
            self._known[module] = self._agreed(module)
        return self._known[module]

    def checkpoint_scheme(self, module: str) -> CheckpointScheme:
        """Return the scheme of `module` as `decide` does; None = dense."""
        return self.decide(module).scheme

    def _agreed(self, module):
        if not self.rules:
            return Decision(None, "no quantization config")
        said = {rules.source: rules.decide(module) for rules in self.rules}
        if len({decision.scheme for decision in said.values()}) > 1:
            each = "; ".join(
                f"{source} says {decision.scheme or 'dense'}" for source, decision in said.items()
            )
            raise CheckpointError([f"{quoted(module)}: {each}"])
        return next(iter(said.values()))


def read_quant_config(folder: str | pathlib.Path, config: Mapping[str, Any]) -> QuantConfig:
    """Read the quantization config of a checkpoint.

    Args:
      folder: may hold ``hf_quant_config.json``.
      config: the parsed ``config.json``, which may have ``quantization_config``.

    Raises:
      CheckpointError: an algorithm is unknown or not supported, or the two disagree.
    """
    problems: list[str] = []
    found: list[tuple[CheckpointFormat, Rules | None]] = []
    for read in (_from_file, _from_config):
        try:
            found += read(pathlib.Path(folder), config)
        except CheckpointError as error:
            problems += error.problems
    if not problems and len({_verdict(format, rules) for format, rules in found}) > 1:
        problems.append(
            "the quantization configs disagree: "
            + "; ".join(_describe(format, rules) for format, rules in found)
        )
    if problems:
        raise CheckpointError(problems, str(folder))
    rules = tuple(rules for _, rules in found if rules is not None)
    return QuantConfig(found[0][0], rules) if rules else QuantConfig()


def _from_file(folder, _):
    if exists(folder, QUANT_FILE):
        yield MODELOPT, parse_file(read_json(folder, QUANT_FILE))


def _from_config(_, config):
    holders = [("", config), *((f"{key}: ", config.get(key)) for key in TEXT_CONFIGS)]
    for place, holder in holders:
        for key in _SECTIONS:
            section = holder.get(key) if isinstance(holder, dict) else None
            if section is not None:
                yield _parse_section(section, f"{CONFIG}: {place}{key}")
                return


def _parse_section(section, source):
    if not isinstance(section, dict):
        raise CheckpointError([f"{source}: expected an object, got {quoted(section)}"])
    method = section.get("quant_method")
    for format in FORMATS:
        if format.claims(method):
            return format, format.parse(section, source)
    supported = ", ".join(format.quant_method for format in FORMATS)
    if method == _MXFP4:
        raise CheckpointError(
            [
                f"{source}: quant_method {quoted(method)}: the checkpoint holds MXFP4 (blocks of "
                "32, scales that are powers of two), not NVFP4: quantize it to NVFP4 first; "
                f"supported: {supported}"
            ]
        )
    raise CheckpointError(
        [f"{source}: unknown quant_method {quoted(method)}; supported: {supported}"]
    )


def _verdict(format, rules):
    return None if rules is None else (format.name, rules.summary)


def _describe(format, rules):
    return (
        f"{format.name} without an algorithm"
        if rules is None
        else (f"{rules.source} says {format.name} {rules.summary}")
    )
