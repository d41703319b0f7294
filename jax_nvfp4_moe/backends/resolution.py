"""Resolve the static facts of an op into its plan; say its choices once in the log."""

import dataclasses
import functools
import logging
from collections.abc import Sequence
from typing import Any

from jax_nvfp4_moe.backends import BACKENDS, _ffi
from jax_nvfp4_moe.scheme import (
    Backend,
    Choice,
    NoBackendError,
    Plan,
    Problem,
    Scheme,
    Target,
    choose_scheme,
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


def resolve(
    problem: Problem,
    *,
    checkpoint_scheme: Scheme | str | None = None,
    requested_scheme: Scheme | str | None = None,
    backend: str | Sequence[str] | None = None,
) -> Plan:
    """Choose the scheme and the backend of one op: the only place where both are decided.

    Args:
      problem: the static facts. Its scheme is replaced by the chosen one where `checkpoint_scheme`
        is given.
      checkpoint_scheme: what the checkpoint says of the weights, "w4a16" or "w4a4"; None where the
        problem has its scheme already, or needs none.
      requested_scheme: None, "checkpoint" or a scheme; see `scheme.choose_scheme`.
      backend: name of a record; a sequence of names, tried in that order; None to choose.

    Raises:
      ValueError: the scheme or a backend is unknown, or the scheme does not go with the weights.
      NoBackendError: no backend fits; says why, one by one.
    """
    why = ""
    if checkpoint_scheme is not None:
        checkpoint_scheme = Scheme(checkpoint_scheme)
        scheme, why = choose_scheme(checkpoint_scheme, requested_scheme, problem.target)
        problem = dataclasses.replace(problem, scheme=scheme)
        if requested_scheme is None:
            log_scheme(checkpoint_scheme, scheme, why)
    if not problem.unavailable:
        problem = dataclasses.replace(problem, unavailable=unavailable_for(problem.target))
    names = find_names(backend)
    chosen = choose_backend(problem, BACKENDS, names)
    _log_backend(problem.op, problem.scheme, problem.target, chosen.name, names is None)
    requested = None if requested_scheme is None else str(requested_scheme)
    return Plan(problem, chosen, why, checkpoint_scheme, requested, names)


def find_names(backend: str | Sequence[str] | None) -> tuple[str, ...] | None:
    """Return the names of the argument `backend`, in the order in which they are tried.

    Raises:
      ValueError: it is empty, or has something else than names.
    """
    if backend is None:
        return None
    names = (backend,) if isinstance(backend, str) else tuple(backend)
    if not names or not all(isinstance(name, str) for name in names):
        raise ValueError(f"backend: expected a name or a sequence of names, got {backend!r}")
    return names


def choose_backend(
    problem: Problem, backends: Sequence[Backend], names: Sequence[str] | None = None
) -> Backend:
    """Choose the first of `backends`, in order of preference, that accepts `problem`.

    Args:
      problem: the static facts.
      backends: the records to walk.
      names: the records to consider, in this order instead; None for all.

    Raises:
      NoBackendError: none accepts it; the message lists each with its reason.
      ValueError: there is no backend with one of `names`.
    """
    records = {backend.name: backend for backend in backends}
    for name in names or ():
        if name not in records:
            raise ValueError(f"backend: expected one of {list(records)}, got {name!r}")
    reasons = reasons_against(problem, backends)
    for name in names or records:
        if reasons[name] is None:
            return records[name]
    asked = " or ".join(map(repr, names or ()))
    wanted = f"backend {asked} cannot run" if names else "no backend can run"
    lines = "\n".join(f"  {name}: {why or 'could run it'}" for name, why in reasons.items())
    raise NoBackendError(f"{wanted} {problem}:\n{lines}")


def reasons_against(problem: Problem, backends: Sequence[Backend]) -> dict[str, str | None]:
    """Return backend name -> why it cannot run `problem`, None where it can, in order."""
    return {backend.name: backend.can.reason_against(problem) for backend in backends}


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


def explain_plan(plan: Plan) -> Choice:
    """Return what `plan` chose, with the reason against every other backend."""
    reasons = reasons_against(plan.problem, BACKENDS)
    against = {name: reason for name, reason in reasons.items() if reason is not None}
    notes = plan.backend.notes(plan.problem)
    return Choice(plan.scheme, plan.backend.name, against, plan.why, plan.problem, notes=notes)


def resolve_again(plan: Plan, **facts: Any) -> Plan:
    """Return the plan of the same requests with other `facts`, fields of `Problem`."""
    return resolve(
        dataclasses.replace(plan.problem, unavailable=(), **facts),
        checkpoint_scheme=plan.checkpoint_scheme,
        requested_scheme=plan.requested_scheme,
        backend=plan.requested_backends,
    )
