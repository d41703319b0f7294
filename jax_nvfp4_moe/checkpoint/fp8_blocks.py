"""DeepSeek's own format: FP8 (E4M3) with one scale for each block of 128 x 128 weights.

``config.json`` says ``quant_method: fp8`` and ``weight_block_size: [128, 128]``. Which linears are
FP8, the tensors tell: routers, embeddings and norms are stored in bfloat16. In DeepSeek-V4 the
experts are MXFP4, see `mxfp4_experts`.
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
    equivalent_names,
    names_in,
    parents,
)
from jax_nvfp4_moe.checkpoint.modelopt import MODELOPT
from jax_nvfp4_moe.numerics.fp8_blocks import SQUARE, BlockFP8

_EXCLUSIONS = ("modules_to_not_convert", "ignored_layers")


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


FP8_BLOCKS = CheckpointFormat(
    name="FP8",
    quant_method="fp8",
    names=dataclasses.replace(MODELOPT.names, block_scale="weight_scale_inv"),
    parse=BlockFP8Rules,
    mx_experts=True,
)
