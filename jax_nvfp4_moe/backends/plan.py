"""The plan of an op: both decisions about it, and the facts on which they depend."""

import dataclasses
from collections.abc import Callable
from typing import Any

from jax_nvfp4_moe.backends.record import Backend
from jax_nvfp4_moe.scheme import NoBackendError, Problem, Scheme, Target


@dataclasses.dataclass(frozen=True)
class Plan:
    """How one op runs: its scheme, its backend, and the layout in which the backend reads weights.

    `backends.resolution.resolve` creates one plan per layer. Weight preparation, the call and
    `explain` read that plan, so that weights are always prepared for the kernel that the call uses.

    Attributes:
      problem: the static facts, including the chosen scheme.
      backend: the chosen record.
      why: the reason for the scheme in words; empty if the problem already had a scheme.
      checkpoint_scheme: the scheme that the checkpoint declares, or None.
      requested_scheme: the requested scheme, or None; `explain` uses it for another device.
      requested_backends: names of the requested backends, or None.
    """

    problem: Problem
    backend: Backend
    why: str = ""
    checkpoint_scheme: Scheme | None = None
    requested_scheme: str | None = None
    requested_backends: tuple[str, ...] | None = None

    @property
    def scheme(self) -> Scheme | None:
        """The chosen scheme; None for an op without a scheme."""
        return self.problem.scheme

    @property
    def target(self) -> Target:
        """The device for which the op is lowered."""
        return self.problem.target

    @property
    def layout(self) -> str:
        """Name of the layout in which the backend reads weights."""
        return self.backend.layout

    @property
    def lower(self) -> Callable:
        """The backend's function that emits the computation."""
        return self.backend.lower[self.problem.op]

    def check(self, **facts: Any) -> None:
        """Check that the planned backend can run a call with other `facts`, fields of `Problem`.

        Raises:
          NoBackendError: if it cannot; the message says why.
        """
        problem = dataclasses.replace(self.problem, **facts)
        reason = self.backend.reason_against(problem)
        if reason and problem != self.problem:
            raise NoBackendError(
                f"plan: the weights are prepared for backend {self.backend.name!r}, which cannot "
                f"run {problem}: {reason}. Prepare the weights again with the facts of this call"
            )
