"""What all public ops have in common: the check of their arguments, and the same words for two."""

import re
from collections.abc import Callable
from typing import TypeVar

from jax_nvfp4_moe.numerics.arguments import check_arguments

Function = TypeVar("Function", bound=Callable)

# Short line in a docstring -> what stands there in the documentation.
_LINES = {
    "target, backend: where the op runs, and which kernel runs it.": (
        "target: the `Target` to lower for; None (default) for the current device.",
        "backend: name of a backend, or a sequence of names that are tried in that order. None",
        "  (default) chooses the first backend that accepts the problem.",
    ),
    "NoBackendError: if no backend can run the call.": (
        "NoBackendError: if no backend can run the call; the message lists every backend and its",
        "  reason.",
    ),
}


def public_op(function: Function) -> Function:
    """Let an op check its arguments, and document those that all ops share."""
    return share_lines(check_arguments(function))


def share_lines(function: Function) -> Function:
    """Write out the lines of a docstring that all ops share; it must have all keys of `_LINES`."""
    text = function.__doc__
    if text is None:  # with ``python -OO``
        return function
    for short, lines in _LINES.items():
        found = re.search(rf"(?m)^( *){re.escape(short)}$", text)
        if found is None:
            raise ValueError(f"{function.__name__}: expected the line {short!r} in the docstring")
        text = text.replace(found[0], "\n".join(found[1] + line for line in lines))
    function.__doc__ = text
    return function
