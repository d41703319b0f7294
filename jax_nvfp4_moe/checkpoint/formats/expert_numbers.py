"""Tell whether a quantization config may treat the experts of one layer differently.

A checkpoint has tens of thousands of experts, and a config hardly ever names one of them. Unless it
does, what it says of one expert holds for all experts of the layer, and its lists are searched once
for them.

The test looks at the text of the config alone. A pattern whose meaning is not plain counts as one
that may tell experts apart, which costs time and changes nothing else.
"""

import re
from collections.abc import Iterator
from typing import Any

# A linear of one expert: what stands before its number, the number, and what stands behind it.
_LINEAR_OF_EXPERT = re.compile(r"(.+\.experts\.)[0-9]+(\.[a-z]\w*)")
# The number of a layer, which is the same for all of its experts.
_LAYER = re.compile(r"layers\\?\.(?:[0-9]+|(?:\\d|\[0-9\])[+*]?)")
# In a name or a wildcard: a number that no letter precedes, as one does in "w1", or a character
# that may stand for a digit. A star stands for whole numbers, and so for any of them.
_TELLING = re.compile(r"(?<!\w)[0-9]|[?\[]")
# A regular expression of letters, escaped punctuation, ``.*``, ``\w*``, whole numbers between dots,
# and alternatives that do not repeat. A dot between two letters cannot stand for a digit of a
# number that dots enclose.
_REGEX = "re:"
_BLIND = re.compile(
    r"(?:[A-Za-z_^$|]|(?<=\w)[0-9]|\\[.\-/]|\.\*\??|\\w\*|(?<=[A-Za-z_])\.(?=[A-Za-z_])"
    r"|\\\.(?:\\d|\[0-9\])\+(?=\\\.)|\(\?:|\(|\)(?![*+?{]))*"
)
_OF_THE_WRITER = ("producer", "version")  # keys whose values are no rules, and have numbers


def without_expert_number(module: str) -> str:
    """Return a name that all experts of a layer share for this linear, or `module` itself."""
    found = _LINEAR_OF_EXPERT.fullmatch(module)
    return f"{found[1]}*{found[2]}" if found else module


def tells_experts_apart(section: Any) -> bool:
    """Return whether a quantization config may say something else of one expert than of another.

    Args:
      section: the parsed config, with all its lists and tables.
    """
    return any(map(_tells_apart, _texts(section)))


def _tells_apart(text: str) -> bool:
    """Return whether a name, a wildcard or an expression may depend on the number of an expert."""
    name, _, expression = _LAYER.sub("layers", text).partition(_REGEX)
    return _TELLING.search(name) is not None or _BLIND.fullmatch(expression) is None


def _texts(section) -> Iterator[str]:
    """Yield all keys and all texts of a parsed config."""
    waiting = [section]
    while waiting:
        one = waiting.pop()
        if isinstance(one, str):
            yield one
        elif isinstance(one, list):
            waiting += one
        elif isinstance(one, dict):
            yield from one
            waiting += [value for key, value in one.items() if key not in _OF_THE_WRITER]
