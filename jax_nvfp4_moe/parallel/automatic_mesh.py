"""`mesh="auto"`: choose the devices of a model by the memory that its weights take.

One device is used if it has room for the weights. Otherwise the fewest devices that have room are
used, along `expert` as far as possible: at every batch size that was measured, a model then decodes
faster than along `tensor`. Each process of a run must have devices of the mesh, so a run of several
processes always uses all devices.
"""

import logging
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax.sharding import AxisType, Mesh, NamedSharding

from jax_nvfp4_moe.parallel.expert_mesh import EXPERT, TENSOR, divisors, find_expert_mesh
from jax_nvfp4_moe.parallel.whole_steps import model_specs

AUTO = "auto"
# The largest share of a device's memory that weights may take. The rest is for caches, programs and
# temporary arrays.
ROOM = 0.8

_LOG = logging.getLogger("jax_nvfp4_moe")


def memory_limit(device: Any) -> int | None:
    """Return how many bytes JAX may take on a device; None if the device does not say."""
    return (device.memory_stats() or {}).get("bytes_limit")


def choose_mesh(
    find: Callable[[Mesh | None], nnx.Module], devices: Sequence[Any], *, fixed: bool
) -> Mesh | None:
    """Return the mesh of the fewest devices that have room for the weights of a model.

    If no mesh has room, the mesh with the smallest part on each device is returned, and a warning
    is logged: the limit leaves memory for other things, so that the model may load nevertheless.

    Args:
      find: returns the model on a mesh, or on one device, with a `jax.ShapeDtypeStruct` in place of
        each array. It raises a ValueError if the mesh does not divide the model.
      devices: the devices that may be used.
      fixed: whether all devices must be used.

    Returns:
      A mesh with the axes `expert` and `tensor`. None stands for one device, which is the result if
      the devices do not say how much memory they have, such as CPUs.

    Raises:
      ValueError: if no mesh of the devices divides the model.
    """
    count = len(devices)
    limits = [memory_limit(device) for device in devices if device in jax.local_devices()]
    limit = min((limit for limit in limits if limit is not None), default=None)
    if not fixed and (count == 1 or limit is None):
        return None
    allowed = math.inf if limit is None else ROOM * limit
    whole = bytes_of_one_device(find(None), None)
    if not fixed and whole <= allowed:
        return None
    # Meshes on which not even equal parts of all weights have room are not tried.
    meshes = [mesh for mesh in _meshes(devices, fixed) if whole <= allowed * mesh.size]
    found: list[tuple[int, Mesh]] = []
    for mesh in meshes or _meshes(devices, fixed):
        try:
            size = bytes_of_one_device(find(mesh), mesh)
        except ValueError:
            continue
        if size <= allowed:
            _LOG.info("mesh: %s, with %.1f GB of weights on each device", _name(mesh), size / 1e9)
            return mesh
        found.append((size, mesh))
    if not found:
        raise ValueError(
            f"mesh: expected sizes of '{EXPERT}' and '{TENSOR}' that divide the model; those of "
            f"{count} devices do not. Pass a mesh of fewer devices"
        )
    size, mesh = min(found, key=lambda one: one[0])
    _LOG.warning(
        "the weights take %.1f GB, and on each device of the mesh %s they take %.1f GB. That is "
        "more than %.0f %% of its memory (%.1f GB), so that little is left for caches",
        *(whole / 1e9, _name(mesh), size / 1e9, 100 * ROOM, allowed / 1e9),
    )
    return mesh


def _meshes(devices, fixed) -> Iterator[Mesh]:
    """Yield the meshes to try: those of few devices first, then those with a long `expert`."""
    most = len(devices)
    powers = {2**power for power in range(1, most.bit_length())}
    for count in [most] if fixed else sorted({*powers, most}):
        for tensor in divisors(count):
            sizes = np.array(devices[:count]).reshape(count // tensor, tensor)
            yield Mesh(sizes, (EXPERT, TENSOR), axis_types=(AxisType.Auto,) * 2)


def bytes_of_one_device(model: nnx.Module, mesh: Mesh | None) -> int:
    """Return the bytes of the arrays of an abstract model that each device of a mesh holds."""
    leaves = jax.tree.leaves(model)
    shapes = [leaf.shape for leaf in leaves]
    if mesh is not None:
        specs = model_specs(model, find_expert_mesh(mesh))
        shardings = [NamedSharding(mesh, spec) for spec in specs]
        shapes = [one.shard_shape(shape) for one, shape in zip(shardings, shapes, strict=True)]
    sizes = [leaf.dtype.itemsize for leaf in leaves]
    return sum(math.prod(shape) * size for shape, size in zip(shapes, sizes, strict=True))


def _name(mesh):
    """Return the sizes of the axes of a mesh as on the command line."""
    return ",".join(f"{name}={size}" for name, size in mesh.shape.items() if size > 1)
