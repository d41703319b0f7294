"""`connect_peers`: let the GPUs of one host add up small arrays through each other's memory.

XLA adds up arrays by NCCL. For a few rows, starting NCCL takes longer than the transfer, and it
ends a chain of kernels. Connected GPUs write small arrays to each other's memory instead
(``ffi/cuda/collectives``). The memory is allocated here, before any program is traced.

GPUs of one process find each other's memory by its address. Those of several processes exchange
handles (CUDA IPC), which works on one host only.
"""

import contextlib
import dataclasses
import hashlib
import itertools
import math
import pathlib
import platform
from collections.abc import Iterable, Iterator, Mapping, Sequence
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

# Name of connected groups -> the groups, and the timeout of their sums. Their memory is kept.
_connected: dict[str, tuple[PeerGroups, float]] = {}
# A file of Linux that differs between hosts, and after each start of a host.
_BOOT = pathlib.Path("/proc/sys/kernel/random/boot_id")


def connect_peers(
    mesh: Any, axis_names: Mapping[str, str] | None = None, *, timeout: float = 600.0
) -> ExpertMesh:
    """Connect the memory of the GPUs of a mesh, and return the mesh for `load_model`.

    Models on the returned mesh add up small arrays through the connected memory, and larger ones as
    before. Call the function before models are made. With several processes, each process has GPUs
    of the mesh, and all of them call the function. Later calls for the same GPUs return the same
    connection.

    If one process has several GPUs, start it with ``CUDA_MODULE_LOADING=EAGER``. Otherwise CUDA
    loads a kernel when it is first launched, and may then wait for a GPU that waits in a sum for
    another GPU of the process. In programs of your own, call `start_together`.

    The kernel was executed on two H200s, in one process and in two.

    Args:
      mesh: as for `load_model`: NVIDIA GPUs of one host. At most 8 of them share a sum.
      axis_names: as for `load_model`. None (default) if the axes are called what they do.
      timeout: seconds that a GPU waits for another one in a sum, 600 by default. Processes may
        compile the same program at different speeds. After that time, the program fails, and the
        process cannot use the GPU any more.

    Returns:
      An `ExpertMesh`, which the argument `mesh` of all functions of this package accepts.

    Raises:
      ValueError: if `mesh` has other devices, or too many, if its GPUs belong to several hosts or
        if a process has none of them. Also if `timeout` is not positive and finite, or if the GPUs
        are connected with another timeout.
      RuntimeError: if the CUDA kernels are missing, or if the GPUs cannot access each other's
        memory; the message says which.
    """
    expert_mesh = find_expert_mesh(mesh, axis_names)
    if not 0 < timeout < math.inf:
        raise ValueError(f"timeout: expected a positive, finite number of seconds, got {timeout}")
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


@contextlib.contextmanager
def explain_failed_sums() -> Iterator[None]:
    """Add the reason why a sum of connected GPUs has failed to an error of JAX."""
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        extension: Any = _ffi.load("_nvfp4_cuda") if _connected else None
        if extension is not None and (reason := extension.peer_failure()):
            error.add_note(f"A sum of connected GPUs has failed: {reason}")
        raise


def _connect(roles: tuple[str, ...], groups: Groups, timeout: float) -> PeerGroups:
    """Allocate and connect the memory of the GPUs of all groups, once. It is never freed."""
    ids = (",".join(str(device.id) for device in group) for group in groups)
    name = " ".join(["+".join(roles), *ids])
    if name in _connected:
        return _find_connected(name, timeout)
    extension: Any = _ffi.load("_nvfp4_cuda")
    devices, mine, size = list(itertools.chain(*groups)), jax.process_index(), len(groups[0])
    owners = {device.process_index for device in devices}
    if owners != {mine}:
        _check_processes(owners)
    own = {
        device: extension.allocate_peer_memory(device.local_hardware_id, size)
        for device in devices
        if device.process_index == mine
    }
    handles = {}
    if owners != {mine}:
        exported = {
            device.id: extension.export_peer_memory(device.local_hardware_id, address)
            for device, address in own.items()
        }
        handles = _exchange(exported, [device.id for device in devices])
    for group in groups:
        for rank, device in enumerate(group):
            if device in own:
                memory = [_reach(extension, device, peer, own, handles) for peer in group]
                extension.add_peer_group(name, device.local_hardware_id, rank, memory, timeout)
    _connected[name] = PeerGroups(name, size), timeout
    return _connected[name][0]


def _reach(extension, device, peer, own, handles) -> int:
    """Return the address of the memory of `peer` on `device`.

    Args:
      extension: the CUDA extension.
      device: a GPU of this process.
      peer: a GPU of any process.
      own: the addresses of the memory of the GPUs of this process.
      handles: those of the memory of all GPUs, by their ids.
    """
    if peer not in own:
        return extension.import_peer_memory(device.local_hardware_id, handles[peer.id])
    if peer != device:
        extension.enable_peer_access(device.local_hardware_id, peer.local_hardware_id)
    return own[peer]


def _find_connected(name: str, timeout: float) -> PeerGroups:
    """Return groups that are connected, and check that their timeout is that of the caller."""
    groups, before = _connected[name]
    if timeout != before:
        raise ValueError(
            f"timeout: expected {before}, with which these GPUs are connected, got {timeout}. Call "
            "connect_peers with the same timeout each time"
        )
    return groups


def _check_processes(owners: Iterable[int]) -> None:
    """Check that all processes have GPUs of the mesh, and that they run on one host.

    All processes raise the same error.
    """
    if missing := sorted(set(range(jax.process_count())) - set(owners)):
        raise ValueError(
            f"mesh: expected GPUs of all {jax.process_count()} processes, or of one process alone; "
            f"process {missing[0]} has none of them"
        )
    hosts = np.asarray(multihost_utils.process_allgather(_host_number()))
    others = [index for index, one in enumerate(hosts) if not np.array_equal(one, hosts[0])]
    if others:
        raise ValueError(
            f"mesh: expected GPUs of one host, because connected GPUs write to each other's "
            f"memory; processes 0 and {others[0]} run on different hosts"
        )


def _host_number() -> np.ndarray:
    """Return bytes that differ between hosts."""
    name = _BOOT.read_text(encoding="ascii") if _BOOT.exists() else platform.node()
    return np.frombuffer(hashlib.sha256(name.encode()).digest(), np.uint8)


def _exchange(own: Mapping[int, bytes], ids: Sequence[int]) -> dict[int, bytes]:
    """Return the handles of the devices `ids`, from those of the devices of each process.

    The number of devices may differ between processes: each sends a row for all `ids`, which is
    zeros for those of other processes.
    """
    size = len(next(iter(own.values())))
    rows = [[1, *own[key]] if key in own else [0] * (1 + size) for key in ids]
    everyone = np.asarray(multihost_utils.process_allgather(np.array(rows, np.uint8)))
    return {
        ids[index]: bytes(everyone[process, index, 1:].tolist())
        for process, index in zip(*np.nonzero(everyone[..., 0]), strict=True)
    }
