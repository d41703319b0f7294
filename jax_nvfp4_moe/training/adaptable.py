"""The linear layers of a model that adapters can change, and how adapters get beside them.

A module of this package may hold several layers of the file, and a mesh may shard it. An
`Adaptable` is one layer of the file, with its name in transformers. Its matrices have the sizes of
the whole layer, in the order of the file. `put` shards them like the weight that they change, and
`take` returns them as they were put.
"""

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.core import Tracer
from jax.sharding import NamedSharding, PartitionSpec

from jax_nvfp4_moe.nn.attention.indexer import Indexer
from jax_nvfp4_moe.nn.attention.latent_attention import HeadMatrices
from jax_nvfp4_moe.nn.building.keys import DRAFTER
from jax_nvfp4_moe.nn.building.projection_names import ExpertNames, Projection, ProjectionNames
from jax_nvfp4_moe.nn.experts.expert_lora import ExpertLoRA
from jax_nvfp4_moe.nn.experts.routed_experts import NVFP4Experts, RoutedExperts
from jax_nvfp4_moe.nn.linear.dense_linear import DenseLinear
from jax_nvfp4_moe.nn.linear.fp8_linear import FP8Linear
from jax_nvfp4_moe.nn.linear.lora import LoRA, LowRankPair
from jax_nvfp4_moe.nn.linear.merged_linear import MergedLinear
from jax_nvfp4_moe.nn.linear.nvfp4_linear import NVFP4Linear
from jax_nvfp4_moe.nn.linear.scaled_linear import ScaledLinear
from jax_nvfp4_moe.parallel.expert_mesh import EXPERT, TENSOR, put_parts
from jax_nvfp4_moe.parallel.shard_order import join_shards, reorder_for_shards
from jax_nvfp4_moe.parallel.shard_spec import ShardLayout, array_layouts
from jax_nvfp4_moe.parallel.sharded_variable import find_layout, mark, sharded_axes
from jax_nvfp4_moe.parallel.tensor_parallel import HeadParallel

# Groups of layers: those of attention and of other mixers of tokens; those by which attention
# chooses keys, through which no gradient flows; the output head; all others.
MIXERS, INDEXERS, HEAD, MLPS, EXPERTS = "mixers", "indexers", "head", "mlps", "experts"
_HEADS = ("head", "lm_head")


@dataclasses.dataclass(frozen=True)
class _Sharding:
    """How a mesh shards one matrix of an adapter.

    Attributes:
      layout: order of the entries, which is stored in the variable; None if no entry is moved.
      sharding: the part of each device; None leaves the matrix on the default device.
    """

    layout: ShardLayout | None = None
    sharding: NamedSharding | None = None

    def put(self, value: Any) -> nnx.LoRAParam:
        """Return a variable with the entries of all shards, one shard after the other."""
        value = reorder_for_shards(jnp.asarray(value), array_layouts(value, self.layout))
        if self.sharding is not None and not isinstance(value, Tracer):
            value = put_parts(np.asarray(value), self.sharding)
        variable = mark(nnx.LoRAParam(value), self.layout)
        if self.sharding is not None and any(self.sharding.spec):
            mesh: Any = self.sharding.mesh
            variable.set_metadata(out_sharding=tuple(self.sharding.spec), mesh=mesh)
        return variable

    def take(self, variable: nnx.LoRAParam) -> np.ndarray:
        """Return the whole matrix in the order of the file; on a mesh, all processes must call."""
        value = variable.get_value()
        if self.sharding is not None:
            whole = NamedSharding(self.sharding.mesh, PartitionSpec())
            value = jax.jit(lambda value: value, out_shardings=whole)(value)
        return np.asarray(join_shards(jnp.asarray(value), array_layouts(value, self.layout)))


@dataclasses.dataclass(frozen=True)
class Adaptable:
    """One layer of the file, or one matrix of the routed experts of a layer.

    Attributes:
      name: name in transformers, such as "model.layers.0.self_attn.q_proj". For experts the name of
        the parameter, such as "model.layers.0.mlp.experts.gate_up_proj".
      stored: name of the layer in the file of the checkpoint.
      group: `MIXERS`, `INDEXERS`, `HEAD`, `MLPS` or `EXPERTS`.
      owner: the module that holds the layer.
      part: name of the layer in the adapter of `owner`.
      shape: ``(outputs, inputs)`` of the whole layer, or ``(experts, outputs, inputs)``. If modules
        are stacked, as `nnx.vmap` makes them, their number comes first.
      widths: name of each layer that `owner` holds -> its number of outputs in one shard.
      a, b: how a mesh shards the two matrices.
      interleaved: whether gate and up rows of experts alternate in transformers, but not here.
      swapped: whether PEFT takes the inputs of these experts for outputs.
    """

    name: str
    stored: str
    group: str
    owner: Any
    part: str
    shape: tuple[int, ...]
    widths: Mapping[str, int]
    a: _Sharding = _Sharding()
    b: _Sharding = _Sharding()
    interleaved: bool = False
    swapped: bool = False

    @property
    def pair(self) -> LowRankPair | None:
        """The adapter of this layer, or None."""
        return self._pairs().get(self.part)

    @property
    def on_mesh(self) -> bool:
        """Whether the weight of this layer is on a mesh."""
        return self.a.sharding is not None

    def check(self) -> None:
        """Check that an adapter can be put beside this layer.

        Raises:
          ValueError: `place_model` has replicated or moved experts.
        """
        if self.group == EXPERTS:
            self.owner.check_unplaced()

    def put(self, a: Any, b: Any, alpha: float, *, merge_aware: bool = False) -> None:
        """Put an adapter beside this layer, in place of an earlier one.

        Args:
          a: ``[r, inputs]``, or ``[experts, r, inputs]``.
          b: ``[outputs, r]``, or ``[experts, outputs, r]``.
          alpha: the products are multiplied by ``alpha / r``.
          merge_aware: whether calls multiply by the weight that merging would make.
        """
        made = LowRankPair(self.a.put(a), self.b.put(b), alpha, merge_aware)
        self._set(self._pairs() | {self.part: made})

    def take(self) -> tuple[np.ndarray, np.ndarray]:
        """Return the whole matrices of the adapter, as `put` takes them."""
        assert self.pair is not None
        return self.a.take(self.pair.a), self.b.take(self.pair.b)

    def remove(self) -> None:
        """Remove the adapter of this layer."""
        self._set({name: pair for name, pair in self._pairs().items() if name != self.part})

    def _pairs(self) -> dict[str, LowRankPair]:
        """Return the adapters of all layers that the owner holds."""
        return {} if self.owner.adapter is None else self.owner.adapter.pairs()

    def _set(self, pairs):
        """Replace the adapters of all layers that the owner holds."""
        if self.group == EXPERTS:
            made = ExpertLoRA(pairs.get("gate_up"), pairs.get("down")) if pairs else None
            self.owner.adapt(made)
        else:
            self.owner.adapter = LoRA(self.widths, pairs) if pairs else None


_LINEARS = DenseLinear | FP8Linear | NVFP4Linear | ScaledLinear | HeadMatrices


def find_adaptable(model: nnx.Module) -> list[Adaptable]:
    """Return all layers of a model that can have an adapter, without those of its drafter.

    Layers of a model that was not loaded have the paths of their modules for names.
    """
    names = getattr(model, "projection_names", None) or ProjectionNames()
    modules = {path: module for path, module in nnx.iter_modules(model)}
    found = []
    # Layer indices are compared as numbers. As text, layer 10 would come before layer 2.
    for path in sorted(modules, key=lambda path: [(isinstance(p, str), p) for p in path]):
        above = [modules[path[:end]] for end in range(len(path)) if path[:end] in modules]
        if DRAFTER in path or any(isinstance(one, ScaledLinear) for one in above):
            continue
        module, text = modules[path], ".".join(map(str, path))
        if isinstance(module, _LINEARS):
            parts = _parts(module, path, above, names)
            found += _linear_layers(module, parts, _group(path, above))
        elif isinstance(module, RoutedExperts):
            default = ExpertNames(text or "experts", text or "experts")
            found += _expert_matrices(module, names.experts.get(f"{text}.params", default))
    return found


def _group(path, above) -> str:
    """Return the group of the linear layer at `path` below the modules `above`."""
    # `BlockSparseAttention.index` is the only indexer that is not a module of its own.
    if any(isinstance(one, Indexer) for one in above) or "index" in path:
        return INDEXERS
    if any(isinstance(one, HeadParallel) for one in above):
        return MIXERS
    return HEAD if path and path[-1] in _HEADS else MLPS


def _parts(module, path, above, names) -> tuple[Projection, ...]:
    """Return the layers of the file that the linear layer at `path` holds."""
    text, last = ".".join(map(str, path)), str(path[-1]) if path else "linear"
    if text in names.linears:
        return names.linears[text]
    parent = ".".join(map(str, path[:-1]))
    if parent in names.linears and above and isinstance(above[-1], MergedLinear):
        return _parts_of_run(names.linears[parent], above[-1].names, last)
    weight = _weight(module)
    n, k = weight.get_value().shape[-2:]
    if isinstance(module, HeadMatrices):
        heads, _, k = weight.get_value().shape
        n = heads * (module.keys.shape[1] + module.values.shape[1])
    return (Projection(last, text or last, text or last, n, k),)


def _parts_of_run(layers, runs, wanted) -> tuple[Projection, ...]:
    """Return the layers of one module of a `MergedLinear`, whose name joins the names of them."""
    rest = iter(layers)
    for run in runs:
        own = [next(rest)]
        while "_".join(one.part for one in own) != run:
            own.append(next(rest))
        if run == wanted:
            return tuple(own)
    raise AssertionError(f"{wanted} is none of {runs}")


def _weight(module) -> nnx.Variable:
    """Return the variable that says how a linear layer is sharded."""
    if isinstance(module, ScaledLinear):
        return module.linear.weight
    return module.keys if isinstance(module, HeadMatrices) else module.weight


def _linear_layers(module, parts, group) -> Iterator[Adaptable]:
    """Yield the layers of the file that a linear layer holds."""
    weight = _weight(module)
    layout, (mesh, axis) = find_layout(weight), _find_mesh(weight)
    lead = () if isinstance(module, HeadMatrices) else weight.get_value().shape[:-2]
    columns, layouts = layout, [None] * len(parts)
    if layout is not None and layout.axis == "rows":
        columns, layouts = None, _divide_rows(layout, parts)

    def shard(layout, spec):
        own = PartitionSpec(*(axis if one else None for one in spec)) if layout else PartitionSpec()
        return _Sharding(layout, None if mesh is None else NamedSharding(mesh, own))

    widths = {
        part.part: part.outputs if rows is None else sum(width for width, _ in rows.segments)
        for part, rows in zip(parts, layouts, strict=True)
    }
    for part, rows in zip(parts, layouts, strict=True):
        yield Adaptable(
            part.name,
            part.stored,
            group,
            module,
            part.part,
            (*lead, part.outputs, part.inputs),
            widths,
            shard(columns, (0, 1)),
            shard(rows, (1, 0)),
        )


def _divide_rows(layout: ShardLayout, parts) -> list[ShardLayout]:
    """Return the layout of each layer whose rows a weight holds.

    A layer has one or more of the segments. The rows of `HeadMatrices` are heads, and those of the
    layer are the channels of all heads.
    """
    total = sum(width * count for width, count in layout.segments)
    unit = sum(part.outputs for part in parts) // total
    segments, layouts = iter(layout.segments), []
    for part in parts:
        own, rows = [], 0
        while rows < part.outputs:
            width, count = next(segments)
            own.append((width * unit, count))
            rows += width * unit * count
        layouts.append(ShardLayout("rows", tuple(own), layout.shards))
    return layouts


def _find_mesh(variable) -> tuple[Any, str | None]:
    """Return the mesh of a variable, and the name of the axis that shards it; None without one."""
    leaves = jax.tree.leaves(variable.get_value())
    concrete = [leaf for leaf in leaves if not isinstance(leaf, Tracer)]
    found = (getattr(leaf, "sharding", None) for leaf in concrete)
    shardings = [one for one in found if isinstance(one, NamedSharding)]
    if len(shardings) < len(leaves):
        return None, None
    sharded = zip(shardings, sharded_axes(variable), strict=True)
    names = (one.spec[axis] for one, axis in sharded if axis is not None)
    return shardings[0].mesh, next(names, None)


def _expert_matrices(module: RoutedExperts, names: ExpertNames) -> Iterator[Adaptable]:
    """Yield the two matrices of the routed experts of one layer."""
    e, h, i, gated = _expert_sizes(module)
    lead = module.params.get_value().down.shape[:-3]
    own, mesh = find_layout(module.params), module.expert_mesh
    rows = None if own is None else dataclasses.replace(own, leading=1)
    columns = None
    if own is not None:
        columns = ShardLayout("columns", ((i // own.shards, own.shards),), own.shards, 1)

    def shard(layout, *roles):
        return _Sharding(layout, None if mesh is None else mesh.sharding(EXPERT, *roles))

    first = "gate_up_proj" if gated else "up_proj"
    alternates = names.interleaved and not module.options.activation.row.interleaved
    for part, name, shape, a, b in (
        ("gate_up", first, (e, (1 + gated) * i, h), shard(None), shard(rows, TENSOR)),
        ("down", "down_proj", (e, h, i), shard(columns, None, TENSOR), shard(None)),
    ):
        yield Adaptable(
            f"{names.name}.{name}",
            f"{names.stored}.{name}",
            EXPERTS,
            module,
            part,
            (*lead, *shape),
            {},
            a,
            b,
            interleaved=alternates and part == "gate_up",
            swapped=names.swapped,
        )


def _expert_sizes(module: RoutedExperts) -> tuple[int, int, int, bool]:
    """Return the numbers of experts, hidden channels and inner channels, and whether gates exist.

    Arrays in the layout of a kernel may be padded, but the plan has the sizes of one shard.
    """
    params, mesh = module.params.get_value(), module.expert_mesh
    if not isinstance(module, NVFP4Experts):
        return params.num_experts, params.hidden, params.intermediate, params.gated
    problem, shards = module.plan.problem, (1, 1) if mesh is None else (mesh.expert, mesh.tensor)
    sizes = problem.num_experts, problem.hidden, problem.intermediate
    assert None not in sizes
    return sizes[0] * shards[0], sizes[1], sizes[2] * shards[1], module.options.activation.row.gated
