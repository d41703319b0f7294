"""The format of gpt-oss as OpenAI publishes it: experts in MXFP4, everything else in bfloat16.

``config.json`` says ``quant_method: mxfp4`` and lists modules that are not quantized. Experts
become NVFP4 when they are read, see `weights.mxfp4`.
"""

from collections.abc import Mapping
from typing import Any

from jax_nvfp4_moe.checkpoint.errors import CheckpointError
from jax_nvfp4_moe.checkpoint.formats.config_keys import MXFP4_KEYS, find_unknown_keys
from jax_nvfp4_moe.checkpoint.formats.exclusions import Exclusions
from jax_nvfp4_moe.checkpoint.formats.kv_cache import read_kv_cache
from jax_nvfp4_moe.checkpoint.formats.modelopt import MODELOPT
from jax_nvfp4_moe.checkpoint.formats.rules import CheckpointFormat, Decision, names_in
from jax_nvfp4_moe.checkpoint.formats.transforms import find_transforms
from jax_nvfp4_moe.scheme import Scheme

_EXPERTS = "experts"
_EXCLUDED = "modules_to_not_convert"


class MXFP4Rules:
    """`rules.Rules` of experts in MXFP4: weights only."""

    schemes = (Scheme.W4A16,)

    def __init__(self, section: Mapping[str, Any], source: str):
        self.source = source
        self.summary = "MXFP4"
        problems = find_unknown_keys(section, MXFP4_KEYS, source)
        problems += find_transforms(section, source)
        if problems:
            raise CheckpointError(problems)
        self.kv_cache = read_kv_cache(section, source, multiply_by_reciprocal=True)
        self._excluded = Exclusions(
            names_in(section, _EXCLUDED, source),
            f"{source}: {_EXCLUDED}",
            wildcards_match_parents=True,
        )

    def choices(self, module: str) -> list[Decision]:
        """Return how `module` is quantized: not, unless it is an expert's or the experts' own."""
        excluded = self._excluded.find(module)
        if excluded:
            return [Decision(None, excluded)]
        if _EXPERTS not in module.split("."):
            return [Decision(None, f"{self.source}: quant_method mxfp4 means experts alone")]
        return [Decision(Scheme.W4A16, f"{self.source}: quant_method mxfp4, cast to NVFP4")]


MXFP4 = CheckpointFormat(
    name="MXFP4",
    quant_method="mxfp4",
    names=MODELOPT.names,  # of what the cast writes; the tensors of MXFP4 are `weights.mxfp4`'
    parse=MXFP4Rules,
    mx_experts=True,
)
