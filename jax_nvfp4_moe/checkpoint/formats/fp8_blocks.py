"""DeepSeek's own format: FP8 (E4M3) with one scale for each block of 128 x 128 weights.

``config.json`` says ``quant_method: fp8`` and ``weight_block_size: [128, 128]``. Which linears are
FP8, the tensors tell: routers, embeddings and norms are stored in bfloat16. In DeepSeek-V4 the
experts are MXFP4, see `weights.mxfp4`.

ModelOpt quantizes the experts of such a file to NVFP4 and leaves everything else as it is. It adds
``moe_quant_algo: NVFP4``, and lists the experts in ``hf_quant_config.json`` or in ``config.json``.

Source: https://github.com/NVIDIA/Model-Optimizer, `examples/deepseek/deepseek_v4`.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from jax_nvfp4_moe.checkpoint.errors import CheckpointError, Problems, quoted
from jax_nvfp4_moe.checkpoint.formats.config_keys import FP8_KEYS, MODELOPT_KEYS, find_unknown_keys
from jax_nvfp4_moe.checkpoint.formats.exclusions import Exclusions
from jax_nvfp4_moe.checkpoint.formats.kv_cache import read_kv_cache
from jax_nvfp4_moe.checkpoint.formats.modelopt import ALGORITHMS, MODELOPT, read_activations
from jax_nvfp4_moe.checkpoint.formats.modelopt import parse as parse_modelopt
from jax_nvfp4_moe.checkpoint.formats.rules import (
    CheckpointFormat,
    Decision,
    KVCache,
    Rules,
    names_in,
)
from jax_nvfp4_moe.checkpoint.formats.transforms import find_transforms
from jax_nvfp4_moe.numerics.fp8_blocks import SQUARE, BlockFP8
from jax_nvfp4_moe.scheme import CheckpointScheme, Scheme

_EXCLUSIONS = ("modules_to_not_convert", "ignored_layers")
EXPERT_ALGORITHM = "moe_quant_algo"
_ROUTED = ".experts."
_OWN = (FP8_KEYS.read | FP8_KEYS.harmless.keys()) - MODELOPT_KEYS.read


class BlockFP8Rules:
    """`rules.Rules` of linears and experts in FP8 with scales of blocks."""

    schemes = (BlockFP8.SQUARE,)

    def __init__(self, section: Mapping[str, Any], source: str):
        self.source = source
        self.summary = "FP8 in blocks of 128 x 128"
        size = section.get("weight_block_size")
        if size != list(SQUARE):
            raise CheckpointError(
                f"{source}: weight_block_size: {quoted(size)} is not supported; supported: "
                f"{list(SQUARE)}"
            )
        if section.get("fmt", "e4m3") != "e4m3":
            raise CheckpointError(
                f"{source}: fmt: {quoted(section['fmt'])} is not supported; supported: e4m3"
            )
        self.kv_cache = read_kv_cache(section, source, multiply_by_reciprocal=True)
        self._excluded = [
            Exclusions(
                names_in(section, key, source), f"{source}: {key}", wildcards_match_parents=True
            )
            for key in _EXCLUSIONS
        ]

    def choices(self, module: str) -> list[Decision]:
        """Return how `module` is quantized: like all others, unless it is excluded."""
        for excluded in self._excluded:
            found = excluded.find(module)
            if found:
                return [Decision(None, found)]
        return [Decision(BlockFP8.SQUARE, f"{self.source}: quant_method fp8")]


class ExpertRules:
    """`rules.Rules` of a file in FP8 whose experts were quantized again, to NVFP4.

    Attributes:
      kv_cache: None: such a file declares nothing.
      manifest: says which modules are NVFP4. None means all routed experts. Modules that it leaves
        out remain what they are in the file without it.
    """

    def __init__(self, base: BlockFP8Rules, experts: "_Experts", manifest: Rules | None):
        self.source = manifest.source if manifest else base.source
        self.summary = f"{base.summary}, experts in {experts.algorithm}"
        self.kv_cache: KVCache | None = base.kv_cache
        self.schemes: Sequence[CheckpointScheme] = (*base.schemes, experts.scheme)
        self.manifest = manifest
        self._base, self._experts = base, experts

    def with_manifest(self, manifest: Rules) -> "ExpertRules":
        """Return the rules of the same file with what another place says of NVFP4."""
        return ExpertRules(self._base, self._experts, manifest)

    def choices(self, module: str) -> list[Decision]:
        """Return how `module` is quantized: in NVFP4, or as the base says."""
        if self.manifest is not None:
            listed = self.manifest.choices(module)
            return self._base.choices(module) if listed[0].scheme is None else listed
        if _ROUTED in f"{module}.":
            return [self._experts.decide(module, self.source)]
        return self._base.choices(module)


class _Experts:
    """The algorithm of experts that were quantized again, and what is said of their activations."""

    def __init__(self, section: Mapping[str, Any], algorithm: str, scheme: Scheme, source: str):
        self.algorithm, self.scheme = algorithm, scheme
        self._activations = read_activations(section, source)

    def decide(self, module: str, source: str) -> Decision:
        """Return how an expert is quantized."""
        decision = Decision(self.scheme, f"{source}: {EXPERT_ALGORITHM} {self.algorithm}")
        return self._activations.refine(module, decision)


def parse(section: Mapping[str, Any], source: str) -> BlockFP8Rules | ExpertRules:
    """Parse a quantization config with ``quant_method: fp8``.

    Raises:
      CheckpointError: a field is not valid, or its value is not supported.
    """
    problems = Problems(find_unknown_keys(section, FP8_KEYS, source))
    problems += find_transforms(section, source)
    with problems.collected():
        base = BlockFP8Rules(section, source)
    problems.finish()
    algorithm = section.get(EXPERT_ALGORITHM)
    if algorithm is None:
        return base
    known = {name: scheme for name, scheme in ALGORITHMS.items() if isinstance(scheme, Scheme)}
    if algorithm not in known:
        raise CheckpointError(
            f"{source}: {EXPERT_ALGORITHM}: {quoted(algorithm)} is not supported; supported: "
            f"{', '.join(known)}"
        )
    experts = _Experts(section, algorithm, known[algorithm], source)
    listed = {key: value for key, value in section.items() if key not in _OWN}
    manifest = parse_modelopt(listed, source) if section.get("quantized_layers") else None
    return ExpertRules(base, experts, manifest)


FP8_BLOCKS = CheckpointFormat(
    name="FP8",
    quant_method="fp8",
    names=dataclasses.replace(MODELOPT.names, block_scale="weight_scale_inv"),
    parse=parse,
    mx_experts=True,
)
# The experts have ModelOpt's names.
FP8_WITH_NVFP4_EXPERTS = dataclasses.replace(FP8_BLOCKS, names=MODELOPT.names)
