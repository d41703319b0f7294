"""Limits of the time and memory that a chat template takes.

A template comes from a stranger. These limits end the loops, recursions and repetitions that take
seconds or gigabytes. They are no wall: one step of a template can still be large.
"""

import contextlib
import contextvars
import functools
import math
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import jinja2.exceptions
import jinja2.nodes
import jinja2.sandbox
import jinja2.visitor

TEXT_LENGTH = 10_000_000  # characters of a text that a template makes
_SECONDS = 2.0  # of this thread's time on a CPU; usual templates take milliseconds
_BITS = 100_000  # of a whole number
_OFTEN = 16  # steps from one look at the clock to the next
_WIDTH = 100_000  # characters to which a text or a number is filled up
_INDENT = 100  # spaces
# In a format: a width or precision that an argument gives, or one of six digits.
_WIDE = re.compile(r"%[-+ #0]*(\*|\d{6}|\d*\.(\*|\d{6}))|\{[^{}]*:[^{}]*(\{|\d{6})")

_deadline: contextvars.ContextVar[float] = contextvars.ContextVar("deadline", default=math.inf)


class LimitError(jinja2.exceptions.TemplateRuntimeError):
    """Report that a template exceeds a limit."""


@contextlib.contextmanager
def limited_time() -> Iterator[None]:
    """Limit the time of the templates that are rendered in this block."""
    token = _deadline.set(time.thread_time() + _SECONDS)
    try:
        yield
    finally:
        _deadline.reset(token)


def join_pieces(pieces: Iterable[str]) -> str:
    """Return the text of the pieces that a template yields.

    Raises:
      LimitError: the text is too long.
    """
    kept, length = [], 0
    for number, piece in enumerate(pieces):
        length += len(piece)
        _check_length(length)
        if number % _OFTEN == 0:
            _check_time()
        kept.append(piece)
    return "".join(kept)


def _check_time():
    if time.thread_time() > _deadline.get():
        raise LimitError(f"it takes more than {_SECONDS:.0f} s, the limit")


def _check_length(length):
    if length > TEXT_LENGTH:
        raise LimitError(f"it makes a text or list of more than {TEXT_LENGTH} parts, the limit")


def _check_bits(bits):
    if bits > _BITS:
        raise LimitError(f"it makes a number of more than {_BITS} bits, the limit")


def _check_width(value, *numbers, most=_WIDTH):
    """Check numbers to which a value is filled up."""
    del value
    for number in numbers:
        if isinstance(number, int) and number > most:
            raise LimitError(f"it asks for a width of {number}, and the limit is {most}")


def _check_product(left, right):
    """Check the operands of ``*``, of which one may be a text or a list to repeat."""
    if isinstance(left, int) and isinstance(right, int):
        _check_bits(left.bit_length() + right.bit_length())
        return
    for repeated, times in ((left, right), (right, left)):
        if isinstance(repeated, Sequence) and isinstance(times, int):
            _check_length(len(repeated) * times)


def _check_power(left, right):
    if isinstance(left, int) and isinstance(right, int):
        _check_bits(left.bit_length() * max(right, 0))


def _check_format(form, *values):
    """Check the widths in a format, and the values."""
    if isinstance(form, str) and _WIDE.search(form):
        raise LimitError(f"it formats a value with a width that may exceed {_WIDTH}, the limit")
    _check_parts(*values)


def check_format_of_dates(form: str) -> None:
    """Check the widths in a format of `strftime`, which the C library obeys.

    Raises:
      LimitError: a width is too large.
    """
    if _WIDE.search(form):
        raise LimitError(f"strftime_now: a width exceeds {_WIDTH}, the limit")


def _check_replacement(text, old="", new="", *more):
    if all(isinstance(part, str) for part in (text, old, new)):
        _check_length(len(text) + str.count(text, old) * len(new))


def _check_sum(first, second):
    if isinstance(first, Sequence) and isinstance(second, Sequence):
        _check_length(len(first) + len(second))


def _check_parts(*values):
    """Check values that become text: one list may be in another many times."""
    _check_length(sum(_measure(value, {}) for value in values))


def _check_json(value, *indents):
    _check_width(value, *indents, most=_INDENT)
    _check_parts(value)


def _measure(value, known):
    """Return about how long the text of a value is. `known` has the lists measured so far."""
    if isinstance(value, str):
        return len(value)
    if not isinstance(value, (list, tuple, dict)):
        return 1
    if id(value) not in known:
        parts = [*value.keys(), *value.values()] if isinstance(value, dict) else value
        known[id(value)] = 2 + sum(_measure(part, known) for part in parts)
    return known[id(value)]


# What is checked before an operator, a method of a text, or a filter runs. A method gets its text
# first.
_OPERATORS: Mapping[str, Callable[[Any, Any], None]] = {
    "+": _check_sum,
    "*": _check_product,
    "**": _check_power,
    "%": _check_format,
}
_METHODS: Mapping[str, Callable[..., None]] = {
    **dict.fromkeys(("center", "ljust", "rjust", "zfill", "expandtabs"), _check_width),
    **dict.fromkeys(("format", "format_map"), _check_format),
    "join": _check_parts,
    "replace": _check_replacement,
}
_FILTERS: Mapping[str, Callable[..., None]] = {
    **dict.fromkeys(("center", "batch", "slice", "round", "wordwrap"), _check_width),
    "indent": functools.partial(_check_width, most=_INDENT),
    "tojson": _check_json,
    **dict.fromkeys(("join", "string", "pprint", "urlencode", "xmlattr"), _check_parts),
    "format": _check_format,
    "replace": _check_replacement,
}


class LimitedEnvironment(jinja2.sandbox.ImmutableSandboxedEnvironment):
    """jinja2's sandbox, with a look at the clock in each step of a loop and in each call."""

    intercepted_binops = frozenset(_OPERATORS)

    def __init__(self, *arguments: Any, **options: Any):
        super().__init__(*arguments, **options)
        self._steps = 0
        del self.globals["lipsum"]  # it makes text of any length
        self.filters |= {"_step": self._step, "_joined": self._join}
        self.finalize = _shown

    def limit_filters(self) -> None:
        """Check the arguments of the filters that can make much of little."""
        for name, check in _FILTERS.items():
            self.filters[name] = _checked(check, self.filters[name])

    def call_binop(self, context, operator, left, right):
        """Run an operator between two values, after a check of its operands."""
        self._step(context)
        _OPERATORS[operator](left, right)
        return super().call_binop(context, operator, left, right)

    def call(self, context, obj, /, *arguments, **named):  # noqa: D102 - as in jinja2
        self._step(context)
        # jinja2 wraps `str.format`.
        owner = getattr(getattr(obj, "__wrapped__", obj), "__self__", None)
        if isinstance(owner, str) and obj.__name__ in _METHODS:
            _METHODS[obj.__name__](owner, *arguments, *named.values())
        return super().call(context, obj, *arguments, **named)

    def _generate(self, source, name, filename, defer_init=False):
        """Compile a template, with a step at the beginning of each iteration."""
        source = _Steps().visit(source)
        source.set_environment(self)
        return super()._generate(source, name, filename, defer_init)

    @jinja2.pass_context
    def _step(self, context, value=None):
        """Look at the clock now and then."""
        self._steps += 1
        if self._steps % _OFTEN == 0:
            _check_time()
        return True

    @jinja2.pass_context
    def _join(self, context, values):
        """Return what ``~`` makes of values."""
        self._step(context)
        _check_parts(*values)
        return "".join(map(str, values))


class _Steps(jinja2.visitor.NodeTransformer):
    """Adds a step to each iteration of a loop, and makes a filter of each ``~``."""

    def visit_For(self, node, *arguments, **named):
        self.generic_visit(node, *arguments, **named)
        step = _filter(jinja2.nodes.Const(None), "_step", node.lineno)
        node.body.insert(0, jinja2.nodes.ExprStmt(step, lineno=node.lineno))
        if node.test is not None:
            node.test = jinja2.nodes.And(step, node.test, lineno=node.lineno)
        return node

    def visit_Concat(self, node, *arguments, **named):
        self.generic_visit(node, *arguments, **named)
        values = jinja2.nodes.List(node.nodes, lineno=node.lineno)
        return _filter(values, "_joined", node.lineno)


def _shown(value):
    """Return a value that a template prints, if its text is not too long."""
    if not isinstance(value, str):
        _check_parts(value)
    return value


def _filter(value, name, line):
    return jinja2.nodes.Filter(value, name, [], [], None, None, lineno=line)


def _checked(check, run):
    """Return a filter that checks its arguments first."""
    own = int(hasattr(run, "jinja_pass_arg"))  # what jinja2 passes before the value

    @functools.wraps(run)
    def checked(*arguments, **named):
        check(*arguments[own:], *named.values())
        return run(*arguments, **named)

    return checked
