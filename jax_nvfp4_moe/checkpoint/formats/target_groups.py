"""Find the groups of ``config_groups`` whose targets mean a module."""

import re
from collections.abc import Sequence

from jax_nvfp4_moe.checkpoint.formats.pattern_lists import Entries
from jax_nvfp4_moe.checkpoint.formats.rules import equivalent_names

_EXPERTS = ".experts."
# torch's class of linears and vLLM's. A pattern may match a class in place of a name.
_LINEARS = ("Linear", "LinearBase")
_LINEAR_CLASSES = re.compile(r"\w*Linear|LinearBase")
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
        linears = {n for n, target in enumerate(targets) if _LINEAR_CLASSES.fullmatch(target)}
        # An empty entry matches no name, and keeps the numbers of the others.
        self._entries = Entries(
            ["" if n in linears else target for n, target in enumerate(targets)], source
        )
        self._linears = linears | set(self._entries.find(_LINEARS))
        experts = {n for n, target in enumerate(targets) if _EXPERT_CLASSES.fullmatch(target)}
        self._experts = experts | set(self._entries.find((_EXPERT_CLASS,)))
        self._heads = set(self._entries.find((_HEAD_CLASS,)))

    def by_name(self, names: Sequence[str]) -> list[int]:
        """Return the numbers of the targets that match any of `names_of` a module, in order."""
        return self._entries.find(names)

    def by_class(self, module: str) -> list[int]:
        """Return the numbers of the targets that name the class of a module, in order."""
        found = set(self._linears)
        if _EXPERTS in module:
            found |= self._experts
        if module.rpartition(".")[2] == "lm_head":
            found |= self._heads
        return sorted(found)

    def find(self, module: str, names: Sequence[str] | None = None) -> list[int]:
        """Return the numbers of all targets that mean a module.

        Those that match its name come before those that name its class, and each kind is in order.

        Args:
          module: the module.
          names: the `names_of` the module. None finds them.
        """
        named = []
        if self._entries:
            named = self.by_name(names_of(module) if names is None else names)
        return list(dict.fromkeys([*named, *self.by_class(module)]))


def names_of(module: str) -> list[str]:
    """Return the names by which a target may mean a module.

    A target that is the name of a block of experts means all linears in that block.
    """
    names = equivalent_names(module)
    if _EXPERTS not in module:
        return list(names)
    blocks = [name.partition(_EXPERTS)[0] + _EXPERTS[:-1] for name in names]
    return list(dict.fromkeys([*names, *blocks]))
