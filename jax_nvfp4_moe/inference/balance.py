"""The load of experts: count it in a run, place the experts of a model, measure what it brought.

load = count_experts(model, input_ids)                        # [layers, e]
place_model(model, [balance_experts(row, 8, 288) for row in load])  # 288 copies on 8 devices
device_load(model, input_ids, 8)                              # [layers, 8]
"""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_nvfp4_moe.models.blocks import expert_blocks, experts_path
from jax_nvfp4_moe.nn.intermediates import capture
from jax_nvfp4_moe.nn.moe import NVFP4MoE
from jax_nvfp4_moe.parallel.expert_mesh import EXPERT, ExpertMesh, check_parts
from jax_nvfp4_moe.parallel.placement import (
    ExpertSlots,
    Placement,
    SlotTable,
    count_choices,
    find_sources,
    place_params,
    to_physical_ids,
)


def count_experts(model: Any, input_ids, lengths=None) -> np.ndarray:
    """Return how many tokens chose each logical expert, int64 ``[layers, e]``.

    It reads what the blocks record of one call; `model` stays as it is.

    Args:
      model: as `load_model` returns, or a block; its experts may be placed.
      input_ids: what it takes: ``[b, t]`` tokens, or ``[b, t, h]`` and ``[t, h]`` for a block.
      lengths: true tokens of each row ``[b]``, 0 to t; the rest is padding and does not count. All
        count where None.

    Raises:
      ValueError: there are no experts, or layers with different numbers of them; `lengths` is of
        another size, or not of 0 to t.
    """
    rows = _count(model, input_ids, lengths, stored=False)
    if len({row.size for row in rows}) > 1:
        raise ValueError(f"model: expected one number of experts, got {[r.size for r in rows]}")
    return np.stack(rows)


def place_model(model: Any, placements: Sequence[Placement]) -> None:
    """Copy and order the experts of each block as its placement says, in place.

    The model computes what it did, up to the order of summation over experts. Ids that `route`
    gives and `experts` takes stay logical, those of the checkpoint. May be called again, with other
    placements. One layer is in memory twice; of experts over a mesh, one array of a layer is whole
    on each device for a moment.

    Args:
      model: as `load_model` returns, or a block.
      placements: one for each block; over a mesh, its axis `expert` is their devices.

    Raises:
      ValueError: their number, or that of the experts, is another; nothing is changed then.
    """
    blocks = _blocks(model)
    if len(placements) != len(blocks):
        raise ValueError(f"placements: expected {len(blocks)}, one a layer; got {len(placements)}")
    sources = [_sources(block, to) for block, to in zip(blocks, placements, strict=True)]
    for block, to, index in zip(blocks, placements, sources, strict=True):
        experts, table = block.experts, to.slot_table()
        params, expert_mesh = experts.params.get_value(), experts.expert_mesh
        if expert_mesh is None:
            params = place_params(params, to, _table(block))
        else:
            params = _place_shards(params, index, expert_mesh)
            table = jax.device_put(table, expert_mesh.sharding())
        experts.replace_params(params)
        experts.slots = ExpertSlots(table)


def _blocks(model) -> list[NVFP4MoE]:
    """Return the blocks with experts inside `model`; there must be one."""
    found = [block for _, block in expert_blocks(model)]
    if not found:
        raise ValueError("model: expected a model with an NVFP4MoE inside, found none")
    return found


def _table(block) -> SlotTable | None:
    slots = block.experts.slots
    return None if slots is None else slots.get_value()


def _sources(block, placement):
    """Return what each slot copies, after all checks."""
    params, expert_mesh = block.experts.params.get_value(), block.experts.expert_mesh
    if expert_mesh is not None:
        check_parts(EXPERT, expert_mesh.expert, "num_physical", placement.num_physical)
        if placement.num_devices != expert_mesh.expert:
            raise ValueError(
                f"placements: expected those of {expert_mesh.expert} devices, axis '{EXPERT}' of "
                f"the mesh; got {placement.num_devices}"
            )
    return find_sources(params.num_experts, placement, _table(block))


def _place_shards(params, index, expert_mesh: ExpertMesh):
    """Return the experts `index` over their mesh."""
    # XLA finds out what to send; axes that are Explicit would ask for it in the program.
    auto = expert_mesh.automatic()

    def move(leaf):
        sharding = auto.named_sharding(leaf.sharding.spec)
        take = jax.jit(lambda leaf: jnp.take(leaf, index, axis=0), out_shardings=sharding)
        with jax.set_mesh(auto.mesh):
            moved = take(jax.device_put(leaf, sharding))
        return jax.device_put(moved, leaf.sharding)

    return jax.tree.map(move, params)


def device_load(model: Any, input_ids, num_devices: int, lengths=None) -> np.ndarray:
    """Return how many routed tokens each device gets, int64 ``[layers, num_devices]``.

    Args:
      model, input_ids, lengths: as for `count_experts`.
      num_devices: the experts that a block holds are on them in equal, contiguous parts, as on
        the `expert` axis of a mesh.

    Raises:
      ValueError: the experts of a layer do not fill the devices; `lengths` as there.
    """
    rows = _count(model, input_ids, lengths, stored=True)
    for row in rows:
        if num_devices < 1 or row.size % num_devices:
            raise ValueError(
                f"num_devices: expected a divisor of {row.size} experts, got {num_devices}"
            )
    return np.stack([row.reshape(num_devices, -1).sum(axis=-1) for row in rows])


def _count(model, input_ids, lengths, stored):
    """Return how many tokens each expert got: int64 ``[e]`` of each block, as stored or logical."""
    _blocks(model)
    input_ids = jnp.asarray(input_ids)
    counted = None if lengths is None else _true_tokens(input_ids.shape[:2], np.asarray(lengths))
    return [np.asarray(row, np.int64) for row in _run(model, input_ids, counted, stored)]


def _true_tokens(shape, lengths):
    """Return bool ``[b * t]``: which tokens of all rows are no padding."""
    rows, t = shape
    if lengths.shape != (rows,) or not ((lengths >= 0) & (lengths <= t)).all():
        raise ValueError(f"lengths: expected {rows} numbers of 0 to {t}, got {lengths.tolist()}")
    return jnp.asarray((np.arange(t) < lengths[:, None]).reshape(-1))


@functools.partial(jax.jit, static_argnames="stored")
def _run(model, input_ids, counted, stored):
    """Return how often the experts of each block were chosen in one call."""
    with capture(model) as seen:
        model(input_ids)
    return [
        sum(_choices(block, call.expert_ids, counted, stored) for call in seen[experts_path(path)])
        for path, block in expert_blocks(model)
        if experts_path(path) in seen
    ]


def _choices(block, expert_ids, counted, stored):
    ids, table = expert_ids.reshape(-1, expert_ids.shape[-1]), _table(block)
    size = block.experts.params.get_value().num_experts
    if stored:
        ids = to_physical_ids(ids, block.experts.slots)
    elif table is not None:
        size = table.copies.shape[0]
    return count_choices(ids, size, counted)
