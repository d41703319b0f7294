"""Which parts of a model are cut along the mesh axis `tensor`: heads, dense MLPs, vocabulary.

What cannot be cut is whole on every device, which changes speed and memory and no number.
"""

import functools
import logging
from collections.abc import Callable, Mapping
from typing import Any

from jax_nvfp4_moe.models.settings import Settings
from jax_nvfp4_moe.numerics.nvfp4 import BLOCK
from jax_nvfp4_moe.parallel.grid import TENSOR, Grid, stack_parts
from jax_nvfp4_moe.parallel.parts import ByRows, Parts, Split, build_parts
from jax_nvfp4_moe.scheme import DYNAMIC, Float8, choose_scheme

log = logging.getLogger("jax_nvfp4_moe")


def cutting_grid(weights, settings: Settings) -> Grid | None:
    """Return the grid to cut along; None for one shard, and where nothing is read yet."""
    grid = settings.grid
    return grid if grid is not None and grid.tensor > 1 and weights.reads else None


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
    kind: Callable[[Any, Grid], Any] = Parts,
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
    grid = cutting_grid(weights, settings)
    if grid is None:
        return build(weights, whole)
    why = why_whole or _why_whole(weights, settings, last, width, grid.tensor)
    if why is not None:
        _say(last.rpartition(".")[2], grid.tensor, why)
        return build(weights, whole)
    return kind(build_parts(lambda part: build(part, own), weights, splits, grid), grid)


def _why_whole(weights, settings, module, width, parts) -> str | None:
    """Say why the columns of a linear cannot be cut, None if they can."""
    declared = weights.declared(module)
    block = 1
    if isinstance(declared, Float8):
        used = declared if settings.rounds_to_fp8 else None
    elif declared is not None:
        block = BLOCK
        used, _ = choose_scheme(declared, settings.scheme, settings.target)
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

    Where `exchange` shares the tokens out, it runs on each shard's own; else as it is.
    """
    grid = settings.grid
    if module is None or grid is None or settings.exchange == "psum" or grid.expert == 1:
        return module
    return ByRows(module, grid)


def cut_vocabulary(weights, settings: Settings, vocabulary: int) -> Grid | None:
    """Return the grid along which embedding and head are cut, None where they are whole."""
    grid = cutting_grid(weights, settings)
    if grid is not None and vocabulary % grid.tensor:
        _say("the vocabulary", grid.tensor, f"{vocabulary} rows do not divide")
        return None
    return grid


def cut_table(weights, name: str, rows: int, width: int, grid: Grid) -> Any:
    """Return the array `name` ``[rows, width]`` as ``[tensor, rows / tensor, width]``, cut."""
    own = rows // grid.tensor

    def place(name, value, declared):
        def part(index):
            first = (index[0].start or 0) * own
            return value[first : first + own][None]

        return stack_parts((grid.tensor, own, width), grid.sharding(TENSOR), part)

    return weights.placing(place).array(name, (rows, width))
