"""Find the groups of ``config_groups`` whose targets mean a module."""

import re
from collections.abc import Sequence

from jax_nvfp4_moe.checkpoint.formats import equivalent_names
from jax_nvfp4_moe.checkpoint.pattern_lists import Entries

_EXPERTS = ".experts."
# torch's class of linears and vLLM's. A pattern may match a class in place of a name.
_LINEARS = ("Linear", "LinearBase")
_EXPERT_CLASS = "FusedMoE"
_HEAD_CLASS = "ParallelLMHead"
# Classes of blocks of experts, such as Qwen3MoeSparseMoeBlock, Llama4TextExperts and DeepseekV3MoE.
_EXPERT_CLASSES = re.compile(r"\w*(moe|experts|moeblock|moelayer)", re.IGNORECASE)


class Targets:
    """A list of targets: names of modules, patterns after ``re:``, and classes."""

    def __init__(self, targets: Sequence[str], source: str):
        """Read a list.

        Raises:
          CheckpointError: as for `pattern_lists.Entries`.
        """
        self._entries = Entries(targets, source)
        linears = {n for n, target in enumerate(targets) if re.fullmatch(r"\w*Linear", target)}
        self._linears = linears | set(self._entries.find(_LINEARS))
        experts = {n for n, target in enumerate(targets) if _EXPERT_CLASSES.fullmatch(target)}
        self._experts = experts | set(self._entries.find((_EXPERT_CLASS,)))
        self._heads = set(self._entries.find((_HEAD_CLASS,)))

    def by_name(self, module: str) -> list[int]:
        """Return the numbers of the targets that match the name of a module, in order.

        A target that is the name of a block of experts means all linears in that block.
        """
        names = equivalent_names(module)
        if _EXPERTS in module:
            blocks = (name.partition(_EXPERTS)[0] + _EXPERTS[:-1] for name in names)
            names = list(dict.fromkeys([*names, *blocks]))
        return self._entries.find(names)

    def by_class(self, module: str) -> list[int]:
        """Return the numbers of the targets that name the class of a module, in order."""
        found = set(self._linears)
        if _EXPERTS in module:
            found |= self._experts
        if module.rpartition(".")[2] == "lm_head":
            found |= self._heads
        return sorted(found)

    def find(self, module: str) -> list[int]:
        """Return the numbers of all targets that mean a module.

        Those that match its name come before those that name its class, and each kind is in order.
        """
        return list(dict.fromkeys([*self.by_name(module), *self.by_class(module)]))
