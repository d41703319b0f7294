"""Find the entries of a long list of patterns that match a name, without trying each of them.

A file may list hundreds of thousands of patterns. Most patterns contain a literal text, such as
``layers.7.mlp`` in ``*.layers.7.mlp*``, and match no name without it. An index finds the patterns
whose literal text is part of a name, and only these are compiled and tried.
"""

import fnmatch
import re
from collections.abc import Iterable, Sequence
from typing import Protocol

from jax_nvfp4_moe.checkpoint.errors import CheckpointError, Problems, quoted
from jax_nvfp4_moe.checkpoint.formats.regular_expressions import PatternError, RegularExpression

_REGEX = "re:"
# Regular expressions that are valid by their form alone. They are compiled when they are needed.
_SIMPLE = re.compile(r"\^?(?:[\w\-/]|\\[.\-/]|\\[dw][*+?]?|\.[*+?]?)*\$?")
_SIMPLE_PARTS = re.compile(r"\\[dw][*+?]?|\.[*+?]?|((?:[\w\-/]|\\[.\-/])+)")
_WILDCARD = re.compile(r"\[!?\]?[^\]]*\]|[*?\[]")
_DIGITS = re.compile(r"(?:\\d|\[0-9\])[*+]")
_ATOM = re.compile(r"\\.|\[\^?\]?(?:[^\]\\]|\\.)*\]", re.DOTALL)
_REPEAT = re.compile(r"(?<!\()[*+?{]")
_REPEATED_GROUP = re.compile(r"\)[*+?{]")
_FEW = 32  # patterns that are looked at one by one
_SHORT = 128  # characters of a name
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


class _Expression:
    """A regular expression that is compiled when it is needed; a `Pattern`.

    Python's `re` is faster than `RegularExpression`. It matches short names, by patterns that
    cannot make it backtrack for long.
    """

    def __init__(self, pattern: str, compiled: RegularExpression | None = None):
        self._pattern, self._compiled, self._quick = pattern, compiled, None
        self._is_cheap = _is_cheap(pattern)
        if compiled is not None:
            self.required = compiled.required
        else:
            found = _SIMPLE_PARTS.findall(pattern)
            self.required = max((text.replace("\\", "") for text in found), key=len, default="")

    def match(self, text: str) -> bool:
        """Return whether the pattern matches a beginning of a name, as `re.match` does."""
        if self._is_cheap and len(text) <= _SHORT:
            self._quick = self._quick or re.compile(self._pattern)
            return self._quick.match(text) is not None
        self._compiled = self._compiled or RegularExpression(self._pattern)
        return self._compiled.match(text)


def _is_cheap(pattern) -> bool:
    """Return whether `re` needs at most some thousand steps to match a short name.

    The pattern then has at most two repeats, each of a single character, and few alternatives.
    Repeats of digits do not count: the names of modules have few digits in a row.
    """
    plain = _ATOM.sub("x", _DIGITS.sub("", pattern))
    return (
        len(_REPEAT.findall(plain)) <= 2
        and plain.count("(") <= 2
        and plain.count("|") <= 8
        and not _REPEATED_GROUP.search(plain)
    )


def compile_expression(pattern: str, source: str) -> Pattern:
    """Return the pattern of a regular expression from a file.

    Raises:
      CheckpointError: the expression is not valid, or is one that cannot be matched in linear time.
    """
    if len(pattern) < 1000 and _SIMPLE.fullmatch(pattern):
        return _Expression(pattern)
    try:
        return _Expression(pattern, RegularExpression(pattern))
    except PatternError as error:
        raise CheckpointError(f"{source}: pattern {quoted(pattern)} {error}") from None


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
        every = [one for table in tables for alike in table.values() for one in alike]
        few = [(one.required, number, one) for number, one in every]
        self._few = few if len(few) <= _FEW else None
        for text, alike in ((text, a) for table in tables for text, a in table.items()):
            if len(alike) > _MOST_ALIKE:
                raise CheckpointError(
                    f"{source}: {len(alike)} patterns have no longer literal text than "
                    f"{quoted(text)}; expected at most {_MOST_ALIKE} of them"
                )

    def find(self, names: Iterable[str]) -> list[int]:
        """Return the numbers of all patterns that match any of the names, in order."""
        found = set()
        for name in names:
            for number, one in self._candidates(name):
                if number not in found and one.match(name):
                    found.add(number)
        return sorted(found)

    def _candidates(self, name) -> Iterable[tuple[int, Pattern]]:
        """Return the patterns that may match a name."""
        if self._few is not None:
            return [(number, one) for text, number, one in self._few if text in name]
        return self._search(name)

    def _search(self, name):
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
          entries: the entries. An empty one matches nothing.
          source: the file and the key of the list, for messages.

        Raises:
          CheckpointError: as for `compile_expression`; it lists all wrong entries.
        """
        self._names: dict[str, list[int]] = {}
        patterns, problems = [], Problems()
        for number, entry in enumerate(entries):
            if not entry.startswith(_REGEX):
                if entry:
                    self._names.setdefault(entry, []).append(number)
                continue
            with problems.collected():
                patterns.append((number, compile_expression(entry.removeprefix(_REGEX), source)))
        problems.finish()
        self._patterns, self._has_patterns = PatternIndex(patterns, source), bool(patterns)

    def __bool__(self) -> bool:
        return bool(self._names) or self._has_patterns

    def find(self, names: Sequence[str]) -> list[int]:
        """Return the numbers of all entries that match any of the names, in order."""
        whole = [number for name in names for number in self._names.get(name, ())]
        return sorted({*whole, *self._patterns.find(names)} if self._has_patterns else set(whole))
