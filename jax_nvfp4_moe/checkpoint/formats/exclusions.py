"""The modules that a quantization config excludes, by name or by wildcard."""

import functools
import re
from collections.abc import Iterable

from jax_nvfp4_moe.checkpoint.errors import quoted
from jax_nvfp4_moe.checkpoint.formats.pattern_lists import PatternIndex, Wildcard
from jax_nvfp4_moe.checkpoint.formats.rules import equivalent_names, parents

_WILDCARD = re.compile(r"[*?\[]")


class Exclusions:
    """The modules that a config excludes: by name with everything inside them, or by wildcard."""

    def __init__(
        self,
        patterns: Iterable[str],
        source: str,
        *,
        parts_match: bool = False,
        wildcards_match_parents: bool = False,
    ):
        """Read a list of exclusions.

        Args:
          patterns: the entries of the list.
          source: the file and the key of the list, for messages.
          parts_match: whether a name without wildcards matches anywhere in the name of a module.
          wildcards_match_parents: whether a wildcard that matches a module excludes all inside it.
        """
        self._source = source
        self._parts_match, self._parents_match = parts_match, wildcards_match_parents
        patterns = list(dict.fromkeys(patterns))
        self._names = frozenset(p for p in patterns if not _WILDCARD.search(p))
        wild = [p for p in patterns if _WILDCARD.search(p)]
        # Exporters write hundreds of patterns "NAME*". A set of their beginnings finds a match in
        # one look-up per length.
        self._beginnings = frozenset(p[:-1] for p in wild if p[-1] == "*" and _is_plain(p[:-1]))
        self._lengths = sorted({len(beginning) for beginning in self._beginnings})
        self._wildcards = [p for p in wild if p[:-1] not in self._beginnings or p[-1] != "*"]
        self._index = PatternIndex(enumerate(map(Wildcard, self._wildcards)), source)
        # A file has tens of thousands of linears of experts, and few modules that contain them:
        # only the latter are kept.
        self._around = functools.cache(self._named)

    def find(self, module: str) -> str | None:
        """Return the source and the entry that excludes `module`, or None."""
        found = next(filter(None, map(self._match, equivalent_names(module))), None)
        return found and f"{self._source} {quoted(found)}"

    def _match(self, name):
        """Return the entry that matches the name, or the name of a module that contains it."""
        if named := self._named(name):
            return named
        for length in self._lengths:
            if name[:length] in self._beginnings:
                return f"{name[:length]}*"
        # Only whole components match. Otherwise an excluded router "mlp.gate" would exclude
        # "mlp.gate_proj" too.
        for part in _parts(name) if self._parts_match else ():
            if part in self._names:
                return part
        if not self._wildcards:
            return None
        found = self._index.find((name, *parents(name)) if self._parents_match else (name,))
        return self._wildcards[found[0]] if found else None

    def _named(self, name):
        """Return the name, or that of the innermost module around it, that the list has."""
        if name in self._names:
            return name
        parent = name.rpartition(".")[0]
        return self._around(parent) if parent else None


def _is_plain(text):
    return not _WILDCARD.search(text)


def _parts(name):
    """Yield all runs of whole components: "a", "a.b", "b" for "a.b"."""
    components = name.split(".")
    for first in range(len(components)):
        for stop in range(first + 1, len(components) + 1):
            yield ".".join(components[first:stop])
