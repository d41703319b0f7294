"""Placement of experts on devices: replicas of busy experts, and nearly equal loads.

A model has e logical experts, which its router names. A `Placement` has p >= e physical experts,
each a replica of one logical expert. Device d of m holds the physical experts (slots) from
``d * p / m`` to ``(d + 1) * p / m - 1``. A step waits for the busiest device, so a placement is
judged by ``max / mean`` of the loads of the devices.

Source: DeepSeek's expert-parallel load balancer has the same greedy replication, and places the
largest replicas first (arXiv:2412.19437, section 3.4; github.com/deepseek-ai/EPLB).
"""

import dataclasses
import functools
import heapq
from typing import TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import AxisType, NamedSharding, PartitionSpec, reshard
from jaxtyping import Array, Bool, Int, Int32

from jax_nvfp4_moe.numerics.tensor import DenseExperts, MoEParams

Experts = TypeVar("Experts", MoEParams, DenseExperts)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class SlotTable:
    """The slots in which the replicas of each logical expert are stored.

    Attributes:
      slots: int32 ``[e, r]``, the slots of each logical expert. Entries after the last replica
        repeat the first one.
      copies: int32 ``[e]``, the number of replicas of each expert, 1 to r.
    """

    slots: jax.Array
    copies: jax.Array

    def physical_ids(self, expert_ids: Int[Array, "t k"]) -> Int32[Array, "t k"]:
        """Return the slots to which tokens go: token t uses replica ``t mod copies`` of its expert.

        Args:
          expert_ids: integers ``[t, k]``, logical ids. An id that is -1 or out of range gives -1.

        Returns:
          int32 ``[t, k]``.
        """
        ids = expert_ids.astype(jnp.int32)
        here = (ids >= 0) & (ids < self.copies.shape[0])
        safe = jnp.where(here, ids, 0)
        turn = jnp.arange(ids.shape[0], dtype=jnp.int32)[:, None] % self.copies[safe]
        return jnp.where(here, self.slots[safe, turn], -1)


class ExpertSlots(nnx.Variable):
    """A `SlotTable` in a module: where the replicas of each expert of a block are stored."""


def to_physical_ids(expert_ids: Int[Array, "t k"], slots: ExpertSlots | None) -> Int[Array, "t k"]:
    """Return the physical ids of logical experts.

    Args:
      expert_ids: integers ``[t, k]``, logical ids.
      slots: where the replicas are stored; None if physical and logical ids are equal.
    """
    if slots is None:
        return expert_ids
    return slots.get_value().physical_ids(_replicated(expert_ids))


def count_choices(
    expert_ids: Int[Array, "t k"], num_experts: int, counted: Bool[Array, " t"] | None = None
) -> Int32[Array, " e"]:
    """Count how often each expert is chosen.

    Args:
      expert_ids: integers ``[t, k]``, logical or physical. An id that is -1 or out of range is not
        counted.
      num_experts: number of experts e.
      counted: bool ``[t]``, the tokens to count; None (default) for all.

    Returns:
      int32 ``[e]``.

    Example:
      >>> import jax.numpy as jnp
      >>> from jax_nvfp4_moe.parallel.placement import count_choices
      >>> count_choices(jnp.array([[0, 2], [2, -1]]), 3).tolist()
      [1, 0, 2]
    """
    expert_ids = _replicated(expert_ids)
    outside = expert_ids < 0  # as an index, -1 would select the last expert
    outside = outside if counted is None else outside | ~counted[:, None]
    chosen = jnp.zeros(num_experts, jnp.int32)
    return chosen.at[jnp.where(outside, num_experts, expert_ids)].add(1, mode="drop")


def _replicated(expert_ids):
    """Return the ids replicated on all devices, like the slot table.

    With Auto axes the ids are unchanged, because XLA chooses their sharding.
    """
    mesh = jax.typeof(expert_ids).sharding.mesh
    if AxisType.Explicit not in mesh.axis_types:
        return expert_ids
    return reshard(expert_ids, NamedSharding(mesh, PartitionSpec()))


@dataclasses.dataclass(frozen=True)
class Placement:
    """The logical expert that each slot holds; static.

    Attributes:
      experts: logical expert of each slot ``[p]``. The first ``p / m`` slots are those of device 0.
      num_experts: number of logical experts e; each is in `experts` at least once.
      num_devices: number of devices m, a divisor of p.

    Raises:
      ValueError: if m does not divide p, a logical expert is in no slot, or a slot names an unknown
        expert.

    Example:
      >>> from jax_nvfp4_moe.parallel.placement import Placement
      >>> placement = Placement((0, 1, 0, 2), num_experts=3, num_devices=2)
      >>> placement.copies.tolist()
      [2, 1, 1]
      >>> placement.expected_load([4.0, 1.0, 3.0]).tolist()
      [3.0, 5.0]
    """

    experts: tuple[int, ...]
    num_experts: int
    num_devices: int

    def __post_init__(self):
        """Check that each logical expert has a slot, and that devices hold equally many slots."""
        _check_sizes(self.num_experts, self.num_devices, len(self.experts))
        missing = set(range(self.num_experts)) - set(self.experts)
        unknown = set(self.experts) - set(range(self.num_experts))
        if missing or unknown:
            raise ValueError(
                f"experts: expected all ids from 0 to {self.num_experts - 1} and no others; "
                f"missing {sorted(missing)}, unknown {sorted(unknown)}"
            )

    @property
    def num_physical(self) -> int:
        """Number of physical experts p, which is the number of slots."""
        return len(self.experts)

    @functools.cached_property
    def copies(self) -> np.ndarray:
        """Number of replicas of each logical expert, int32 ``[e]``."""
        return np.bincount(self.experts, minlength=self.num_experts).astype(np.int32)

    def slot_table(self) -> SlotTable:
        """Return the slots of the replicas as arrays for a traced function."""
        slots = np.full((self.num_experts, self.copies.max()), -1, np.int32)
        filled = np.zeros(self.num_experts, np.int32)
        for slot, expert in enumerate(self.experts):
            slots[expert, filled[expert]] = slot
            filled[expert] += 1
        slots = np.where(slots < 0, slots[:, :1], slots)
        return SlotTable(jnp.asarray(slots), jnp.asarray(self.copies))

    def expected_load(self, load) -> np.ndarray:
        """Return the load of each device if the replicas of an expert share its load equally.

        Args:
          load: load of each logical expert ``[e]``, at least 0.

        Returns:
          float64 ``[m]``.
        """
        shares = (_check_load(load, self.num_experts) / self.copies)[list(self.experts)]
        return shares.reshape(self.num_devices, -1).sum(axis=-1)

    def routed_load(self, expert_ids) -> np.ndarray:
        """Count how many entries of `expert_ids` each device receives.

        Args:
          expert_ids: integers ``[t, k]``, logical ids of one call; see `SlotTable.physical_ids`.

        Returns:
          int64 ``[m]``.
        """
        slots = np.asarray(self.slot_table().physical_ids(jnp.asarray(expert_ids)))
        counts = np.bincount(slots[slots >= 0], minlength=self.num_physical)
        return counts.reshape(self.num_devices, -1).sum(axis=-1)


def unplaced(num_experts: int, num_devices: int) -> Placement:
    """Return the placement of a mesh without balancing: experts in their order, without replicas.

    Raises:
      ValueError: if the devices do not divide the experts.
    """
    return Placement(tuple(range(num_experts)), num_experts, num_devices)


def balance_experts(load, num_devices: int, num_physical: int | None = None) -> Placement:
    """Place experts on devices so that the loads of the devices are nearly equal.

    First, each additional replica goes to the expert with the largest load per replica. This makes
    the largest load per replica as small as possible. No expert gets more replicas than there are
    devices. Then the replicas are placed, the largest load first, on the least loaded device with a
    free slot. If w is the largest load per replica, ``max - min <= w`` over the devices, and thus
    ``max <= mean + w (m - 1) / m``.

    Args:
      load: load of each logical expert ``[e]``, at least 0; for example a row of
        `balance.count_experts`.
      num_devices: number of devices m.
      num_physical: number of slots p, a multiple of m from e to ``e * m``. None (default) for the
        smallest such number.

    Returns:
      The `Placement`.

    Raises:
      ValueError: if an argument is out of range.

    Example:
      >>> from jax_nvfp4_moe.parallel.placement import balance_experts
      >>> placement = balance_experts([6.0, 1.0, 1.0], num_devices=2, num_physical=4)
      >>> placement.copies.tolist()
      [2, 1, 1]
      >>> placement.expected_load([6.0, 1.0, 1.0]).tolist()
      [4.0, 4.0]

    Source: DeepSeek's load balancer, see the top of this module.
    """
    load = np.asarray(load, np.float64)
    load = _check_load(load, load.size)
    if num_physical is None:
        num_physical = -(-load.size // max(num_devices, 1)) * num_devices
    _check_sizes(load.size, num_devices, num_physical)
    copies = _copy(load, num_physical, num_devices)
    # Why max - min <= w: loads are placed in descending order. Let D be the busiest device with
    # loads d1, d2, ... and E the least busy one with loads e1, e2, ... If E always had j loads when
    # D received d[j+1], then d[j+1] <= e[j], and D - E <= d1. Otherwise take the last j at which E
    # had fewer loads. There D was chosen as the less busy of the two, and d[i+1] <= e[i] for all i
    # > j, so D - E <= d[j+1].
    experts = np.repeat(np.arange(load.size), copies)
    device = _pack((load / copies)[experts], num_devices)
    order = np.lexsort((experts, device))
    return Placement(tuple(experts[order].tolist()), load.size, num_devices)


def place_params(params: Experts, placement: Placement, held: SlotTable | None = None) -> Experts:
    """Return `params` with the experts that `placement` names, in its order.

    For each array, ``result[slot] = params[placement.experts[slot]]``. The layout does not change.

    Args:
      params: logical experts ``[e, ...]``, or physical experts ``[p, ...]`` if `held` is given.
      placement: the wanted placement.
      held: where the logical experts are stored in `params`; None (default) if `params` holds them
        in their order.

    Returns:
      Experts of the same class, ``[placement.num_physical, ...]``.

    Raises:
      ValueError: if the number of experts is not that of `placement`.
    """
    index = find_sources(params.num_experts, placement, held)
    return jax.tree.map(lambda leaf: jnp.take(leaf, index, axis=0), params)


def find_sources(num_experts: int, placement: Placement, held: SlotTable | None) -> np.ndarray:
    """Return for each slot of `placement` the index of its source in the stored experts.

    Args:
      num_experts: number of stored experts.
      placement: the wanted placement.
      held: where the logical experts are stored; see `place_params`.

    Returns:
      int32 ``[p]``.

    Raises:
      ValueError: if the number of experts is not that of `placement`.
    """
    first = np.arange(num_experts, dtype=np.int32) if held is None else np.asarray(held.slots[:, 0])
    if len(first) != placement.num_experts:
        raise ValueError(
            f"params: expected {placement.num_experts} experts, as in the placement; "
            f"got {len(first)}"
        )
    return first[list(placement.experts)]


def imbalance(device_load) -> float:
    """Return ``max / mean`` of the loads of devices ``[m]``.

    1 is the best value. It is also the result if all loads are 0.

    Example:
      >>> from jax_nvfp4_moe.parallel.placement import imbalance
      >>> imbalance([3.0, 5.0])
      1.25
    """
    load = np.asarray(device_load, np.float64)
    mean = load.mean()
    return float(load.max() / mean) if mean > 0 else 1.0


def _copy(load, num_physical, most):
    """Return the number of replicas of each expert, int ``[e]``; at most `most` each."""
    copies = np.ones(load.size, np.int64)
    # If loads are equal, the expert with fewer replicas gets the next replica.
    queue = [(-share, 1, expert) for expert, share in enumerate(load.tolist())]
    queue = queue if most > 1 else []
    heapq.heapify(queue)
    for _ in range(num_physical - load.size):
        _, have, expert = heapq.heappop(queue)
        copies[expert] = have = have + 1
        if have < most:
            heapq.heappush(queue, (-load[expert] / have, have, expert))
    return copies


def _pack(shares, num_devices):
    """Return a device for each load, equally many each: largest load first, to the least loaded."""
    room = shares.size // num_devices
    queue = [(0.0, 0, device) for device in range(num_devices)]
    devices = np.empty(shares.size, np.int64)
    for item in np.argsort(-shares, kind="stable"):
        load, filled, device = heapq.heappop(queue)
        devices[item] = device
        if filled + 1 < room:
            heapq.heappush(queue, (load + shares[item], filled + 1, device))
    return devices


def _check_load(load, num_experts):
    """Return the loads of the experts as float64 ``[e]``, if they are finite and at least 0."""
    load = np.asarray(load, np.float64)
    if load.shape != (num_experts,) or not load.size:
        raise ValueError(f"load: expected shape [{num_experts or 'e'}], got {load.shape}")
    if not (np.isfinite(load).all() and load.min() >= 0):
        raise ValueError(
            f"load: expected finite numbers of at least 0, got {load.min()} as the smallest"
        )
    return load


def _check_sizes(num_experts, num_devices, num_physical):
    """Check that the numbers of experts, devices and slots fit together."""
    if num_devices < 1 or num_physical % num_devices:
        raise ValueError(
            f"num_devices: expected a divisor of {num_physical}, the number of physical experts; "
            f"got {num_devices}"
        )
    if not num_experts <= num_physical <= num_experts * num_devices:
        raise ValueError(
            f"num_physical: expected a number from {num_experts}, one replica per expert, to "
            f"{num_experts * num_devices}, a replica of each expert on each device; got "
            f"{num_physical}"
        )
