"""Match regular expressions of an untrusted file in a time that is linear in the text.

Python's `re` backtracks, and a pattern such as ``.*a.*b.*c.*d`` may take hours for one name. Here a
pattern becomes an automaton that visits each character once. It decides as `re.match` does: the
match begins at the start of the text and may end anywhere.

The automaton reads the text backwards. At each position it knows the states from which the rest of
the text is accepted. A look-ahead is then one more state to ask for, because the text that it looks
at has been read already.
"""

import re
import warnings
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

_LONGEST = 10_000  # characters of a pattern
_MOST_STATES = 5_000  # of one pattern; a{1000}b{1000} has 2000
_MOST_REMEMBERED = 100_000  # states in all sets of one pattern; beyond, they are computed again
_QUANTIFIER = re.compile(r"[*+?]|\{(?:(\d+)|(\d*),(\d*))\}")
_LEADING_FLAGS = re.compile(r"\(\?([is]+)\)")
_GROUP = re.compile(r"\((?:\?(?::|P<\w+>|=|!)|(?!\?))")
_SET = re.compile(r"\[\^?\]?(?:[^\]\\]|\\.)*\]", re.DOTALL)
_ESCAPE = re.compile(
    r"\\(?:x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|U[0-9a-fA-F]{8}|N\{[^}]*\}|0[0-7]{0,2}|[0-7]{3}|.)",
    re.DOTALL,
)
_START, _END, _LAST, _BORDER, _INSIDE = 1, 2, 4, 8, 16  # bits of `_conditions_at`
_ANCHORS = {
    "^": _START,
    r"\A": _START,
    r"\Z": _END,
    "$": _LAST,
    r"\b": _BORDER,
    r"\B": _INSIDE,
}
_REFUSED = (
    ("(?<=", "a look-behind"),
    ("(?<!", "a look-behind"),
    ("(?>", "an atomic group"),
    ("(?P=", "a back-reference"),
    ("(?(", "a condition on a group"),
    ("(?#", "a comment"),
    ("(?", "flags inside of the pattern"),
)


class PatternError(ValueError):
    """Report that a text is no regular expression, or has a part that is not supported."""


class _Accept(NamedTuple):
    """The state that accepts any text."""


class _Char(NamedTuple):
    """A state that accepts one character, and then what the state `next` accepts."""

    accepts: Callable[[str], Any]
    next: int


class _Branch(NamedTuple):
    """A state that accepts what any of other states accepts."""

    nexts: list[int]


class _Anchor(NamedTuple):
    """A state that is passed where a bit of `_conditions_at` holds."""

    bit: int
    next: int


class _Look(NamedTuple):
    """A state that is passed where the state `start` accepts the text, or does not."""

    start: int
    positive: bool
    next: int


class RegularExpression:
    """One pattern, compiled.

    Attributes:
      required: a text that is part of every name that the pattern matches; "" if none is known.
    """

    def __init__(self, pattern: str):
        """Compile a pattern.

        Raises:
          PatternError: the pattern is no regular expression, is too large, or has a part that is
            not supported. The message names the part.
        """
        if len(pattern) > _LONGEST:
            raise PatternError(f"has {len(pattern)} characters; expected at most {_LONGEST}")
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                re.compile(pattern)
            parsed = _Parser(pattern)
            program = _Program()
            self._start = program.emit(parsed.root, program.accept(0), 0)
        except (re.error, RecursionError, OverflowError) as error:
            raise PatternError(f"is no regular expression: {error}") from None
        self.required = parsed.required
        self._states = program.states
        depth = program.depths
        # The states inside look-aheads come first, because those around them ask for them.
        self._layers = [
            [state for state, at in enumerate(depth) if at == layer]
            for layer in range(max(depth), -1, -1)
        ]
        self._sources = _find_sources(self._states)
        self._asked = sum({state.bit for state in self._states if isinstance(state, _Anchor)})
        self._forget()

    def match(self, text: str) -> bool:
        """Return whether the pattern matches a beginning of the text, as `re.match` does."""
        everywhere = bool(self._asked & (_BORDER | _INSIDE))
        at = self._step(0, "", _conditions_at(text, len(text)))
        for position in range(len(text) - 1, -1, -1):
            char = text[position]
            # Anchors but those of words hold at the ends of a text alone.
            if everywhere or position == 0 or char == "\n":
                at = self._step(at, char, _conditions_at(text, position))
            else:
                found = self._steps[at].get(char)
                at = self._step(at, char, 0) if found is None else found
        return self._start in self._sets[at]

    def _forget(self):
        """Forget all steps. Number 0 stands for the empty set of states, after the end."""
        self._kept = 0
        self._sets: list[frozenset[int]] = [frozenset()]
        self._numbers: dict[frozenset[int], int] = {frozenset(): 0}
        self._steps: list[dict[str | tuple[str, int], int]] = [{}]

    def _step(self, after, char, conditions) -> int:
        """Return the number of the set of states at one position, remembered or computed.

        Args:
          after: the number of the set at the next position.
          char: as for `_find_states`.
          conditions: as for `_find_states`.
        """
        conditions &= self._asked
        key = (char, conditions) if conditions else char
        found = self._steps[after].get(key)
        if found is not None:
            return found
        states = self._find_states(self._sets[after], char, conditions)
        if self._kept > _MOST_REMEMBERED:
            self._forget()
            after = None
        if states not in self._numbers:
            self._kept += len(states) + 1
            self._numbers[states] = len(self._sets)
            self._sets.append(states)
            self._steps.append({})
        if after is not None:
            self._steps[after][key] = self._numbers[states]
        return self._numbers[states]

    def _find_states(self, after, char, conditions) -> frozenset[int]:
        """Return the states that accept the text from one position.

        Args:
          after: the states that accept the text from the next position.
          char: the character at the position; "" at the end of the text.
          conditions: the bits of `_conditions_at` that hold there.
        """
        found: set[int] = set()
        for layer in self._layers:
            waiting = [state for state in layer if _begins(self._states[state], after, char)]
            while waiting:
                state = waiting.pop()
                if state not in found:
                    found.add(state)
                    waiting += [
                        source
                        for source in self._sources[state]
                        if _passes(self._states[source], found, conditions)
                    ]
        return frozenset(found)


def _begins(state, after, char) -> bool:
    """Return whether a state accepts the text by its own kind and the next character."""
    if isinstance(state, _Char):
        return char != "" and state.next in after and bool(state.accepts(char))
    return isinstance(state, _Accept)


def _passes(state, found, conditions) -> bool:
    """Return whether a state accepts what the state after it accepts."""
    if isinstance(state, _Anchor):
        return bool(state.bit & conditions)
    if isinstance(state, _Look):
        return (state.start in found) == state.positive
    return True


def _find_sources(states) -> list[list[int]]:
    """Return, for each state, those that go on to it without reading a character."""
    sources: list[list[int]] = [[] for _ in states]
    for number, state in enumerate(states):
        if isinstance(state, _Branch):
            for other in state.nexts:
                sources[other].append(number)
        elif isinstance(state, (_Anchor, _Look)):
            sources[state.next].append(number)
    return sources


def _conditions_at(text, position) -> int:
    """Return the bits of the anchors that hold at a position of a text."""
    last = len(text)
    before, here = (
        0 <= at < last and (text[at].isalnum() or text[at] == "_")
        for at in (position - 1, position)
    )
    held = _BORDER if before != here else _INSIDE if text else 0
    held |= _START if position == 0 else 0
    held |= _END if position == last else 0
    at_last = position == last or (position == last - 1 and text[position] == "\n")
    return held | (_LAST if at_last else 0)


class _Program:
    """Makes the states of an automaton.

    Attributes:
      states: all states.
      depths: for each state, the number of look-aheads around it.
    """

    def __init__(self):
        self.states: list[_Accept | _Char | _Branch | _Anchor | _Look] = []
        self.depths: list[int] = []
        self._accepts: dict[int, int] = {}
        self._emitted = 0

    def accept(self, depth) -> int:
        """Return the accepting state at a depth."""
        if depth not in self._accepts:
            self._accepts[depth] = self._add(_Accept(), depth)
        return self._accepts[depth]

    def emit(self, node, after, depth) -> int:
        """Add the states of a node of `_Parser`, and return the first of them.

        Args:
          node: the node.
          after: the state that follows it.
          depth: the number of look-aheads around it.
        """
        self._emitted += 1
        if self._emitted > 2 * _MOST_STATES:
            raise PatternError("repeats too much: its automaton is too large")
        kind, *content = node
        return getattr(self, f"_emit_{kind}")(*content, after, depth)

    def _emit_char(self, accepts, after, depth):
        return self._add(_Char(accepts, after), depth)

    def _emit_anchor(self, bit, after, depth):
        return self._add(_Anchor(bit, after), depth)

    def _emit_look(self, positive, inner, after, depth):
        start = self.emit(inner, self.accept(depth + 1), depth + 1)
        return self._add(_Look(start, positive, after), depth)

    def _emit_sequence(self, nodes, after, depth):
        for node in reversed(nodes):
            after = self.emit(node, after, depth)
        return after

    def _emit_choice(self, nodes, after, depth):
        return self._add(_Branch([self.emit(node, after, depth) for node in nodes]), depth)

    def _emit_repeat(self, node, least, most, after, depth):
        start = after
        if most is None:
            nexts = [after]
            start = self._add(_Branch(nexts), depth)
            nexts.append(self.emit(node, start, depth))
        else:
            for _ in range(most - least):
                start = self._add(_Branch([after, self.emit(node, start, depth)]), depth)
        for _ in range(least):
            start = self.emit(node, start, depth)
        return start

    def _add(self, state, depth) -> int:
        self.states.append(state)
        self.depths.append(depth)
        if len(self.states) > _MOST_STATES:
            raise PatternError(f"is too large: it has more than {_MOST_STATES} states")
        return len(self.states) - 1


class _Parser:
    """Parses a pattern that `re` has accepted.

    Attributes:
      root: the tree of the pattern. A node is a tuple: its kind, as in ``_Program._emit_KIND``, and
        the arguments of that method.
      required: as for `RegularExpression`.
    """

    def __init__(self, pattern: str):
        self._pattern, self._at, self._flags = pattern, 0, re.NOFLAG
        flags = _LEADING_FLAGS.match(pattern)
        if flags:
            self._at = flags.end()
            for letter in flags[1]:
                self._flags |= {"i": re.IGNORECASE, "s": re.DOTALL}[letter]
        self.required = ""
        self.root = self._choice(top=True)

    def _choice(self, top=False):
        """Parse alternatives up to the end of their group."""
        nodes, runs = [], []
        while True:
            sequence, run = self._sequence()
            nodes.append(sequence)
            runs.append(run)
            if not self._take("|"):
                break
        if top and len(nodes) == 1:
            self.required = runs[0]
        return nodes[0] if len(nodes) == 1 else ("choice", nodes)

    def _sequence(self):
        """Parse items up to the next alternative; return them, and their longest literal text."""
        nodes, runs = [], [""]
        while self._at < len(self._pattern) and self._pattern[self._at] not in "|)":
            node, literal = self._item()
            bounds = self._quantifier()
            if bounds is not None:
                node, literal = ("repeat", node, *bounds), None
            if literal is None:
                runs.append("")
            else:
                runs[-1] += literal
            nodes.append(node)
        longest = "" if self._flags & re.IGNORECASE else max(runs, key=len)
        return ("sequence", nodes), longest

    def _item(self) -> tuple[Sequence[Any], str | None]:
        """Parse what a quantifier would repeat; return it, and its text if it is a literal."""
        char = self._pattern[self._at]
        if char == "(":
            return self._group(), None
        for token in (_SET, _ESCAPE):
            found = token.match(self._pattern, self._at)
            if found:
                self._at = found.end()
                return self._token(found[0])
        self._at += 1
        return self._token(char)

    def _token(self, token):
        """Return the node of a character, an escape, a set or an anchor."""
        if token in _ANCHORS:
            return ("anchor", _ANCHORS[token]), None
        if token == ".":
            every = bool(self._flags & re.DOTALL)
            return ("char", lambda char: every or char != "\n"), None
        if token[0] == "\\" and token[1] in "123456789" and len(token) == 2:
            raise PatternError(f"has a back-reference, {token}, which is not supported")
        literal = token if len(token) == 1 else token[1:] if not token[1:].isalnum() else None
        if token[0] == "[" and len(token) > 1:
            literal = None
        if literal is not None and len(literal) == 1 and not self._flags & re.IGNORECASE:
            return ("char", literal.__eq__), literal
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            text = re.escape(token) if len(token) == 1 else token
            return ("char", re.compile(text, self._flags).fullmatch), None

    def _group(self):
        """Parse a group or a look-ahead."""
        opening = _GROUP.match(self._pattern, self._at)
        if opening is None:
            what = next(name for text, name in _REFUSED if self._pattern.startswith(text, self._at))
            raise PatternError(f"has {what}, which is not supported")
        self._at = opening.end()
        inner = self._choice()
        self._take(")")
        if opening[0] in ("(?=", "(?!"):
            return "look", opening[0] == "(?=", inner
        return inner

    def _quantifier(self) -> tuple[int, int | None] | None:
        """Parse a quantifier, and return the least and the most repetitions."""
        found = _QUANTIFIER.match(self._pattern, self._at)
        if found is None:
            return None
        self._at = found.end()
        if self._take("+"):
            raise PatternError("has a possessive quantifier, which is not supported")
        self._take("?")  # how eagerly it repeats does not change whether there is a match
        if found[0] in "*+?":
            return {"*": (0, None), "+": (1, None), "?": (0, 1)}[found[0]]
        if found[1]:
            return int(found[1]), int(found[1])
        return int(found[2] or 0), int(found[3]) if found[3] else None

    def _take(self, text) -> bool:
        """Pass a text if it comes next, and return whether it does."""
        found = self._pattern.startswith(text, self._at)
        self._at += len(text) * found
        return found
