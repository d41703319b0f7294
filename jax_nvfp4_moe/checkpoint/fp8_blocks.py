"""DeepSeek's own format: FP8 (E4M3) with one scale for each block of 128 x 128 weights.

``config.json`` says ``quant_method: fp8`` and ``weight_block_size: [128, 128]``. Which linears are
FP8, the tensors tell: routers, embeddings and norms are stored in bfloat16. In DeepSeek-V4 the
experts are MXFP4, see `mxfp4_experts`.

ModelOpt quantizes the experts of such a file to NVFP4 and leaves everything else as it is. It adds
``moe_quant_algo: NVFP4``, and lists the experts in ``hf_quant_config.json`` or in ``config.json``.

Source: https://github.com/NVIDIA/Model-Optimizer, `examples/deepseek/deepseek_v4`.
"""

import dataclasses
import fnmatch
from collections.abc import Mapping
from typing import Any

from jax_nvfp4_moe.checkpoint.errors import CheckpointError, quoted
from jax_nvfp4_moe.checkpoint.formats import (
    CheckpointFormat,
    Decision,
    KVCache,
    Rules,
    equivalent_names,
    names_in,
    parents,
)
from jax_nvfp4_moe.checkpoint.modelopt import ALGORITHMS, MODELOPT
from jax_nvfp4_moe.checkpoint.modelopt import parse as parse_modelopt
from jax_nvfp4_moe.numerics.fp8_blocks import SQUARE, BlockFP8
from jax_nvfp4_moe.scheme import Scheme

_EXCLUSIONS = ("modules_to_not_convert", "ignored_layers")
EXPERT_ALGORITHM = "moe_quant_algo"
_ROUTED = ".experts."


class BlockFP8Rules:
    """`formats.Rules` of linears and experts in FP8 with scales of blocks."""

    kv_cache: KVCache | None = None

    def __init__(self, section: Mapping[str, Any], source: str):
        self.source = source
        self.summary = "FP8 in blocks of 128 x 128"
        size = section.get("weight_block_size")
        if size != list(SQUARE):
            raise CheckpointError(
                [
                    f"{source}: weight_block_size: {quoted(size)} is not supported; supported: "
                    f"{list(SQUARE)}"
                ]
            )
        if section.get("fmt", "e4m3") != "e4m3":
            raise CheckpointError(
                [f"{source}: fmt: {quoted(section['fmt'])} is not supported; supported: e4m3"]
            )
        self._excluded = {
            name: f"{source}: {key} {quoted(name)}"
            for key in _EXCLUSIONS
            for name in names_in(section, key, source)
        }

    def decide(self, module: str) -> Decision:
        """Return how `module` is quantized: like all others, unless it is excluded."""
        for name in equivalent_names(module):
            for whole in (name, *parents(name)):
                for pattern, source in self._excluded.items():
                    if fnmatch.fnmatchcase(whole, pattern):
                        return Decision(None, source)
        return Decision(BlockFP8.SQUARE, f"{self.source}: quant_method fp8")


class ExpertRules:
    """`formats.Rules` of a file in FP8 whose experts were quantized again, to NVFP4.

    Attributes:
      kv_cache: None: such a file declares nothing.
      manifest: says which modules are NVFP4. None means all routed experts. Modules that it leaves
        out remain what they are in the file without it.
    """

    kv_cache: KVCache | None = None

    def __init__(self, base: BlockFP8Rules, scheme: Scheme, algorithm: str, manifest: Rules | None):
        self.source = manifest.source if manifest else base.source
        self.summary = f"{base.summary}, experts in {algorithm}"
        self.manifest = manifest
        self._base, self._scheme, self._algorithm = base, scheme, algorithm

    def with_manifest(self, manifest: Rules) -> "ExpertRules":
        """Return the rules of the same file with what another place says of NVFP4."""
        return ExpertRules(self._base, self._scheme, self._algorithm, manifest)

    def decide(self, module: str) -> Decision:
        """Return how `module` is quantized: in NVFP4, or as the base says."""
        if self.manifest is not None:
            listed = self.manifest.decide(module)
            return self._base.decide(module) if listed.scheme is None else listed
        if _ROUTED in f"{module}.":
            return Decision(self._scheme, f"{self.source}: {EXPERT_ALGORITHM} {self._algorithm}")
        return self._base.decide(module)


def parse(section: Mapping[str, Any], source: str) -> BlockFP8Rules | ExpertRules:
    """Parse a quantization config with ``quant_method: fp8``.

    Raises:
      CheckpointError: a field is not valid, or its value is not supported.
    """
    base = BlockFP8Rules(section, source)
    algorithm = section.get(EXPERT_ALGORITHM)
    if algorithm is None:
        return base
    known = {name: scheme for name, scheme in ALGORITHMS.items() if isinstance(scheme, Scheme)}
    if algorithm not in known:
        raise CheckpointError(
            [
                f"{source}: {EXPERT_ALGORITHM}: {quoted(algorithm)} is not supported; supported: "
                f"{', '.join(known)}"
            ]
        )
    manifest = parse_modelopt(section, source) if section.get("quantized_layers") else None
    return ExpertRules(base, known[algorithm], algorithm, manifest)


FP8_BLOCKS = CheckpointFormat(
    name="FP8",
    quant_method="fp8",
    names=dataclasses.replace(MODELOPT.names, block_scale="weight_scale_inv"),
    parse=parse,
    mx_experts=True,
)
# The experts have ModelOpt's names.
FP8_WITH_NVFP4_EXPERTS = dataclasses.replace(FP8_BLOCKS, names=MODELOPT.names)
