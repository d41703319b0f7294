"""Resolve what a caller left open, say it once in the log, and explain it on request."""

import dataclasses
import functools
import logging

from jax_nvfp4_moe.backends import BACKENDS, _ffi
from jax_nvfp4_moe.scheme import (
    Backend,
    Choice,
    Problem,
    Scheme,
    Target,
    choose_backend,
    choose_scheme,
    reasons_against,
)

_LOG = logging.getLogger("jax_nvfp4_moe")

# Ops whose reference is as good as a kernel on a CPU: running it there is nothing to warn of.
_PLAIN_OPS = frozenset({"route"})


def unavailable_for(target: Target) -> tuple[tuple[str, str], ...]:
    """Return the extensions that `target` would lack if a program ran now.

    Only the current device is asked for its extension: another target is for lowering alone.
    """
    if target != Target.current():
        return ()
    extension = "_nvfp4_cpu" if target.platform == "cpu" else "_nvfp4_cuda"
    parts = (part for part, (whole, *_) in _ffi.PARTS.items() if whole == extension)
    return _ffi.missing((extension, *parts))


def resolve_backend(problem: Problem, backend: str | None) -> Backend:
    """Choose the backend of `problem` on the target it names; see `scheme.choose_backend`.

    Raises:
      NoBackendError: none fits, or the one asked for does not.
    """
    problem = dataclasses.replace(problem, unavailable=unavailable_for(problem.target))
    chosen = choose_backend(problem, BACKENDS, backend)
    _log_backend(problem.op, problem.scheme, problem.target, chosen.name, backend is None)
    return chosen


@functools.cache
def log_scheme(checkpoint_scheme: Scheme, scheme: Scheme, why: str) -> None:
    """Log the choice of a scheme, once for each distinct one."""
    _LOG.info("scheme %s for a %s checkpoint: %s", scheme, checkpoint_scheme, why)


@functools.cache
def log_conversion(op: str, here: str, there: str) -> None:
    """Log, once for each pair, that an op converts weights inside the trace."""
    _LOG.info(
        "%s converts weights from layout %s to %s on each call; `prepare` does it once",
        op,
        here,
        there,
    )


@functools.cache
def _log_backend(op, scheme, target, name, automatic):
    if automatic and name == "reference" and op not in _PLAIN_OPS:
        _LOG.warning("%s %s on %s runs the slow reference; `explain` tells why", op, scheme, target)
    else:
        _LOG.info("backend %s for %s on %s", name, f"{op} {scheme}" if scheme else op, target)


def explain_problem(problem: Problem, why: str = "", backend: str | None = None) -> Choice:
    """Return the choice of backend for one problem with every reason.

    Raises:
      NoBackendError: no backend fits.
    """
    if not problem.unavailable:
        problem = dataclasses.replace(problem, unavailable=unavailable_for(problem.target))
    chosen = choose_backend(problem, BACKENDS, backend)
    reasons = {n: r for n, r in reasons_against(problem, BACKENDS).items() if r is not None}
    notes = chosen.notes(problem)
    return Choice(problem.scheme, chosen.name, reasons, why, problem, notes=notes)


def explain(subject, *, target: Target | None = None) -> Choice:
    """Tell which scheme and backend `subject` gets, and why every other backend is passed over.

    Args:
      subject: a `Problem`, a `NVFP4MoE` or `NVFP4Linear` module, or a model made of them.
      target: the device to decide for, the subject's own or the current one where None. A target
        other than the current device is judged as if its extension were there.

    Returns:
      A `Choice` that prints as a table; that of a model is its first expert layer's, with all
      modules under `modules`.

    Raises:
      ValueError: `subject` is none of these.
    """
    if isinstance(subject, Problem):
        problem = subject if target is None else dataclasses.replace(subject, target=target)
        return explain_problem(problem)
    if not hasattr(subject, "nvfp4_problems"):
        raise ValueError(
            "subject: expected a Problem, an NVFP4 module or a model of them; "
            f"got {type(subject).__name__}"
        )
    choices = []
    for path, problem, checkpoint_scheme, requested_scheme, backend in subject.nvfp4_problems():
        where = target or problem.target
        scheme, why = choose_scheme(checkpoint_scheme, requested_scheme, where)
        problem = dataclasses.replace(problem, scheme=scheme, target=where)
        choices.append((path, explain_problem(problem, why, backend)))
    if not choices:
        raise ValueError("subject: expected a model with NVFP4 modules, found none")
    first = next((c for _, c in choices if c.problem.op == "moe_mlp"), choices[0][1])
    return dataclasses.replace(first, modules=tuple(choices) if len(choices) > 1 else ())
