"""Warn of calls that convert weights to the layout of their kernel, once for each line of code.

Weights that `prepare` has not converted are converted by each call. With few tokens the conversion
takes far longer than the kernel.
"""

import functools
import logging
import sys

from jax_nvfp4_moe.backends.plan import Plan
from jax_nvfp4_moe.scheme import Scheme, Target

_LOG = logging.getLogger("jax_nvfp4_moe")

# The warning names the innermost line of code that is in none of these packages.
_LIBRARIES = frozenset(
    {"contextlib", "flax", "functools", "jax", "jaxlib", "jax_nvfp4_moe", "qwix", "tokamax"}
)


def report_conversion(op: str, here: str, plan: Plan, name: str) -> None:
    """Warn, once for each line that calls, if an op converts weights to the layout of its plan.

    Args:
      op: name of the op.
      here: name of the layout of the weights.
      plan: plan of the call.
      name: name of the argument that holds the weights, or the path of a variable in a module, such
        as "module.weight".
    """
    if here != plan.layout:
        _warn(op, here, plan.layout, _line_to_write(name, plan), *_find_caller())


@functools.cache
def _warn(op, here, there, line, file, number):
    """Log the warning; the cache keeps it from being repeated."""
    _LOG.warning(
        "%s:%d: %s converts weights from layout %s to %s on each call, which makes calls with few "
        "tokens many times slower. Convert them once, before the calls: %s",
        file,
        number,
        op,
        here,
        there,
        line,
    )


forget_reports = _warn.cache_clear  # for tests


def _line_to_write(name, plan):
    """Return the line of code that converts the weights for calls with the facts of `plan`."""
    problem = plan.problem
    arguments = {
        "scheme": _find_scheme(name, plan),
        "target": None if plan.target == Target.current() else plan.target,
        "backend": _one_or_all(plan.requested_backends),
        "dtype": None if problem.dtype == "bfloat16" else problem.dtype,
        "top_k": None if problem.top_k <= 32 else problem.top_k,
    }
    options = "".join(
        f", {key}={'nvfp4.' if key == 'target' else ''}{value!r}"
        for key, value in arguments.items()
        if value is not None
    )
    if "." in name:
        return f"{name}.set_value(nvfp4.prepare({name}.get_value(){options}))"
    return f"{name} = nvfp4.prepare({name}{options})"


def _find_scheme(name, plan):
    """Return the argument `scheme` of `prepare`, or None if it chooses the scheme of the call."""
    # A matrix does not hold the input scale that made this call a W4A4 one.
    if name == "weight" and plan.scheme is not Scheme.W4A16:
        return str(plan.scheme)
    return plan.requested_scheme


def _one_or_all(names):
    """Return the only name, or all names; None if there are none."""
    return names[0] if names is not None and len(names) == 1 else names


def _find_caller():
    """Return the file and the number of the line that called this package."""
    frame = sys._getframe(2)
    while frame.f_back is not None and _package(frame) in _LIBRARIES:
        frame = frame.f_back
    return frame.f_code.co_filename, frame.f_lineno


def _package(frame):
    """Return the name of the top-level package whose code a frame runs."""
    return frame.f_globals.get("__name__", "").partition(".")[0]
