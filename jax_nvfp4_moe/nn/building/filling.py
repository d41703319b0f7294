"""Fill an abstract model: read each part, put it on its devices, and set it into the model."""

import collections
import contextlib
import functools
import itertools
from collections.abc import Callable, Generator, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from flax import nnx

from jax_nvfp4_moe.checkpoint.reading.read_ahead import read_ahead
from jax_nvfp4_moe.nn.building.builder import Part, Values, make_zeros, values_of_shard
from jax_nvfp4_moe.nn.building.settings import Settings
from jax_nvfp4_moe.numerics.tensor import MoEParams
from jax_nvfp4_moe.ops.compiling_ahead import compiling, lower_calls
from jax_nvfp4_moe.parallel.expert_mesh import TENSOR, ExpertMesh, replicate
from jax_nvfp4_moe.parallel.experts import shard_experts
from jax_nvfp4_moe.parallel.shard_spec import axis_spec
from jax_nvfp4_moe.parallel.sharded_variable import module_axes
from jax_nvfp4_moe.parallel.streaming import chunk_size, join_chunks, lower_join


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
    own = [part for part in parts if part.path.startswith(scope)]
    places = [_find(root, part.path.removeprefix(scope)) for part in own]
    abstract = [getattr(owner, name) for owner, name in places]
    with contextlib.closing(_place_all(own, reader, how, abstract)) as values:
        for (owner, name), value in zip(places, values, strict=True):
            _set(owner, name, value)


def place(part: Part, reader: Any, how: Settings) -> Any:
    """Read one part and return it on its devices. NVFP4 experts stay canonical.

    Args:
      part: the part to read.
      reader: open reader of the checkpoint.
      how: settings, which say where the values go.

    Raises:
      CheckpointError: a scale is NaN or infinite.
      MemoryError: the memory of the device is too small. The message names the part and its size.
    """
    with contextlib.closing(_place_all([part], reader, how, [None])) as values:
        return next(values)


class _Plan(NamedTuple):
    """How one part gets onto one device.

    Attributes:
      part: the part.
      reader: the reader of this part alone.
      reads: functions that read its arrays, at least one. They may be called before their turn.
      build: takes the results of `reads` from an iterator, and returns the value.
    """

    part: Part
    reader: Any
    reads: Sequence[Callable[[], Any]]
    build: Callable[[Iterator[Any]], Any]


def _place_all(parts, reader, how, abstract) -> Generator[Any, None, None]:
    """Yield the value of each part on its devices.

    Args:
      parts: the parts to read, in this order.
      reader: open reader of the checkpoint.
      how: settings, which say where the values go.
      abstract: for each part, the variable of the abstract model that it fills. NVFP4 experts get
        its layout, the layout of the kernel that their module has chosen. None keeps them
        canonical.
    """
    layouts = [
        _find_layout(variable) if part.experts is not None else None
        for part, variable in zip(parts, abstract, strict=True)
    ]
    if how.expert_mesh is not None:
        for part, layout in zip(parts, layouts, strict=True):
            with _naming_what_is_too_large(part, how):
                value = jax.block_until_ready(_place_on_mesh(part, reader, how, layout))
            reader.raise_problems()
            yield value
        return
    plans: collections.deque[_Plan] = collections.deque()

    def reads():
        for part, layout in zip(parts, layouts, strict=True):
            with _naming_what_is_too_large(part, how):
                plans.append(_plan(part, reader.fork(), how, layout))
            yield from plans[-1].reads

    programs = lower_conversions(parts, reader, how, layouts)
    with compiling(programs) as wait, contextlib.closing(read_ahead(reads())) as arrays:
        for first in arrays:
            plan = plans.popleft()
            wait()
            with _naming_what_is_too_large(plan.part, how):
                # Wait for each part. During its conversion a part is in memory twice, and reading
                # more than the next arrays at that time would raise the peak memory of a load.
                value = plan.build(itertools.chain([first], arrays))
                del first
                jax.block_until_ready(value)
            plan.reader.raise_problems()
            yield value
            del value


@contextlib.contextmanager
def _naming_what_is_too_large(part, how):
    """Turn a failed allocation into a `MemoryError` that names the part."""
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        sources = [part.experts] if part.experts is not None else list(part.sources.values())
        leaves = jax.tree.leaves([source.value for source in sources])
        size = sum(leaf.size * leaf.dtype.itemsize for leaf in leaves)
        name = sources[0].name
        raise MemoryError(
            f"out of memory on {how.target}: {size / 2**20:.1f} MiB for {name} could not be "
            "allocated. Load onto a device with more memory, or onto several devices with a mesh"
        ) from error


def _plan(part: Part, reader, how: Settings, layout: str | None) -> _Plan:
    """Return how a part gets onto one device. Experts that need a layout are read in chunks."""
    if part.experts is None:
        values = {name: source.read(reader) for name, source in part.sources.items()}
        construct = part.construct
        assert construct is not None
        read = functools.partial(_read, values, ())
        return _Plan(part, reader, [read], lambda arrays: construct(jax.device_put(next(arrays))))
    params = part.experts.read(reader)
    if layout is None:
        read = functools.partial(_read, params, ())
        return _Plan(part, reader, [read], lambda arrays: jax.device_put(next(arrays)))
    count = params.num_experts
    step = chunk_size(params, count, how.target)
    chunks = [slice(first, first + step) for first in range(0, count, step)]
    reads = [functools.partial(_read, params, chunk) for chunk in chunks]
    return _Plan(part, reader, reads, lambda arrays: join_chunks(arrays, count, step, layout))


def lower_conversions(
    parts: Sequence[Part], reader: Any, how: Settings, layouts: Sequence[str | None]
) -> list[jax.stages.Lowered]:
    """Return the programs that convert parts on one device.

    Args:
      parts: the parts.
      reader: open reader of the checkpoint. Nothing is read.
      how: settings.
      layouts: for each part, the layout of its NVFP4 experts, or None.
    """
    modules, experts = {}, {}
    for part, layout in zip(parts, layouts, strict=True):
        leaves, tree = jax.tree.flatten({name: one.value for name, one in part.sources.items()})
        shapes = tree, layout, *((leaf.shape, leaf.dtype) for leaf in leaves)
        (modules if part.experts is None else experts).setdefault(shapes, (part, layout))
    traced = [functools.partial(_construct_zeros, part) for part, _ in modules.values()]
    programs = lower_calls(traced)
    for part, layout in experts.values():
        if layout is not None:
            params = part.experts.read(reader)
            step = chunk_size(params, params.num_experts, how.target)
            chunk = jax.tree.map(functools.partial(_shape_of_chunk, step), params)
            programs += lower_join(chunk, params.num_experts, layout)
    return programs


def _shape_of_chunk(step, leaf):
    """Return the shape of a chunk of `step` experts of an array."""
    return jax.ShapeDtypeStruct((step, *leaf.shape[1:]), leaf.dtype)


def _construct_zeros(part):
    """Construct a part from zeros, in a trace."""
    values = {name: source.value for name, source in part.sources.items()}
    part.construct(make_zeros(values))


def _read(values, index):
    """Read the part of each lazy array that `index` selects."""
    return jax.tree.map(lambda leaf: leaf[index], values)


def _place_on_mesh(part: Part, reader, how: Settings, layout: str | None) -> Any:
    """Return a part on the devices of a mesh. Each process reads what its own devices need."""
    assert how.expert_mesh is not None
    if part.experts is not None:
        return shard_experts(part.experts.read(reader), how.expert_mesh, layout=layout)
    values = {name: source.read(reader) for name, source in part.sources.items()}
    if part.shards > 1:
        return _place_shards(part, values, how.expert_mesh)
    assert part.construct is not None
    return part.construct(replicate(values, how.expert_mesh))


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
