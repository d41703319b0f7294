"""Decide which modules are sharded along the mesh axis `tensor`, and build them.

A module that cannot be sharded is replicated. Replication costs speed and memory but changes no
result.
"""

import functools
import logging
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from jax_nvfp4_moe.nn.building.builder import Builder
from jax_nvfp4_moe.numerics.fp8 import GROUP
from jax_nvfp4_moe.numerics.fp8_blocks import BlockFP8
from jax_nvfp4_moe.numerics.nvfp4 import BLOCK
from jax_nvfp4_moe.parallel.expert_mesh import TENSOR
from jax_nvfp4_moe.parallel.shard_spec import ShardSpec
from jax_nvfp4_moe.scheme import DYNAMIC, FP8ActivationScaling, Scheme, choose_scheme

log = logging.getLogger("jax_nvfp4_moe")
Sizes = TypeVar("Sizes")


def build_sharded(
    make: Builder,
    build: Callable[[Builder, Sizes], Any],
    whole: Sizes,
    own: Sizes,
    *,
    specs: Mapping[str, ShardSpec | None],
    last: str,
    width: int,
    reason: str | None = None,
) -> Any:
    """Build a module that is sharded along `tensor`, or replicated if it cannot be sharded.

    Args:
      make: builder that makes the parts.
      build: function ``(make, sizes) -> module``.
      whole: sizes of the whole module, passed to `build` if the module is replicated.
      own: sizes of one shard, passed to `build` if the module is sharded.
      specs: last name of a path, or its last two names, -> how the part at that path is sharded.
        None means that it is replicated.
      last: path of the linear layer whose columns are sharded.
      width: number of columns of that layer, over all shards.
      reason: why the caller cannot divide the module. None (default) if the caller knows of no
        reason.

    Returns:
      The module that `build` made.
    """
    settings = make.settings
    if settings.shards == 1:
        return build(make, whole)
    reason = reason or _reason_against(make, last, width)
    if reason is not None:
        say_replicated(make.key(last).rpartition(".")[2], settings.shards, reason)
        return build(make, whole)
    module = build(make.sharded(specs), own)
    module.expert_mesh = settings.expert_mesh
    return module


def _reason_against(make, last, width) -> str | None:
    """Return why the columns of a linear layer cannot be sharded, or None if they can."""
    settings, shards = make.settings, make.settings.shards
    checkpoint_scheme = make.checkpoint_scheme(last)
    block, used = 1, None
    if checkpoint_scheme is BlockFP8.SQUARE:
        block = GROUP
    elif isinstance(checkpoint_scheme, FP8ActivationScaling):
        used = checkpoint_scheme if settings.rounds_to_fp8 else None
    elif isinstance(checkpoint_scheme, Scheme):
        block = BLOCK
        used, _ = choose_scheme(checkpoint_scheme, settings.scheme, settings.target)
    if used in DYNAMIC:
        return f"{used} computes the scales of activations from whole rows, which no shard has"
    if width % (shards * block):
        blocks = f" of whole blocks of {block}" if block > 1 else ""
        return f"{width} columns cannot be divided into {shards} equal parts{blocks}"
    return None


@functools.cache
def say_replicated(name: str, shards: int, reason: str) -> None:
    """Log, once for each case, which modules are replicated and why."""
    log.info(
        "modules with %s are replicated on all %d shards of the mesh axis '%s', which costs memory "
        "and speed but changes no result: %s",
        name,
        shards,
        TENSOR,
        reason,
    )
