"""Which modules are divided along the mesh axis `tensor`: by heads, columns, or not at all.

What cannot be divided is replicated, which changes speed and memory and no number.
"""

import functools
import logging
from collections.abc import Callable, Mapping
from typing import Any

from jax_nvfp4_moe.nn.building import Builder
from jax_nvfp4_moe.numerics.nvfp4 import BLOCK
from jax_nvfp4_moe.parallel.expert_mesh import TENSOR
from jax_nvfp4_moe.parallel.shard_spec import ShardSpec
from jax_nvfp4_moe.scheme import DYNAMIC, FP8ActivationScaling, choose_scheme

log = logging.getLogger("jax_nvfp4_moe")


def divide(
    make: Builder,
    build: Callable[[Builder, Any], Any],
    whole: Any,
    own: Any,
    *,
    specs: Mapping[str, ShardSpec],
    last: str,
    width: int,
    reason: str | None = None,
) -> Any:
    """Build a module divided along `tensor`, or replicated where it cannot be divided.

    Args:
      make: builds the parts.
      build: ``(make, sizes)`` makes the module.
      whole, own: sizes of the whole module and of one shard.
      specs: last name of a path -> how that part is divided.
      last: path of the linear whose columns are divided.
      width: columns of that, of all shards together.
      reason: what else stands against dividing; None for nothing.
    """
    settings = make.settings
    if settings.shards == 1:
        return build(make, whole)
    reason = reason or _reason_against(make, last, width)
    if reason is not None:
        say_replicated(make.key(last).rpartition(".")[2], settings.shards, reason)
        return build(make, whole)
    module = build(make.divided(specs), own)
    module.expert_mesh = settings.expert_mesh
    return module


def _reason_against(make, last, width) -> str | None:
    """Say why the columns of a linear cannot be divided, None if they can."""
    settings, shards = make.settings, make.settings.shards
    checkpoint_scheme = make.checkpoint_scheme(last)
    block, used = 1, None
    if isinstance(checkpoint_scheme, FP8ActivationScaling):
        used = checkpoint_scheme if settings.rounds_to_fp8 else None
    elif checkpoint_scheme is not None:
        block = BLOCK
        used, _ = choose_scheme(checkpoint_scheme, settings.scheme, settings.target)
    if used in DYNAMIC:
        return f"{used} takes scales from whole rows"
    if width % (shards * block):
        return f"{width} columns do not make {shards} parts of whole blocks of {block}"
    return None


@functools.cache
def say_replicated(name: str, shards: int, reason: str) -> None:
    """Log once what is replicated."""
    log.info(
        "modules with %s are whole on each of %d shards of '%s': %s", name, shards, TENSOR, reason
    )
