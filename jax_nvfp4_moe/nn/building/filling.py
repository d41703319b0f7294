"""Fill an abstract model: read each part, put it on its devices, and set it into the model."""

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from flax import nnx

from jax_nvfp4_moe.checkpoint.table import Source
from jax_nvfp4_moe.nn.building.builder import Part, Values, values_of_shard
from jax_nvfp4_moe.nn.building.settings import Settings
from jax_nvfp4_moe.numerics.tensor import MoEParams
from jax_nvfp4_moe.parallel.expert_mesh import TENSOR, ExpertMesh, replicate
from jax_nvfp4_moe.parallel.experts import shard_experts
from jax_nvfp4_moe.parallel.shard_spec import axis_spec
from jax_nvfp4_moe.parallel.sharded_variable import module_axes
from jax_nvfp4_moe.parallel.streaming import chunk_size, join_chunks


def fill(root: Any, prefix: str, parts: Sequence[Part], reader: Any, how: Settings):
    """Read parts and set them into a model or into one of its modules.

    Args:
      root: abstract model, or the module that contains the parts.
      prefix: path of `root` in the model; empty for the model itself.
      parts: parts of the model. Those below `prefix` are filled, in this order.
      reader: open reader of the checkpoint.
      how: settings, which say where the values go.

    Raises:
      CheckpointError: a scale is NaN or infinite.
      MemoryError: the memory of the device is too small. The message names the part and its size.
    """
    scope = f"{prefix}." if prefix else ""
    for part in parts:
        if part.path.startswith(scope):
            owner, name = _find(root, part.path.removeprefix(scope))
            abstract = getattr(owner, name)
            _set(owner, name, place(part, reader, how, abstract))


def place(part: Part, reader: Any, how: Settings, abstract: Any = None) -> Any:
    """Read one part and return it on its devices.

    Args:
      part: the part to read.
      reader: open reader of the checkpoint.
      how: settings, which say where the values go.
      abstract: the variable of the abstract model that the part fills. NVFP4 experts are converted
        to its layout, the layout of the kernel that their module has chosen. None keeps them
        canonical.

    Raises:
      CheckpointError: a scale is NaN or infinite.
      MemoryError: the memory of the device is too small. The message names the part and its size.
    """
    value = _place(part, reader, how, abstract)
    reader.raise_problems()
    return value


def _place(part, reader, how, abstract):
    """Read one part, wait for its devices, and turn a failed allocation into a `MemoryError`."""
    try:
        # Wait for each part. During its conversion a part is in memory twice, and reading the next
        # part at that time would raise the peak memory of a load.
        if part.experts is not None:
            layout = _find_layout(abstract)
            return jax.block_until_ready(_place_experts(part.experts, reader, how, layout))
        return jax.block_until_ready(_place_part(part, reader, how))
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        sources = list(part.sources.values())
        leaves = jax.tree.leaves([source.value for source in sources])
        size = sum(leaf.size * leaf.dtype.itemsize for leaf in leaves)
        name = sources[0].name
        raise MemoryError(
            f"out of memory on {how.target}: {size / 2**20:.1f} MiB for {name} could not be "
            "allocated. Load onto a device with more memory, or onto several devices with a mesh"
        ) from error


def _place_part(part: Part, reader, how: Settings) -> Any:
    """Return a part that does not hold routed experts, on its devices."""
    assert part.construct is not None
    values = {name: source.read(reader) for name, source in part.sources.items()}
    if part.shards > 1:
        assert how.expert_mesh is not None
        return _place_shards(part, values, how.expert_mesh)
    if how.expert_mesh is not None:
        return part.construct(replicate(values, how.expert_mesh))
    return part.construct(jax.device_put(jax.tree.map(lambda leaf: leaf[()], values)))


def _place_shards(part: Part, values: Values, expert_mesh: ExpertMesh) -> Any:
    """Return a sharded part. Each process reads and stores only the shards of its own devices."""
    sharding = expert_mesh.sharding(TENSOR)
    assert part.construct is not None
    owners: dict[int, list[Any]] = {}
    for device, index in sharding.addressable_devices_indices_map((part.shards,)).items():
        assert index is not None
        owners.setdefault(index[0].start or 0, []).append(device)
    shards, made = [], None
    for index, devices in owners.items():
        with jax.default_device(devices[0]):
            own = values_of_shard(values, part.specs, index, part.shards)
            made = part.construct(jax.block_until_ready(jax.device_put(own, devices[0])))
        shards.append(jax.tree.leaves(made))
    assert made is not None

    def join(axis, *leaves):
        shape = list(leaves[0].shape)
        if axis is not None:
            shape[axis] *= part.shards
        own = [
            jax.device_put(_on_host(leaf, device), device)
            for leaf, devices in zip(leaves, owners.values(), strict=True)
            for device in devices
        ]
        spec = expert_mesh.named_sharding(axis_spec(expert_mesh, axis))
        return jax.make_array_from_single_device_arrays(tuple(shape), spec, own)

    tree = jax.tree.structure(made)
    return tree.unflatten(map(join, module_axes(made), *shards))


def _on_host(leaf, device):
    """Return `leaf` as a view of host memory if `device` is a CPU.

    All CPU devices of a process can then share one buffer instead of each holding a copy.
    """
    return np.asarray(leaf) if device.platform == "cpu" else leaf


def _find_layout(abstract: nnx.Variable | None) -> str | None:
    """Return the layout of the NVFP4 experts in a variable; None if it holds other values."""
    params = None if abstract is None else abstract.get_value()
    return params.layout if isinstance(params, MoEParams) else None


def _place_experts(experts: Source, reader, how: Settings, layout: str | None) -> Any:
    """Return the experts of one layer on their devices, in `layout`; read a few at a time."""
    params = experts.read(reader)
    if how.expert_mesh is not None:
        return shard_experts(params, how.expert_mesh, layout=layout)
    if layout is None:
        return jax.device_put(jax.tree.map(lambda leaf: leaf[()], params))
    step = chunk_size(params, params.num_experts, how.target)

    def read(first):
        return jax.tree.map(lambda leaf: leaf[first : first + step], params)

    return join_chunks(read, params.num_experts, step, layout)


def _find(root, path):
    """Return the module that owns the part at `path` below `root`, and the part's name in it."""
    *parents, name = path.split(".")
    for parent in parents:
        root = root[int(parent)] if parent.isdigit() else getattr(root, parent)
    return root, name


def _set(owner, name, value):
    """Replace the submodule, the variable or the value of the variable called `name`."""
    old = getattr(owner, name)
    if isinstance(old, nnx.Variable) and not isinstance(value, nnx.Variable):
        old.set_value(value)
    else:
        setattr(owner, name, value)
