"""Balance the experts of a model over devices: count their load, place them, measure the result.

A step waits for the device with the most routed tokens. Replicas of busy experts, and a better
order of the experts, even out the load::

  load = count_experts(model, input_ids)  # [layers, e]
  placements = [balance_experts(row, 8, 288) for row in load]  # 288 physical experts, 8 devices
  place_model(model, placements)
  device_load(model, input_ids, 8)  # [layers, 8]
"""

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jax_nvfp4_moe.nn.building.keys import DRAFTER
from jax_nvfp4_moe.nn.experts.moe import NVFP4MoE, expert_blocks, experts_path
from jax_nvfp4_moe.nn.intermediates import capture
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


def count_experts(model: nnx.Module, input_ids, lengths=None) -> np.ndarray:
    """Return how many tokens chose each expert, int64 ``[layers, e]``.

    The function runs the model once and reads the expert ids that its blocks record. It does not
    change `model`.

    Args:
      model: model from `load_model`, or an `NVFP4MoE`. Its experts may already be placed; the
        counts are of logical experts in either case.
      input_ids: token ids ``[b, t]`` for a model; activations ``[b, t, h]`` or ``[t, h]`` for a
        block.
      lengths: integers ``[b]`` from 0 to t, the number of tokens in each row. Tokens behind them
        are padding and do not count. None counts all tokens.

    Raises:
      ValueError: there are no experts, layers have different numbers of experts, or `lengths` has a
        wrong size or value.
    """
    rows = _count(model, input_ids, lengths, stored=False)
    if len({row.size for row in rows}) > 1:
        raise ValueError(
            "model: expected the same number of experts in every layer, got "
            f"{[row.size for row in rows]}"
        )
    return np.stack(rows)


def place_model(model: nnx.Module, placements: Sequence[Placement]) -> None:
    """Replicate and reorder the experts of each block in place, as its placement says.

    The model computes the same results, up to the order in which it sums over experts. `route`
    still returns the expert ids of the checkpoint, and `experts` still takes them. You can call
    `place_model` again with other placements.

    The function needs memory for a second copy of one layer. Over a mesh, one array of a layer at a
    time is replicated on every device for a moment.

    Args:
      model: model from `load_model`, or an `NVFP4MoE`.
      placements: one `Placement` per row of `count_experts`. Over a mesh, the devices of a
        placement are the shards along the axis `expert`.

    Raises:
      ValueError: the number of placements, experts or devices is wrong. The model is then
        unchanged.
    """
    blocks = _blocks(model)
    if len(placements) != len(blocks):
        raise ValueError(
            f"placements: expected {len(blocks)}, one per layer with experts; got {len(placements)}"
        )
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
    """Return the blocks with experts that a call of `model` runs.

    Those of drafting layers are not among them.

    Raises:
      ValueError: there are none.
    """
    blocks = expert_blocks(model)
    found = [block for path, block in blocks if not path.startswith(f"{DRAFTER}.")]
    if not found:
        raise ValueError(
            f"model: expected a module that contains an NVFP4MoE; {type(model).__name__} has none"
        )
    return found


def _table(block) -> SlotTable | None:
    """Return where the experts of a block are stored; None if expert i is stored at index i."""
    slots = block.experts.slots
    return None if slots is None else slots.get_value()


def _sources(block, placement):
    """Check a placement, and return for each slot the index of the stored expert that it copies."""
    params, expert_mesh = block.experts.params.get_value(), block.experts.expert_mesh
    if block.experts.adapter is not None:
        raise ValueError(
            "model: expected experts without adapters, because these stay in the order of the "
            "checkpoint; got experts that add_lora has adapted. Place the experts of another model"
        )
    if expert_mesh is not None:
        check_parts(EXPERT, expert_mesh.expert, "num_physical", placement.num_physical)
        if placement.num_devices != expert_mesh.expert:
            raise ValueError(
                f"placements: expected placements on {expert_mesh.expert} devices, the size of the "
                f"mesh axis '{EXPERT}'; got {placement.num_devices}"
            )
    return find_sources(params.num_experts, placement, _table(block))


def _place_shards(params, index, expert_mesh: ExpertMesh):
    """Return the experts at `index`, sharded like `params`."""
    # With Auto axes, XLA inserts the communication. Explicit axes would need it in the program.
    auto = expert_mesh.automatic()

    def move(leaf):
        sharding = auto.named_sharding(leaf.sharding.spec)
        take = jax.jit(lambda leaf: jnp.take(leaf, index, axis=0), out_shardings=sharding)
        with jax.set_mesh(auto.mesh):
            moved = take(jax.device_put(leaf, sharding))
        return jax.device_put(moved, leaf.sharding)

    return jax.tree.map(move, params)


def device_load(model: nnx.Module, input_ids, num_devices: int, lengths=None) -> np.ndarray:
    """Return how many routed tokens each device gets, int64 ``[layers, num_devices]``.

    Device d holds an equal, contiguous part of the stored experts, as on the axis `expert` of a
    mesh.

    Args:
      model: as for `count_experts`.
      input_ids: as for `count_experts`.
      num_devices: number of devices; it must divide the number of stored experts.
      lengths: as for `count_experts`.

    Raises:
      ValueError: `num_devices` does not divide the experts of a layer, or `lengths` is wrong.
    """
    rows = _count(model, input_ids, lengths, stored=True)
    for row in rows:
        if num_devices < 1 or row.size % num_devices:
            raise ValueError(
                f"num_devices: expected a divisor of {row.size} experts, got {num_devices}"
            )
    return np.stack([row.reshape(num_devices, -1).sum(axis=-1) for row in rows])


def _count(model, input_ids, lengths, stored):
    """Return how many tokens each expert of each block got, int64 ``[e]`` per block.

    Args:
      model: as for `count_experts`.
      input_ids: as for `count_experts`.
      lengths: as for `count_experts`.
      stored: whether to count stored (physical) experts instead of logical ones.
    """
    _blocks(model)
    input_ids = jnp.asarray(input_ids)
    counted = None if lengths is None else _true_tokens(input_ids.shape[:2], np.asarray(lengths))
    return [np.asarray(row, np.int64) for row in _run(model, input_ids, counted, stored)]


def _true_tokens(shape, lengths):
    """Return which of all tokens are not padding, bool ``[b * t]``."""
    rows, t = shape
    if lengths.shape != (rows,) or not ((lengths >= 0) & (lengths <= t)).all():
        raise ValueError(f"lengths: expected {rows} numbers from 0 to {t}, got {lengths.tolist()}")
    return jnp.asarray((np.arange(t) < lengths[:, None]).reshape(-1))


@functools.partial(jax.jit, static_argnames="stored")
def _run(model, input_ids, counted, stored):
    """Run the model once, and return how often each expert of each block was chosen."""
    with capture(model) as seen:
        model(input_ids)
    return [
        sum(_choices(block, call.expert_ids, counted, stored) for call in seen[experts_path(path)])
        for path, block in expert_blocks(model)
        if experts_path(path) in seen
    ]


def _choices(block, expert_ids, counted, stored):
    """Return how often one call of a block chose each of its experts."""
    ids, table = expert_ids.reshape(-1, expert_ids.shape[-1]), _table(block)
    size = block.experts.params.get_value().num_experts
    if stored:
        ids = to_physical_ids(ids, block.experts.slots)
    elif table is not None:
        size = table.copies.shape[0]
    return count_choices(ids, size, counted)
