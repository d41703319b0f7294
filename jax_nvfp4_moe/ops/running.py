"""`run`: the only way from an op to a kernel."""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jax import lax

from jax_nvfp4_moe.backends import _ffi
from jax_nvfp4_moe.backends.plan import Plan
from jax_nvfp4_moe.backends.record import Backend
from jax_nvfp4_moe.backends.resolution import choose_backend, resolve
from jax_nvfp4_moe.ops.derivative import with_derivative_of
from jax_nvfp4_moe.scheme import Problem, Target


def list_records() -> tuple[Backend, ...]:
    """Return the records of all ops."""
    # The modules of the ops define the records, so the tuple exists only when an op is called.
    from jax_nvfp4_moe.ops.records import RECORDS

    return RECORDS


def find_plan(
    op: str, *, target: Target | None, backend: str | Sequence[str] | None = None, **facts: Any
) -> Plan:
    """Return the plan of an op that multiplies no NVFP4 weights.

    Args:
      op: name of the op.
      target: the `Target` to lower for; the current device if None.
      backend: name of a backend, or names that are tried in that order; None (default) to choose.
      **facts: the other fields of the `Problem`.

    Raises:
      NoBackendError: if no backend can run the call.
    """
    problem = Problem(op, None, target or Target.current(), **facts)
    return resolve(problem, list_records(), backend=backend)


def find_meaning(op: str) -> Callable[..., Any]:
    """Return the definition of an op in plain JAX: the lowering of its last record."""
    return next(record.lower[op] for record in reversed(list_records()) if op in record.lower)


def lower_anywhere(op: str, **facts: Any) -> Callable[..., Any]:
    """Return a lowering for a platform that is known only when the program is compiled.

    It is the definition of the op where no platform has another lowering. Nothing but the platform
    of a GPU is known.

    Args:
      op: name of the op.
      **facts: fields of the `Problem` besides its target.
    """
    missing = _ffi.missing(("_nvfp4_cpu",))
    meaning, forms = find_meaning(op), {}
    for target in (Target("cpu"), Target("cuda", (0, 0))):
        problem = Problem(op, None, target, unavailable=missing, **facts)
        lower = choose_backend(problem, list_records()).lower[op]
        if lower is not meaning:
            forms[target.platform] = lower
    if not forms:
        return meaning

    def lower_there(*operands, **options):
        own = {name: functools.partial(form, **options) for name, form in forms.items()}
        default = functools.partial(meaning, **options)
        return lax.platform_dependent(*operands, **own, default=default)

    return lower_there


def run(
    op: str,
    operands: Sequence[Any],
    rows: str,
    *,
    options: Mapping[str, Any] | None = None,
    named: Mapping[str, Any] | None = None,
    **facts: Any,
) -> Any:
    """Run an op on the backend that takes it.

    It has the derivatives of its definition, or those that the record of the backend names.

    Args:
      op: name of the op.
      operands: arrays, and pytrees of arrays.
      rows: the rule of `backends.by_rows`, with an entry for each operand, and one for all `named`.
      options: arguments of the lowerings that are no arrays; None (default) for none.
      named: arrays that the lowerings take by name; None (default) for none.
      **facts: as in `find_plan`, which raises the errors.

    Returns:
      What the lowering returns.
    """
    backend = find_plan(op, **facts).backend
    own = None if backend.sharded_by_xla else rows
    reference = backend.derivatives.get(op) or find_meaning(op)
    lowered = with_derivative_of(reference, backend.lower[op], own, **(options or {}))
    return lowered(*operands, **(named or {}))
