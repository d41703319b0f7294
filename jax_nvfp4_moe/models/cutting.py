"""Which parts of a model are cut along the mesh axis `tensor`: heads, dense MLPs, vocabulary.

What cannot be cut is whole on every device, which changes speed and memory and no number.
"""

import functools
import logging
from collections.abc import Callable, Mapping
from typing import Any

from jax_nvfp4_moe.models.settings import Settings
from jax_nvfp4_moe.numerics.nvfp4 import BLOCK
from jax_nvfp4_moe.parallel.expert_mesh import TENSOR, ExpertMesh, stack_parts
from jax_nvfp4_moe.parallel.parts import ByRows, Parts, Split, build_parts
from jax_nvfp4_moe.scheme import DYNAMIC, FP8ActivationScaling, choose_scheme

log = logging.getLogger("jax_nvfp4_moe")


def cutting_grid(weights, settings: Settings) -> ExpertMesh | None:
    """Return the grid to cut along; None for one shard, and where nothing is read yet."""
    expert_mesh = settings.expert_mesh
    return (
        expert_mesh
        if expert_mesh is not None and expert_mesh.tensor > 1 and weights.reads
        else None
    )


def build_cut(
    build: Callable[..., Any],
    whole: Any,
    own: Any,
    weights,
    settings: Settings,
    *,
    splits: Mapping[str, Split],
    last: str,
    width: int,
    why_whole: str | None = None,
    kind: Callable[[Any, ExpertMesh], Any] = Parts,
) -> Any:
    """Build a module in parts along `tensor`, or whole where it cannot be cut.

    Args:
      build: ``(weights, sizes)`` makes the module.
      whole, own: sizes of the whole module and of one part.
      weights: the source of `checkpoint.resolve`.
      settings: how modules are made.
      splits: how the linears are cut, see `parallel.parts`.
      last: the linear whose columns are cut.
      width: columns of that, all parts together.
      why_whole: what else stands against cutting.
      kind: makes the result of the parts and their grid.
    """
    expert_mesh = cutting_grid(weights, settings)
    if expert_mesh is None:
        return build(weights, whole)
    why = why_whole or _why_whole(weights, settings, last, width, expert_mesh.tensor)
    if why is not None:
        _say(last.rpartition(".")[2], expert_mesh.tensor, why)
        return build(weights, whole)
    return kind(
        build_parts(lambda part: build(part, own), weights, splits, expert_mesh), expert_mesh
    )


def _why_whole(weights, settings, module, width, parts) -> str | None:
    """Say why the columns of a linear cannot be cut, None if they can."""
    checkpoint_scheme = weights.checkpoint_scheme(module)
    block = 1
    if isinstance(checkpoint_scheme, FP8ActivationScaling):
        used = checkpoint_scheme if settings.rounds_to_fp8 else None
    elif checkpoint_scheme is not None:
        block = BLOCK
        used, _ = choose_scheme(checkpoint_scheme, settings.scheme, settings.target)
    else:
        used = None
    if used in DYNAMIC:
        return f"{used} takes scales from whole rows"
    if width % (parts * block):
        return f"{width} columns do not make {parts} parts of whole blocks of {block}"
    return None


@functools.cache
def _say(name: str, parts: int, why: str) -> None:
    """Log once what stays whole."""
    log.info("modules with %s are whole on each of %d shards of '%s': %s", name, parts, TENSOR, why)


def beside_experts(module: Any, settings: Settings) -> Any:
    """Return a module of the tokens of an expert block as it runs there.

    Where `dispatch` shares the tokens out, it runs on each shard's own; else as it is.
    """
    expert_mesh = settings.expert_mesh
    if (
        module is None
        or expert_mesh is None
        or settings.dispatch == "psum"
        or expert_mesh.expert == 1
    ):
        return module
    return ByRows(module, expert_mesh)


def cut_vocabulary(weights, settings: Settings, vocabulary: int) -> ExpertMesh | None:
    """Return the grid along which embedding and head are cut, None where they are whole."""
    expert_mesh = cutting_grid(weights, settings)
    if expert_mesh is not None and vocabulary % expert_mesh.tensor:
        _say("the vocabulary", expert_mesh.tensor, f"{vocabulary} rows do not divide")
        return None
    return expert_mesh


def cut_table(weights, name: str, rows: int, width: int, expert_mesh: ExpertMesh) -> Any:
    """Return the array `name` ``[rows, width]`` as ``[tensor, rows / tensor, width]``, cut."""
    own = rows // expert_mesh.tensor

    def place(name, value, checkpoint_scheme):
        def part(index):
            first = (index[0].start or 0) * own
            return value[first : first + own][None]

        return stack_parts((expert_mesh.tensor, own, width), expert_mesh.sharding(TENSOR), part)

    return weights.placing(place).array(name, (rows, width))
