"""explain: which scheme and backend each NVFP4 module gets, and why not another."""

import dataclasses
from collections.abc import Iterator
from typing import Any

from flax import nnx

from jax_nvfp4_moe.backends.resolution import explain_plan, resolve, resolve_again
from jax_nvfp4_moe.scheme import Choice, Plan, Problem, Target


def find_plans(module: nnx.Module) -> Iterator[tuple[str, Plan]]:
    """Return the plan of each NVFP4 module inside `module`, with its path."""
    for path, part in nnx.iter_modules(module):
        plan = getattr(part, "plan", None)
        if isinstance(plan, Plan):
            yield ".".join(map(str, path)), plan


def explain(subject: Any, *, target: Target | None = None) -> Choice:
    """Tell which scheme and backend `subject` gets, and why every other backend is passed over.

    Args:
      subject: a `Problem`, or a Flax NNX module that is, or contains, an `NVFP4MoE` or
        `NVFP4Linear`.
      target: the device to decide for, the subject's own where None. A target other than the
        current device is judged as if its extension were there.

    Returns:
      A `Choice` that prints as a table; that of a model is its first expert layer's, with all
      modules under `modules`.

    Raises:
      ValueError: `subject` is neither, or has no NVFP4 modules inside.
    """
    if isinstance(subject, Problem):
        problem = subject if target is None else dataclasses.replace(subject, target=target)
        return explain_plan(resolve(problem))
    if not isinstance(subject, nnx.Module):
        raise ValueError(
            "subject: expected a Problem, an NVFP4 module or a model of them; "
            f"got {type(subject).__name__}"
        )
    plans = list(find_plans(subject))
    if not plans:
        raise ValueError("subject: expected a model with NVFP4 modules, found none")
    if target is not None:
        plans = [(path, resolve_again(plan, target=target)) for path, plan in plans]
    choices = [(path, explain_plan(plan)) for path, plan in plans]
    layers = (c for _, c in choices if c.problem is not None and c.problem.op == "moe_mlp")
    first = next(layers, choices[0][1])
    return dataclasses.replace(first, modules=tuple(choices) if len(choices) > 1 else ())
