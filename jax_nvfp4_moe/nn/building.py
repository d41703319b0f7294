"""Build a model without its weights, noting what fills each part.

(1) A model's constructor asks a `Builder` for its parts, by their paths in the model. Under
`nnx.eval_shape` that gives the abstract model; what each part needs is noted as a `Part`.
(2) Each part's `Source`s come from a table of the checkpoint's headers, by the model's key table,
so that everything that is missing or unexpected is known before any byte is read.
(3) `filling.fill` reads one part after another, puts it on its devices, and sets it into the model.
"""

import copy
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from jax_nvfp4_moe.checkpoint.table import Source
from jax_nvfp4_moe.checkpoint.values import CacheScales, LinearWeights
from jax_nvfp4_moe.nn.dense import DenseLinear, FP8Linear
from jax_nvfp4_moe.nn.keys import KeyTable, find_key
from jax_nvfp4_moe.nn.linear import NVFP4Linear
from jax_nvfp4_moe.nn.merged_linear import MergedLinear
from jax_nvfp4_moe.nn.norm import RMSNorm
from jax_nvfp4_moe.nn.settings import Settings
from jax_nvfp4_moe.numerics.tensor import DenseExperts, MoEParams
from jax_nvfp4_moe.parallel.experts import check_experts
from jax_nvfp4_moe.parallel.shard_spec import (
    ShardSpec,
    join_layouts,
    mark,
    module_axes,
    take_scales,
    take_shard,
)
from jax_nvfp4_moe.scheme import CheckpointScheme, FP8ActivationScaling

Values = Mapping[str, Any]  # name of a source -> its value


@dataclasses.dataclass(frozen=True)
class Part:
    """One part of a model, and what fills it.

    Attributes:
      path: of the part, such as "layers.3.attention.out": a module, or a variable.
      sources: name -> what is read for it.
      construct: values of the sources -> the module, the variable, or the variable's value.
      specs: name of a source -> how it is divided along `tensor`, or None.
      shards: into how many shards the part is divided; 1 where every device holds all of it.
    """

    path: str
    sources: Mapping[str, Source]
    construct: Callable[[Values], Any]
    specs: Mapping[str, Any]
    shards: int

    @property
    def all_sources(self) -> tuple[Source, ...]:
        """What is read, without names."""
        return tuple(self.sources.values())


class ExpertPart(NamedTuple):
    """The experts of one layer, which are read a few at a time.

    Attributes:
      path: of the variable that holds them.
      source: what is read.
    """

    path: str
    source: Source

    @property
    def all_sources(self) -> tuple[Source, ...]:
        """What is read."""
        return (self.source,)


class ExpertWeights(NamedTuple):
    """The experts of one layer, whole, and the scheme that the file declares for them."""

    params: MoEParams | DenseExperts
    checkpoint_scheme: CheckpointScheme


class Builder:
    """Makes the parts of one model, abstract, and notes what fills them.

    Attributes:
      settings: how modules are made.
      parts: what has been made, in that order.
      shards: into how many shards the next parts are divided.
    """

    def __init__(self, table: Any, keys: KeyTable, settings: Settings):
        """Make a builder.

        Args:
          table: a `checkpoint.table.WeightTable`, or what answers as it does.
          keys: where the model's parts stand in the file.
          settings: how modules are made.
        """
        self.settings, self._table, self._keys = settings, table, keys
        self.parts: list[Part | ExpertPart] = []
        self.shards, self._specs = 1, {}

    def divided(self, specs: Mapping[str, ShardSpec]) -> "Builder":
        """Return a builder of the parts of a module that is divided along `tensor`.

        The sizes that it is asked for are those of one shard.

        Args:
          specs: last name of a path, or last two -> how that part is divided. All others are
            replicated.
        """
        other = copy.copy(self)
        other.shards, other._specs = self.settings.shards, dict(specs)
        return other

    def key(self, path: str) -> str:
        """Return the name in the file of the part at `path`."""
        return find_key(self._keys, path, self._table.has_under)

    def has(self, path: str) -> bool:
        """Whether the file has tensors of the part at `path`."""
        return self._table.has_under(self.key(path))

    def checkpoint_scheme(self, path: str) -> CheckpointScheme:
        """Return the scheme that the file declares for the part at `path`, None for dense."""
        return self._table.checkpoint_scheme(self.key(path))

    def ignore(self, path: str, reason: str) -> None:
        """Say that the file's tensors of the part at `path` are knowingly left out, and why."""
        self._table.ignore(f"{self.key(path)}.", reason)

    def array(self, path: str, shape: Sequence[int], *, dtype: Any = None) -> jax.Array:
        """Make the value of a variable that every device holds whole."""
        source = self._table.array(self.key(path), tuple(shape), dtype=dtype)
        return self._note(path, {"": source}, lambda values: values[""])

    def variable(
        self,
        path: str,
        shape: Sequence[int],
        *,
        dtype: Any = None,
        kind: Callable[[Any], nnx.Variable] = nnx.Param,
    ) -> Any:
        """Make a variable of class `kind` of the dense array at `path`; `shape` is one shard's."""
        spec = self._spec(path)
        source = self._table.array(self.key(path), _whole(shape, spec), dtype=dtype)

        def construct(values):
            made = kind(values[""])
            mark(made, spec and spec.layout(shape[0], self.shards))
            return made

        return self._note(path, {"": source}, construct, {"": spec})

    def norm(self, path: str, width: int, eps: float, *, centered: bool = False) -> RMSNorm:
        """Make a norm of `width` channels.

        Args:
          path: of the norm.
          width: channels of one shard.
          eps: added to the mean square.
          centered: whether the file has ``weight - 1``, which is kept in float32.
        """
        spec, dtype = self._spec(path), jnp.float32 if centered else None
        name = f"{self.key(path)}.weight"
        source = self._table.array(name, _whole((width,), spec), dtype=dtype)

        def construct(values):
            made = RMSNorm(1 + values[""] if centered else values[""], eps)
            mark(made.weight, spec and spec.layout(width, self.shards))
            return made

        return self._note(path, {"": source}, construct, {"": spec})

    def linear(self, path: str, n: int, k: int, bias: bool | None = False) -> Any:
        """Make the linear at `path` ``[n, k]``, quantized or dense as the file has it.

        Args:
          path: of the linear.
          n, k: outputs and inputs of one shard.
          bias: whether it has one; None: if the file does.
        """
        return self.converted_linear(path, n, k, lambda linear: linear, bias)

    def converted_linear(
        self,
        path: str,
        n: int,
        k: int,
        convert: Callable[[Any], Any],
        bias: bool | None = False,
    ) -> Any:
        """Make the module ``convert(linear)`` of the linear at `path`; else as `linear`."""
        spec = self._spec(path)
        source = self._linear_source(path, n, k, spec, bias)
        settings = self.settings

        def construct(values):
            return convert(make_linear(values[""], n, k, settings, spec))

        return self._note(path, {"": source}, construct, {"": spec})

    def merged_linear(
        self,
        path: str,
        k: int,
        rows: Mapping[str, int],
        bias: bool | None | Mapping[str, bool | None] = False,
    ) -> MergedLinear:
        """Make linears that read the same input, as one where none of them is quantized.

        Args:
          path: of the merged linear; that of a linear is ``path.name``.
          k: inputs.
          rows: name -> outputs of one shard.
          bias: as for `linear`; of all linears, or by name.
        """
        settings = self.settings
        specs = {name: self._spec(f"{path}.{name}") for name in rows}
        biases = bias if isinstance(bias, Mapping) else dict.fromkeys(rows, bias)
        sources = {
            name: self._linear_source(f"{path}.{name}", n, k, specs[name], biases[name])
            for name, n in rows.items()
        }

        def construct(values):
            linears = {
                name: make_linear(values[name], n, k, settings, specs[name])
                for name, n in rows.items()
            }
            merged = MergedLinear(**linears)
            if merged.joined is not None and self.shards > 1:
                layouts = [
                    spec and spec.layout(n, self.shards)
                    for spec, n in zip(specs.values(), rows.values(), strict=True)
                ]
                for variable in (merged.joined.weight, merged.joined.bias):
                    mark(variable, join_layouts(layouts, rows.values()))
            return merged

        return self._note(path, sources, construct, specs)

    def cache_scales(
        self, path: str, construct: Callable[[CacheScales | None], Any], **heads: int
    ) -> Any:
        """Make the module at `path` of how keys and values of an attention are rounded to FP8.

        Args:
          path: of the module.
          construct: the scales, None where nothing is rounded -> the module.
          heads: of one shard: number of heads of what is kept, under "k" and "v".
        """
        specs = {name: self._specs.get(name) for name in heads}
        source = None
        if self.settings.rounds_to_fp8:
            whole = {
                name: count * (spec.parts if (spec := specs[name]) else 1)
                for name, count in heads.items()
            }
            source = self._table.cache_scales(self.key(path), **whole)
        if source is None:
            return construct(None)

        def make(values):
            made = construct(values[""])
            for name, spec in specs.items():
                mark(made.scales[name], spec and spec.layout(heads[name], self.shards))
            return made

        return self._note(path, {"": source}, make, {"": specs})

    def experts(
        self, path: str, num_experts: int, hidden: int, intermediate: int, **options: Any
    ) -> ExpertWeights:
        """Make the experts of one layer, canonical; `options` are those of `WeightTable.experts`.

        The module that takes them plans its kernel, and its abstract weights then say in which
        layout `filling.fill` puts what it reads.
        """
        source = self._table.experts(self.key(path), num_experts, hidden, intermediate, **options)
        self.parts.append(ExpertPart(path, source))
        params, expert_mesh = source.value, self.settings.expert_mesh
        if expert_mesh is not None:
            check_experts(params, expert_mesh)
        return ExpertWeights(_zeros(params), source.checkpoint_scheme)

    def _spec(self, path) -> ShardSpec | None:
        *_, parent, name = ("", *path.split("."))
        return self._specs.get(f"{parent}.{name}", self._specs.get(name))

    def _linear_source(self, path, n, k, spec, bias) -> Source:
        parts = spec.parts if spec else 1
        rows, columns = (1, parts) if spec and spec.axis == "columns" else (parts, 1)
        return self._table.linear(self.key(path), n * rows, k * columns, bias=bias)

    def _note(self, path, sources, construct, specs=None):
        """Return the part at `path`, abstract, with the shapes of all shards together."""
        part = Part(path, sources, construct, specs or {}, self.shards)
        self.parts.append(part)
        values = {name: _zeros(source.value) for name, source in sources.items()}
        made = construct(values_of_shard(values, part.specs, 0, part.shards))
        return made if part.shards == 1 else _widen(made, part.shards)


def make_linear(
    found: LinearWeights, n: int, k: int, settings: Settings, spec: ShardSpec | None = None
) -> DenseLinear | FP8Linear | NVFP4Linear:
    """Make a linear ``[n, k]`` of what the file holds for it.

    Args:
      found: the weights of one shard.
      n, k: sizes of one shard.
      settings: how modules are made.
      spec: how it is divided along `tensor`; None: it is not.
    """
    if found.checkpoint_scheme is None:
        made = DenseLinear(found.weight, found.bias, dtype=settings.dtype)
    elif isinstance(found.checkpoint_scheme, FP8ActivationScaling):
        made = FP8Linear(
            found.weight,
            found.bias,
            found.input_scale,
            checkpoint_scheme=found.checkpoint_scheme,
            multiply_by_reciprocal=found.multiply_by_reciprocal,
            scheme=settings.scheme,
            target=settings.target,
            dtype=settings.dtype,
        )
    else:
        made = NVFP4Linear(
            k,
            n,
            weight=found.weight,
            bias=found.bias,
            input_scale=found.input_scale,
            checkpoint_scheme=found.checkpoint_scheme,
            **settings.module_arguments(),
        )
    if spec is not None:
        layout = spec.layout(n if spec.axis == "rows" else k, settings.shards)
        mark(made.weight, layout)
        mark(made.bias, layout if spec.axis == "rows" else None)
        made.adds_bias_once = spec.axis == "columns"
    return made


def values_of_shard(values: Values, specs: Mapping[str, Any], index: int, shards: int) -> Values:
    """Return what one shard holds of the values of a part."""
    if shards == 1:
        return values
    return {
        name: take_scales(value, specs[name], index, shards)
        if isinstance(value, CacheScales)
        else take_shard(value, specs.get(name), index, shards)
        for name, value in values.items()
    }


def _widen(made: Any, shards: int) -> Any:
    """Return an abstract module of one shard with the shapes of all shards together."""
    leaves, tree = jax.tree.flatten(made)

    def widen(leaf, axis):
        if axis is None:
            return leaf
        shape = list(leaf.shape)
        shape[axis] *= shards
        return jnp.zeros(shape, leaf.dtype)

    return tree.unflatten(map(widen, leaves, module_axes(made)))


def _whole(shape: Sequence[int], spec: ShardSpec | None) -> tuple[int, ...]:
    """Return the shape in the file of an array of which one shard has `shape`."""
    return (shape[0] * (spec.parts if spec else 1), *shape[1:])


def _zeros(tree):
    return jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), tree)


def check_parts_cover(model: Any, parts: Sequence[Part | ExpertPart], prefix: str) -> None:
    """Check that parts fill every variable of an abstract model.

    Args:
      model: abstract.
      parts: of the model.
      prefix: path of `model` in the whole model, empty for that itself.

    Raises:
      RuntimeError: a variable would stay without a value: a fault of the architecture's code.
    """
    scope = f"{prefix}." if prefix else ""
    paths = tuple(f"{part.path}." for part in parts)
    found = (".".join(map(str, path)) for path, _ in nnx.to_flat_state(nnx.state(model)))
    missing = [path for path in found if not f"{scope}{path}.".startswith(paths)]
    if missing:
        raise RuntimeError(f"no part fills {missing}")
