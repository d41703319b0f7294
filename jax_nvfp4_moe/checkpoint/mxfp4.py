"""The format of gpt-oss as OpenAI publishes it: experts in MXFP4, everything else in bfloat16.

``config.json`` says ``quant_method: mxfp4`` and lists modules that are not quantized. Experts
become NVFP4 when they are read, see `mxfp4_experts`.
"""

import fnmatch
from collections.abc import Mapping
from typing import Any

from jax_nvfp4_moe.checkpoint.formats import (
    CheckpointFormat,
    Decision,
    KVCache,
    equivalent_names,
    names_in,
    parents,
)
from jax_nvfp4_moe.checkpoint.modelopt import MODELOPT
from jax_nvfp4_moe.scheme import Scheme

_EXPERTS = "experts"


class MXFP4Rules:
    """`formats.Rules` of experts in MXFP4: weights only."""

    kv_cache: KVCache | None = None

    def __init__(self, section: Mapping[str, Any], source: str):
        self.source = source
        self.summary = "MXFP4"
        self._excluded = names_in(section, "modules_to_not_convert", source)

    def decide(self, module: str) -> Decision:
        """Return how `module` is quantized: not, unless it is an expert's or the experts' own."""
        for name in equivalent_names(module):
            for whole in (name, *parents(name)):
                for pattern in self._excluded:
                    if fnmatch.fnmatchcase(whole, pattern):
                        key = f"{self.source}: modules_to_not_convert"
                        return Decision(None, f"{key} {pattern!r}")
        if _EXPERTS not in module.split("."):
            return Decision(None, f"{self.source}: quant_method mxfp4 means experts alone")
        return Decision(Scheme.W4A16, f"{self.source}: quant_method mxfp4, cast to NVFP4")


MXFP4 = CheckpointFormat(
    name="MXFP4",
    quant_method="mxfp4",
    names=MODELOPT.names,  # of what the cast writes; the tensors of MXFP4 are `mxfp4_experts`'
    parse=MXFP4Rules,
    mx_experts=True,
)
