"""Which device holds which expert: copies of those that are asked for most, and equal loads.

A model has e logical experts, those that its router names. A `Placement` has p >= e physical ones:
device d of m holds the slots ``d * p / m`` to ``(d + 1) * p / m - 1``, each a copy of one logical
expert. A step waits for the busiest device, so what counts is ``max / mean`` of their loads.

Source: the greedy copies and the packing of the largest first are those of DeepSeek's
expert-parallel load balancer (arXiv:2412.19437, section 3.4; github.com/deepseek-ai/EPLB).
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
    """Where the copies of each logical expert are.

    Attributes:
      slots: int32 ``[e, r]``, the physical slots of each logical expert; those past `copies` repeat
        the first.
      copies: int32 ``[e]``, how many there are, 1 to r.
    """

    slots: jax.Array
    copies: jax.Array

    def physical_ids(self, expert_ids: Int[Array, "t k"]) -> Int32[Array, "t k"]:
        """Return the slots that tokens go to: token t takes copy ``t mod copies`` of its expert.

        Args:
          expert_ids: logical; -1 or out of range gives -1.
        """
        ids = expert_ids.astype(jnp.int32)
        here = (ids >= 0) & (ids < self.copies.shape[0])
        safe = jnp.where(here, ids, 0)
        turn = jnp.arange(ids.shape[0], dtype=jnp.int32)[:, None] % self.copies[safe]
        return jnp.where(here, self.slots[safe, turn], -1)


class ExpertSlots(nnx.Variable):
    """A `SlotTable`: where the copies of each expert of a block are."""


def to_physical_ids(expert_ids: Int[Array, "t k"], slots: ExpertSlots | None) -> Int[Array, "t k"]:
    """Return the physical experts of logical ones.

    Args:
      expert_ids: logical.
      slots: where they are; None where the two are the same.
    """
    if slots is None:
        return expert_ids
    return slots.get_value().physical_ids(_replicated(expert_ids))


def count_choices(
    expert_ids: Int[Array, "t k"], num_experts: int, counted: Bool[Array, " t"] | None = None
) -> Int32[Array, " e"]:
    """Return how often each expert is chosen.

    Args:
      expert_ids: logical or physical; -1 or out of range counts for none.
      num_experts: e.
      counted: the tokens that count; all where None.
    """
    expert_ids = _replicated(expert_ids)
    outside = expert_ids < 0  # -1 would be the last one
    outside = outside if counted is None else outside | ~counted[:, None]
    chosen = jnp.zeros(num_experts, jnp.int32)
    return chosen.at[jnp.where(outside, num_experts, expert_ids)].add(1, mode="drop")


def _replicated(expert_ids):
    """Return ids that are on each device, as tables of slots are; of Auto axes XLA sees to that."""
    mesh = jax.typeof(expert_ids).sharding.mesh
    if AxisType.Explicit not in mesh.axis_types:
        return expert_ids
    return reshard(expert_ids, NamedSharding(mesh, PartitionSpec()))


@dataclasses.dataclass(frozen=True)
class Placement:
    """The logical expert that each physical slot holds; static.

    Attributes:
      experts: logical expert of each slot ``[p]``; the first ``p / m`` are those of device 0.
      num_experts: e; each is in `experts` at least once.
      num_devices: m, a divisor of p.

    Raises:
      ValueError: the slots do not fill the devices, an expert is in none, or there is no such one.
    """

    experts: tuple[int, ...]
    num_experts: int
    num_devices: int

    def __post_init__(self):
        """Check that all experts are there, and the devices full."""
        _check_sizes(self.num_experts, self.num_devices, len(self.experts))
        missing = set(range(self.num_experts)) - set(self.experts)
        unknown = set(self.experts) - set(range(self.num_experts))
        if missing or unknown:
            raise ValueError(
                f"experts: expected all of 0 to {self.num_experts - 1} and no other; "
                f"missing {sorted(missing)}, unknown {sorted(unknown)}"
            )

    @property
    def num_physical(self) -> int:
        """Number of physical experts p."""
        return len(self.experts)

    @functools.cached_property
    def copies(self) -> np.ndarray:
        """How many slots hold each logical expert, int32 ``[e]``."""
        return np.bincount(self.experts, minlength=self.num_experts).astype(np.int32)

    def slot_table(self) -> SlotTable:
        """Return where the copies are, as arrays for a traced function."""
        slots = np.full((self.num_experts, self.copies.max()), -1, np.int32)
        filled = np.zeros(self.num_experts, np.int32)
        for slot, expert in enumerate(self.experts):
            slots[expert, filled[expert]] = slot
            filled[expert] += 1
        slots = np.where(slots < 0, slots[:, :1], slots)
        return SlotTable(jnp.asarray(slots), jnp.asarray(self.copies))

    def expected_load(self, load) -> np.ndarray:
        """Return the load of each device ``[m]`` if copies of an expert share its load equally.

        Args:
          load: of each logical expert ``[e]``.
        """
        shares = (_check_load(load, self.num_experts) / self.copies)[list(self.experts)]
        return shares.reshape(self.num_devices, -1).sum(axis=-1)

    def routed_load(self, expert_ids) -> np.ndarray:
        """Return how many slots of `expert_ids` each device gets, int64 ``[m]``.

        Args:
          expert_ids: logical, of one call ``[t, k]``; see `SlotTable.physical_ids`.
        """
        slots = np.asarray(self.slot_table().physical_ids(jnp.asarray(expert_ids)))
        counts = np.bincount(slots[slots >= 0], minlength=self.num_physical)
        return counts.reshape(self.num_devices, -1).sum(axis=-1)


def unplaced(num_experts: int, num_devices: int) -> Placement:
    """Return the experts in their order, one copy each: what a mesh does by itself.

    Raises:
      ValueError: the experts do not fill the devices.
    """
    return Placement(tuple(range(num_experts)), num_experts, num_devices)


def balance_experts(load, num_devices: int, num_physical: int | None = None) -> Placement:
    """Place experts on devices so that their loads come out nearly equal.

    First each further copy goes to the expert with the largest load per copy, which makes the
    largest load per copy as small as it can be; no expert gets more copies than there are devices.
    Then the copies, largest first, go each to the least loaded device with a free slot. With w the
    largest load per copy, ``max - min <= w`` over the devices, so ``max <= mean + w (m - 1) / m``.

    Args:
      load: of each logical expert ``[e]``, such as a row of `balance.count_experts`; at least 0.
      num_devices: m.
      num_physical: p, from e to ``e * m``, a multiple of m; the least of those where None.

    Raises:
      ValueError: an argument is out of range.
    """
    load = np.asarray(load, np.float64)
    load = _check_load(load, load.size)
    if num_physical is None:
        num_physical = -(-load.size // max(num_devices, 1)) * num_devices
    _check_sizes(load.size, num_devices, num_physical)
    copies = _copy(load, num_physical, num_devices)
    # Why max - min <= w: shares are given out in falling order; let D end busiest with d1, d2, ...
    # and E least busy with e1, e2, ... If E always had j shares when D took d[j+1], then
    # d[j+1] <= e[j], and D - E <= d1. Else, at the last j where it had fewer, D was chosen as the
    # less busy of the two, and d[i+1] <= e[i] for all i > j: D - E <= d[j+1].
    experts = np.repeat(np.arange(load.size), copies)
    device = _pack((load / copies)[experts], num_devices)
    order = np.lexsort((experts, device))
    return Placement(tuple(experts[order].tolist()), load.size, num_devices)


def place_params(params: Experts, placement: Placement, held: SlotTable | None = None) -> Experts:
    """Return `params` with the experts that `placement` names, copied and in its order.

    ``result[slot] = params[placement.experts[slot]]`` for each array; any layout stays as it is.

    Args:
      params: logical experts ``[e, ...]``, or ``[p, ...]`` as `held` says.
      placement: what is wanted.
      held: where the logical experts are in `params`; None for their own order.

    Raises:
      ValueError: `params` has another number of experts.
    """
    index = find_sources(params.num_experts, placement, held)
    return jax.tree.map(lambda leaf: jnp.take(leaf, index, axis=0), params)


def find_sources(num_experts: int, placement: Placement, held: SlotTable | None) -> np.ndarray:
    """Return for each slot of `placement` which of `num_experts` it is a copy of, int32 ``[p]``.

    Args:
      num_experts, held: of what there is, see `place_params`.
      placement: what is wanted.

    Raises:
      ValueError: it is for another number of experts.
    """
    first = np.arange(num_experts, dtype=np.int32) if held is None else np.asarray(held.slots[:, 0])
    if len(first) != placement.num_experts:
        raise ValueError(
            f"params: expected {placement.num_experts} experts, as the placement has; "
            f"got {len(first)}"
        )
    return first[list(placement.experts)]


def imbalance(device_load) -> float:
    """Return ``max / mean`` of the loads of devices ``[m]``; 1 is the best, 1 where all are 0."""
    load = np.asarray(device_load, np.float64)
    mean = load.mean()
    return float(load.max() / mean) if mean > 0 else 1.0


def _copy(load, num_physical, most):
    """Return how many copies each expert gets, int ``[e]``."""
    copies = np.ones(load.size, np.int64)
    # Where loads are equal, an expert with fewer copies comes first.
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
    """Return a device for each share, equally many each: the largest first, to the least loaded."""
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
    load = np.asarray(load, np.float64)
    if load.shape != (num_experts,) or not load.size:
        raise ValueError(f"load: expected shape [{num_experts or 'e'}], got {load.shape}")
    if not (np.isfinite(load).all() and load.min() >= 0):
        raise ValueError(f"load: expected finite numbers of at least 0, got {load.min()} as least")
    return load


def _check_sizes(num_experts, num_devices, num_physical):
    if num_devices < 1 or num_physical % num_devices:
        raise ValueError(
            f"num_devices: expected a divisor of {num_physical} physical experts, got {num_devices}"
        )
    if not num_experts <= num_physical <= num_experts * num_devices:
        raise ValueError(
            f"num_physical: expected {num_experts} experts to {num_experts * num_devices}, a copy "
            f"on each of {num_devices} devices; got {num_physical}"
        )
