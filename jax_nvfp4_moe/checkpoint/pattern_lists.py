"""Find the entries of a long list of patterns that match a name, without trying each of them.

A file may list hundreds of thousands of patterns. Most patterns contain a literal text, such as
``layers.7.mlp`` in ``*.layers.7.mlp*``, and match no name without it. An index finds the patterns
whose literal text is part of a name, and only these are compiled and tried.
"""

import fnmatch
import re
from collections.abc import Iterable, Sequence
from typing import Protocol

from jax_nvfp4_moe.checkpoint.errors import CheckpointError, quoted
from jax_nvfp4_moe.checkpoint.regular_expressions import PatternError, RegularExpression

_REGEX = "re:"
# Regular expressions that are valid by their form alone. They are compiled when they are needed.
_SIMPLE = re.compile(r"\^?(?:[\w\-/]|\\[.\-/]|\\[dw][*+?]?|\.[*+?]?)*\$?")
_SIMPLE_PARTS = re.compile(r"\\[dw][*+?]?|\.[*+?]?|((?:[\w\-/]|\\[.\-/])+)")
_WILDCARD = re.compile(r"\[!?\]?[^\]]*\]|[*?\[]")
_MOST_ALIKE = 1000  # patterns that no literal text tells apart: all of them are tried


class Pattern(Protocol):
    """A pattern of names.

    Attributes:
      required: a text that is part of every name that the pattern matches; "" if none is known.
    """

    required: str

    def match(self, text: str) -> bool:
        """Return whether the pattern matches a name."""
        ...


class Wildcard:
    """A pattern of `fnmatch`, which matches a whole name; a `Pattern`."""

    def __init__(self, pattern: str):
        self._pattern, self._regex = pattern, None
        self.required = max(_WILDCARD.split(pattern), key=len)

    def match(self, text: str) -> bool:
        """Return whether the pattern matches a name, as `fnmatch.fnmatchcase` does."""
        # The translation has an atomic group for each star, so that it does not backtrack.
        self._regex = self._regex or re.compile(fnmatch.translate(self._pattern))
        return self._regex.match(text) is not None


class _SimpleExpression:
    """A regular expression in the form of `_SIMPLE`; a `Pattern`."""

    def __init__(self, pattern: str):
        self._pattern, self._compiled = pattern, None
        found = _SIMPLE_PARTS.findall(pattern)
        self.required = max((text.replace("\\", "") for text in found), key=len, default="")

    def match(self, text: str) -> bool:
        """Return whether the pattern matches a beginning of a name, as `re.match` does."""
        self._compiled = self._compiled or RegularExpression(self._pattern)
        return self._compiled.match(text)


def compile_expression(pattern: str, source: str) -> Pattern:
    """Return the pattern of a regular expression from a file.

    Raises:
      CheckpointError: the expression is not valid, or is one that cannot be matched in linear time.
    """
    if len(pattern) < 1000 and _SIMPLE.fullmatch(pattern):
        return _SimpleExpression(pattern)
    try:
        return RegularExpression(pattern)
    except PatternError as error:
        raise CheckpointError([f"{source}: pattern {quoted(pattern)} {error}"]) from None


class PatternIndex:
    """Finds the patterns of a list that match a name."""

    def __init__(self, patterns: Iterable[tuple[int, Pattern]], source: str):
        """Make the index.

        Args:
          patterns: pairs of a number and a pattern.
          source: the file and the key of the list, for messages.

        Raises:
          CheckpointError: too many patterns share their literal text, so that a search would try
            them all.
        """
        self._loose: list[tuple[int, Pattern]] = []  # without a literal text
        # length of the literal text -> literal text -> the patterns that contain it
        self._tables: dict[int, dict[str, list[tuple[int, Pattern]]]] = {}
        for number, pattern in patterns:
            if pattern.required:
                table = self._tables.setdefault(len(pattern.required), {})
                table.setdefault(pattern.required, []).append((number, pattern))
            else:
                self._loose.append((number, pattern))
        tables = [*self._tables.values(), {"": self._loose}]
        for text, alike in ((text, a) for table in tables for text, a in table.items()):
            if len(alike) > _MOST_ALIKE:
                raise CheckpointError(
                    [
                        f"{source}: {len(alike)} patterns have no longer literal text than "
                        f"{quoted(text)}; expected at most {_MOST_ALIKE} of them"
                    ]
                )

    def find(self, names: Iterable[str]) -> list[int]:
        """Return the numbers of all patterns that match any of the names, in order."""
        found = set()
        for name in names:
            found |= {number for number, one in self._candidates(name) if one.match(name)}
        return sorted(found)

    def _candidates(self, name):
        yield from self._loose
        for length, table in self._tables.items():
            if len(table) <= len(name):
                texts = [text for text in table if text in name]
            else:
                starts = range(len(name) - length + 1)
                texts = {name[start : start + length] for start in starts} & table.keys()
            for text in texts:
                yield from table[text]


class Entries:
    """A list whose entries are whole names of modules, or regular expressions after ``re:``."""

    def __init__(self, entries: Sequence[str], source: str):
        """Read a list.

        Args:
          entries: the entries.
          source: the file and the key of the list, for messages.

        Raises:
          CheckpointError: as for `compile_expression`; it lists all wrong entries.
        """
        self._names: dict[str, list[int]] = {}
        patterns, problems = [], []
        for number, entry in enumerate(entries):
            if not entry.startswith(_REGEX):
                self._names.setdefault(entry, []).append(number)
                continue
            try:
                patterns.append((number, compile_expression(entry.removeprefix(_REGEX), source)))
            except CheckpointError as error:
                problems += error.problems
        if problems:
            raise CheckpointError(problems)
        self._patterns = PatternIndex(patterns, source)

    def find(self, names: Sequence[str]) -> list[int]:
        """Return the numbers of all entries that match any of the names, in order."""
        whole = [number for name in names for number in self._names.get(name, ())]
        return sorted({*whole, *self._patterns.find(names)})
