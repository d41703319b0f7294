"""Resolve the static facts of an op into its plan, and log each choice once."""

import dataclasses
import functools
import logging
from collections.abc import Sequence
from typing import Any

from jax_nvfp4_moe.backends import _ffi
from jax_nvfp4_moe.backends.plan import Plan
from jax_nvfp4_moe.backends.record import Backend
from jax_nvfp4_moe.scheme import (
    Choice,
    NoBackendError,
    Problem,
    Scheme,
    Target,
    choose_scheme,
    find_scheme,
)

_LOG = logging.getLogger("jax_nvfp4_moe")


def unavailable_for(target: Target) -> tuple[tuple[str, str], ...]:
    """Return the extensions that `target` needs and this process lacks, with reasons.

    Only the current device needs its extension. Any other target is for lowering, which needs none.
    """
    if target != Target.current():
        return ()
    extension = "_nvfp4_cpu" if target.platform == "cpu" else "_nvfp4_cuda"
    parts = tuple(part for part, (whole, *_) in _ffi.PARTS.items() if whole == extension)
    if target.compute_capability is not None:
        reason = _ffi.why_not_built_for(target.compute_capability)
        if reason is not None:
            return tuple((name, reason) for name in (extension, *parts))
    return _ffi.missing((extension, *parts))


def resolve(
    problem: Problem,
    records: Sequence[Backend],
    *,
    checkpoint_scheme: Scheme | str | None = None,
    requested_scheme: Scheme | str | None = None,
    backend: str | Sequence[str] | None = None,
) -> Plan:
    """Choose the scheme and the backend of one op; both are decided nowhere else.

    Args:
      problem: the static facts. If `checkpoint_scheme` is given, the chosen scheme replaces that of
        the problem.
      records: the backends, in order of preference.
      checkpoint_scheme: what the checkpoint declares for the weights, "w4a16" or "w4a4". None
        (default) if the problem already has a scheme or needs none.
      requested_scheme: None (default), "checkpoint" or a scheme; see `scheme.choose_scheme`.
      backend: name of a backend, or a sequence of names that are tried in that order. None
        (default) chooses the first backend that accepts the problem.

    Returns:
      The `Plan` of the op.

    Raises:
      ValueError: if the scheme or a backend is unknown, or the scheme needs input scales that the
        weights lack.
      NoBackendError: if no backend accepts the problem; the message lists every backend and its
        reason.
    """
    why = ""
    if checkpoint_scheme is not None:
        checkpoint_scheme = find_scheme("checkpoint_scheme", checkpoint_scheme)
        scheme, why = choose_scheme(checkpoint_scheme, requested_scheme, problem.target)
        problem = dataclasses.replace(problem, scheme=scheme)
        if requested_scheme is None:
            log_scheme(checkpoint_scheme, scheme, why)
    if not problem.unavailable:
        problem = dataclasses.replace(problem, unavailable=unavailable_for(problem.target))
    names = find_names(backend)
    chosen = choose_backend(problem, records, names)
    _log_backend(problem.op, problem.scheme, problem.target, chosen, names is None)
    if names is None and chosen.platform is None:
        for extension, reason in problem.unavailable:
            if extension in _ffi.EXTENSIONS:
                _warn_of_extension(problem.target, reason)
    requested = None if requested_scheme is None else str(requested_scheme)
    return Plan(problem, chosen, why, checkpoint_scheme, requested, names)


def find_names(backend: str | Sequence[str] | None) -> tuple[str, ...] | None:
    """Return the names in the argument `backend`, in the order in which they are tried.

    Raises:
      ValueError: if it is empty, or contains anything other than names.
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
    """Choose the first of `backends` that accepts `problem`.

    Args:
      problem: the static facts.
      backends: the records, in order of preference.
      names: names of the records to consider, in the order in which they are tried; None (default)
        for all.

    Raises:
      NoBackendError: if none accepts it; the message lists every backend of the op and its reason.
      ValueError: if there is no backend with one of `names`.
    """
    records = {backend.name: backend for backend in backends}
    for name in names or ():
        if name not in records:
            able = [name for name, one in records.items() if problem.op in one.lower]
            raise ValueError(f"backend: expected one of {able}, got {name!r}")
    for name in names or records:
        if records[name].reason_against(problem, asked=names is not None) is None:
            return records[name]
    ops = sorted({op for backend in backends for op in backend.lower})
    if problem.op not in ops:
        raise NoBackendError(f"op: expected one of {', '.join(ops)}; got {problem.op!r}")
    reasons = reasons_against(problem, backends, names=names or ())
    asked = " or ".join(map(repr, names or ()))
    wanted = f"backend {asked} cannot run" if names else "no backend can run"
    lines = "\n".join(f"  {name}: {why or 'could run it'}" for name, why in reasons.items())
    raise NoBackendError(f"{wanted} {problem}:\n{lines}")


def reasons_against(
    problem: Problem, backends: Sequence[Backend], asked: bool = True, names: Sequence[str] = ()
) -> dict[str, str | None]:
    """Return backend name -> why it does not run `problem`, or None if it does, in order.

    Backends of other ops are left out, because a user cannot choose them for this op. All tables of
    reasons come from this function.

    Args:
      problem: the static facts.
      backends: the records.
      asked: whether the backends are asked for by their names; True by default.
      names: backends of other ops that the table still lists, because a user has named them.
    """
    return {
        backend.name: backend.reason_against(problem, asked)
        for backend in backends
        if problem.op in backend.lower or backend.name in names
    }


@functools.cache
def log_scheme(checkpoint_scheme: Scheme, scheme: Scheme, why: str) -> None:
    """Log the choice of a scheme, once for each distinct choice."""
    _LOG.info("scheme %s for weights declared %s: %s", scheme, checkpoint_scheme, why)


@functools.cache
def _log_backend(op, scheme, target, backend, automatic):
    """Log the choice of a backend once; warn if an automatic choice is slow."""
    if automatic and op in backend.slow:
        _LOG.warning("%s %s on %s runs the slow reference; `explain` says why", op, scheme, target)
    else:
        called = f"{op} {scheme}" if scheme else op
        _LOG.info("backend %s for %s on %s", backend.name, called, target)


@functools.cache
def _warn_of_extension(target, reason):
    """Say once which extension is missing on this device, why, and how to get it."""
    _LOG.warning("no kernels on %s: %s", target, reason)


def explain_plan(plan: Plan, records: Sequence[Backend]) -> Choice:
    """Return the choices of `plan`, with the reason against every other one of the op."""
    reasons = reasons_against(plan.problem, records, asked=plan.requested_backends is not None)
    against = {name: reason for name, reason in reasons.items() if reason is not None}
    notes = plan.backend.notes(plan.problem)
    return Choice(plan.scheme, plan.backend.name, against, plan.why, plan.problem, notes=notes)


def resolve_again(plan: Plan, records: Sequence[Backend], **facts: Any) -> Plan:
    """Resolve the requests of `plan` again with other `facts`, which are fields of `Problem`."""
    return resolve(
        dataclasses.replace(plan.problem, unavailable=(), **facts),
        records,
        checkpoint_scheme=plan.checkpoint_scheme,
        requested_scheme=plan.requested_scheme,
        backend=plan.requested_backends,
    )
