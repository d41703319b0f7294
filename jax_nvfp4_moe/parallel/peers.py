"""`connect_peers`: let the GPUs of one host add up small arrays through each other's memory.

XLA adds up arrays by NCCL. For a few rows, starting NCCL takes longer than the transfer, and it
ends a chain of kernels. Connected GPUs write small arrays to each other's memory instead
(``ffi/cuda/collectives``). The memory is allocated here, before any program is traced.

GPUs of one process find each other's memory by its address. Those of several processes exchange
handles (CUDA IPC), which works on one host only.
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from jax_nvfp4_moe.backends import _ffi
from jax_nvfp4_moe.backends.launch_facts import facts
from jax_nvfp4_moe.ops.all_reduce import PeerGroups
from jax_nvfp4_moe.parallel.expert_mesh import EXPERT, TENSOR, ExpertMesh, find_expert_mesh

# The roles of the axes along which sums are taken: those of experts, and those of other modules.
# Each kind has memory of its own, because a sum of one kind may run beside one of the other.
SUMS = (EXPERT, TENSOR), (TENSOR,)
Groups = tuple[tuple[jax.Device, ...], ...]


def connect_peers(
    mesh: Any, axis_names: Mapping[str, str] | None = None, *, timeout: float = 60.0
) -> ExpertMesh:
    """Connect the memory of the GPUs of a mesh, and return the mesh for `load_model`.

    Models on the returned mesh add up small arrays through the connected memory, and larger ones as
    before. Call the function once, before models are made. With several processes, all of them
    call it.

    The kernel has been compiled and emulated, but not executed on GPUs.

    Args:
      mesh: as for `load_model`: NVIDIA GPUs of one host. At most 8 of them share a sum.
      axis_names: as for `load_model`. None (default) if the axes are called what they do.
      timeout: seconds that a GPU waits for another one in a sum, 60 by default. After that time,
        the program fails, and the process cannot use the GPU any more.

    Returns:
      An `ExpertMesh`, which the argument `mesh` of all functions of this package accepts.

    Raises:
      ValueError: if `mesh` has other devices, or too many, or if `timeout` is not positive.
      RuntimeError: if the CUDA kernels are missing, or if the GPUs cannot access each other's
        memory; the message says which.
    """
    expert_mesh = find_expert_mesh(mesh, axis_names)
    if not timeout > 0:
        raise ValueError(f"timeout: expected a positive number of seconds, got {timeout}")
    if expert_mesh.target.platform != "cuda":
        raise ValueError(f"mesh: expected NVIDIA GPUs, got {expert_mesh.target}")
    if reason := _ffi.why_unavailable("_nvfp4_cuda"):
        raise RuntimeError(reason)
    most, connected = facts().PEERS[-1], []
    for roles in SUMS:
        axes = [expert_mesh.name(role) for role in roles if expert_mesh.has(role)]
        groups = group_devices(expert_mesh, axes)
        size = len(groups[0])
        if size > most:
            raise ValueError(
                f"mesh: expected at most {most} GPUs along the axes {', '.join(axes)}, which share "
                f"a sum; got {size}"
            )
        if size > 1:
            connected.append((roles, _connect(roles, groups, timeout)))
    return dataclasses.replace(expert_mesh, peers=tuple(connected))


def group_devices(expert_mesh: ExpertMesh, axes: Sequence[str]) -> Groups:
    """Return the devices that differ along `axes` only, for each place on the other axes."""
    mesh = expert_mesh.mesh
    last = [mesh.axis_names.index(name) for name in axes]
    others = [axis for axis in range(mesh.devices.ndim) if axis not in last]
    rows = mesh.devices.transpose(*others, *last)
    count = math.prod(mesh.shape[name] for name in axes)
    return tuple(map(tuple, rows.reshape(-1, count).tolist()))


@functools.cache
def _connect(roles: tuple[str, ...], groups: Groups, timeout: float) -> PeerGroups:
    """Allocate and connect the memory of the GPUs of all groups. It is never freed."""
    extension: Any = _ffi.load("_nvfp4_cuda")
    ids = (",".join(str(device.id) for device in group) for group in groups)
    name = " ".join(["+".join(roles), *ids])
    size, mine = len(groups[0]), jax.process_index()
    own = {
        device: extension.allocate_peer_memory(device.local_hardware_id, size)
        for device in itertools.chain(*groups)
        if device.process_index == mine
    }
    handles = {}
    if any(device.process_index != mine for device in itertools.chain(*groups)):
        handles = _exchange(
            {
                device.id: extension.export_peer_memory(device.local_hardware_id, address)
                for device, address in own.items()
            }
        )

    def reach(device, peer):
        """Return the address of the memory of `peer` on `device`."""
        if peer not in own:
            return extension.import_peer_memory(device.local_hardware_id, handles[peer.id])
        if peer != device:
            extension.enable_peer_access(device.local_hardware_id, peer.local_hardware_id)
        return own[peer]

    for group in groups:
        for rank, device in enumerate(group):
            if device in own:
                memory = [reach(device, peer) for peer in group]
                extension.add_peer_group(name, device.local_hardware_id, rank, memory, timeout)
    return PeerGroups(name, size)


def _exchange(handles: Mapping[int, bytes]) -> dict[int, bytes]:
    """Return the handles of all processes by the ids of devices, from those of this process."""
    own = np.array([(key, *handle) for key, handle in handles.items()], np.int32)
    everyone = np.asarray(multihost_utils.process_allgather(own)).reshape(-1, own.shape[1])
    return {int(row[0]): bytes(row[1:].tolist()) for row in everyone}
