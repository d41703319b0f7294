"""Compare how many layers and experts a config declares with how many the file holds.

A load looks for each tensor of each declared layer and expert. A count that is far from what the
file holds is therefore one sentence, and nothing loops over it.
"""

import re

from jax_nvfp4_moe.checkpoint.folder import CONFIG
from jax_nvfp4_moe.checkpoint.safetensors import Tensors

# Up to this count, each missing tensor is named. So it is if the file holds half of the count.
_NAMED = 64
_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")


def refuse_layers(tensors: Tensors, declared: int) -> str | None:
    """Return a sentence if the file holds far fewer layers than the config declares, else None."""
    if declared <= _NAMED:
        return None
    held = len({found[1] for name in tensors.names() if (found := _LAYER.search(name))})
    if declared <= 2 * held:
        return None
    return (
        f"{CONFIG}: {declared} layers (num_hidden_layers, or a list of their types), but the file "
        f"holds tensors of {held}"
    )


def refuse_experts(tensors: Tensors, prefix: str, declared: int) -> tuple[str, int] | None:
    """Return a sentence and the number of experts held, if the file holds far fewer experts.

    Args:
      tensors: the tensors of the file.
      prefix: the module of the experts, such as "model.layers.0.mlp.experts".
      declared: the number of experts in the config.

    Returns:
      None if the file holds at least half of the experts.
    """
    if declared <= _NAMED:
        return None
    held = _count_experts(tensors, f"{prefix}.")
    if declared <= 2 * held:
        return None
    problem = f"{CONFIG}: {declared} experts in a layer, but the file holds {held} at {prefix!r}"
    return problem, max(held, 1)


def _count_experts(tensors, scope) -> int:
    """Return the number of experts below `scope`, one by one or in stacks."""
    names = list(tensors.under(scope))
    firsts = {name.removeprefix(scope).partition(".")[0] for name in names}
    numbers = set(filter(str.isdecimal, firsts))
    shapes = (tensors.info(name).shape for name in names)
    return len(numbers) or max((shape[0] for shape in shapes if shape), default=0)
