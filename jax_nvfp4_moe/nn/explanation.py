"""explain: the scheme and the backend of each quantized module, and the reasons against others."""

import dataclasses
import itertools
from collections.abc import Iterator
from typing import Any

from flax import nnx

from jax_nvfp4_moe.backends.plan import Plan
from jax_nvfp4_moe.backends.resolution import explain_plan, resolve, resolve_again
from jax_nvfp4_moe.nn.building.keys import DRAFTER
from jax_nvfp4_moe.nn.linear.fp8_linear import FP8Linear
from jax_nvfp4_moe.numerics.arguments import check_kind
from jax_nvfp4_moe.ops.dense import explain_fp8
from jax_nvfp4_moe.ops.records import RECORDS
from jax_nvfp4_moe.scheme import Choice, Problem, Target


def find_plans(module: nnx.Module) -> Iterator[tuple[str, Plan]]:
    """Yield the path and the plan of each NVFP4 module inside `module`."""
    for path, part in nnx.iter_modules(module):
        plan = getattr(part, "plan", None)
        if isinstance(plan, Plan):
            yield ".".join(map(str, path)), plan


def _find_choices(module: nnx.Module, target: Target | None) -> Iterator[tuple[str, Choice]]:
    """Yield the path and the choice of each NVFP4 module and each `FP8Linear` inside `module`."""
    for path, part in nnx.iter_modules(module):
        plan, name = getattr(part, "plan", None), ".".join(map(str, path))
        if isinstance(plan, Plan):
            again = plan if target is None else resolve_again(plan, RECORDS, target=target)
            yield name, explain_plan(again, RECORDS)
        elif isinstance(part, FP8Linear):
            device = target or part.target or Target.current()
            yield name, explain_fp8(part.weight.get_value(), part.dtype, device)


def explain(subject: Any, *, target: Target | None = None) -> Choice:
    """Explain which scheme and backend run, and why the other backends do not.

    Args:
      subject: a `Problem`, or a Flax NNX module that is or contains an `NVFP4MoE`, an
        `NVFP4Linear` or an `FP8Linear`.
      target: the device to decide for. None takes the device that `subject` was made for. If
        `target` is not the current device, `explain` assumes that its compiled extension is
        installed.

    Returns:
      A `Choice`, which prints as a table. For a model it describes the first expert layer, and its
      field `modules` lists the choice of every such module, those of drafting layers last. An
      `FP8Linear` has no scheme, and its backend is "xla" if no kernel takes few rows.

    Raises:
      TypeError: `target` is no `Target`.
      ValueError: `subject` is neither a `Problem` nor a module, or it contains no such module.
      NoBackendError: no backend can run `subject` on `target`.

    Example:
      >>> import jax_nvfp4_moe as nvfp4
      >>> hopper = nvfp4.Target("cuda", (9, 0))
      >>> choice = nvfp4.explain(nvfp4.Problem("moe_mlp", nvfp4.Scheme.W4A16, hopper))
      >>> choice.backend
      'moe_w4a16_sm90'
      >>> "moe_w4a16_cpu" in choice.reasons  # name of a backend -> why it does not run
      True
    """
    check_kind("target", target, Target, type(None))
    if isinstance(subject, Problem):
        problem = subject if target is None else dataclasses.replace(subject, target=target)
        return explain_plan(resolve(problem, RECORDS), RECORDS)
    if not isinstance(subject, nnx.Module):
        raise ValueError(
            "subject: expected a Problem, or a Flax NNX module that is or contains an NVFP4MoE, "
            f"an NVFP4Linear or an FP8Linear; got {type(subject).__name__}"
        )
    found = _find_choices(subject, target)
    choices = sorted(found, key=lambda choice: choice[0].startswith(f"{DRAFTER}."))
    if not choices:
        raise ValueError(
            "subject: expected a module that contains an NVFP4MoE, an NVFP4Linear or an FP8Linear; "
            f"{type(subject).__name__} contains none"
        )
    layers = (c for _, c in choices if c.problem is not None and c.problem.op == "moe_mlp")
    schemes = (c for _, c in choices if c.scheme is not None)
    first = next(itertools.chain(layers, schemes), choices[0][1])
    return dataclasses.replace(first, modules=tuple(choices) if len(choices) > 1 else ())
