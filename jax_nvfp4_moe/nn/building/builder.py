"""Build a model without its weights, and note which tensors fill each part.

1. The constructor of a model asks a `Builder` for its parts, by their paths in the model. Under
   `nnx.eval_shape` the result is an abstract model, and the builder notes a `Part` for each part.
2. A `checkpoint.table.WeightTable` finds the `Source` of each part in the headers of the files. The
   key table of the model translates paths to names in the file. Missing and unexpected tensors are
   therefore known before any weight is read.
3. `filling.fill` reads one part after another, puts it on its devices, and sets it into the model.
"""

import copy
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from jax_nvfp4_moe.checkpoint.table import Source
from jax_nvfp4_moe.checkpoint.values import CacheScales
from jax_nvfp4_moe.nn.building.keys import KeyTable, find_key
from jax_nvfp4_moe.nn.building.settings import Settings
from jax_nvfp4_moe.nn.experts.token_router import TokenRouter
from jax_nvfp4_moe.nn.linear.formats import make_linear
from jax_nvfp4_moe.nn.linear.merged_linear import MergedLinear, find_runs, join_weights
from jax_nvfp4_moe.nn.linear.scaled_linear import ScaledLinear
from jax_nvfp4_moe.nn.norm import LayerNorm, RMSNorm
from jax_nvfp4_moe.numerics.routing import Router
from jax_nvfp4_moe.numerics.tensor import DenseExperts, MoEParams
from jax_nvfp4_moe.parallel.experts import check_experts
from jax_nvfp4_moe.parallel.shard_spec import ShardSpec, join_layouts, take_scales, take_shard
from jax_nvfp4_moe.parallel.sharded_variable import mark, module_axes
from jax_nvfp4_moe.scheme import CheckpointScheme

# Whether a linear has a bias. None takes one if the file has it. So does "denied", with a warning,
# because the configuration says that there is none.
Bias = bool | None | Literal["denied"]
Values = Mapping[str, Any]  # name of a source -> value that was read for it


def as_stored(declared: bool | None) -> Bias:
    """Return the `Bias` of a linear that takes a stored bias even if it is declared to have none.

    Args:
      declared: what the configuration says; None if it says nothing.
    """
    return "denied" if declared is False else declared


@dataclasses.dataclass(frozen=True)
class Part:
    """One part of a model, and the sources that fill it.

    Attributes:
      path: path of a module or a variable, such as "layers.3.attention.out".
      sources: name -> source of a value that the part needs.
      construct: function from the values of the sources to the module, the variable, or the value
        of the variable. None for the routed experts of one layer, which are read a few at a time.
      specs: name of a source -> how its value is sharded along `tensor`, or None if it is
        replicated.
      shards: number of shards of the part; 1 if it is replicated.
      interleaved: whether gate and up rows of experts alternate if one tensor holds both.
    """

    path: str
    sources: Mapping[str, Source]
    construct: Callable[[Values], Any] | None = None
    specs: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    shards: int = 1
    interleaved: bool = False

    @property
    def experts(self) -> Source | None:
        """The source of the routed experts of one layer; None for any other part."""
        return self.sources[""] if self.construct is None else None


class ExpertWeights(NamedTuple):
    """The routed experts of one layer, and the scheme that the checkpoint declares for them."""

    params: MoEParams | DenseExperts
    checkpoint_scheme: CheckpointScheme


class Builder:
    """Builds the parts of one abstract model, and notes the sources that fill them.

    Attributes:
      settings: how modules are made.
      parts: all parts made so far, in order.
      shards: number of shards of the next parts.
    """

    def __init__(self, table: Any, keys: KeyTable, settings: Settings):
        """Make a builder.

        Args:
          table: a `checkpoint.table.WeightTable`, or an object with the same methods.
          keys: key table of the model; see `nn.building.keys`.
          settings: how modules are made.
        """
        self.settings, self._table, self._keys = settings, table, keys
        self.parts: list[Part] = []
        self.shards, self._specs, self._scope = 1, {}, ""
        self._square_inputs_first: bool | None = None

    def inside(
        self, path: str, keys: KeyTable, *, square_inputs_first: bool | None = None
    ) -> "Builder":
        """Return a builder for the parts of one module of the model, with its own key table.

        Args:
          path: path of the module. Paths that are passed to the returned builder begin below it.
          keys: key table of the module.
          square_inputs_first: how stacks of square experts lie, whose shapes do not tell; as
            `inputs_first` of `WeightTable.experts`. None, the default, reports them as a problem.
        """
        other = copy.copy(self)
        other._scope, other._keys = f"{self._scope}{path}.", keys
        other._square_inputs_first = square_inputs_first
        return other

    def sharded(self, specs: Mapping[str, ShardSpec | None]) -> "Builder":
        """Return a builder for the parts of a module that is sharded along `tensor`.

        Sizes that are passed to the returned builder are those of one shard.

        Args:
          specs: the last name of a path, or its last two names, -> how the part at that path is
            sharded. None, and all other parts, are replicated.
        """
        other = copy.copy(self)
        other.shards, other._specs = self.settings.shards, dict(specs)
        return other

    def key(self, path: str) -> str:
        """Return the name in the file of the part at `path`."""
        return find_key(self._keys, path, self._table.has_under)

    def has(self, path: str) -> bool:
        """Return whether the file has tensors for the part at `path`."""
        return self._table.has_under(self.key(path))

    def holds(self, path: str) -> bool:
        """Return whether the file has tensors inside the module at `path`."""
        return self._table.has_under(f"{self.key(path)}.")

    def stored(self, path: str) -> str:
        """Return the name in the file, for messages, of a tensor of the module at `path`."""
        return self._table.stored(f"{self.key(path)}.")

    def same(self, path: str, name: str) -> bool:
        """Return whether the part at `path` is one weight, stored equal to the tensor `name`.

        Both must have one dtype, one shape and the same bytes, which are read and compared.
        """
        return self._table.same(self.key(path).removesuffix(".weight"), name)

    def problem(self, sentence: str) -> None:
        """Note a problem with the file, which is raised with all others before weights are read."""
        self._table.problem(sentence)

    def claim(self, path: str) -> None:
        """Declare that the drafting layers below `path` are loaded; see `Finder.claimed`."""
        self._table.claim(f"{self.key(path)}.")

    def warn(self, fact: str) -> None:
        """Note a difference between the file and its configuration, for a warning in the log."""
        self._table.warn(fact)

    def checkpoint_scheme(self, path: str) -> CheckpointScheme:
        """Return the scheme that the file declares for the part; None if it is unquantized."""
        return self._table.checkpoint_scheme(self.key(path))

    def ignore(self, path: str, reason: str) -> None:
        """Declare that the file's tensors of a part are left out on purpose, and why."""
        self._table.ignore(f"{self.key(path).removesuffix('.weight')}.", reason)

    def ignore_array(self, path: str, reason: str) -> None:
        """Declare that the file's tensor of a variable is left out on purpose, and why."""
        self._table.ignore(self.key(path), reason)

    def array(
        self,
        path: str,
        shape: Sequence[int],
        *,
        dtype: Any = None,
        stored: Sequence[int] | None = None,
        keeps_bfloat16: bool = False,
    ) -> jax.Array:
        """Make the value of a variable that is replicated on all devices.

        Args:
          path: path of the variable.
          shape: its shape.
          dtype: dtype of the value. None takes the model's dtype.
          stored: shape of the tensor in the file, if it has further axes of length 1. None takes
            `shape`.
          keeps_bfloat16: as for `WeightTable.array`. False by default.
        """
        stored = stored and tuple(stored)
        options = {"dtype": dtype, "stored": stored, "keeps_bfloat16": keeps_bfloat16}
        source = self._table.array(self.key(path), tuple(shape), **options)
        return self._note(path, {"": source}, lambda values: values[""])

    def token_router(
        self,
        block: str,
        num_experts: int,
        hidden: int,
        router: Router,
        *,
        correction_bias: bool = False,
        stored_bias: Sequence[int] | None = None,
        logit_bias: bool = False,
        scale: bool = False,
        logit_cap: float | None = None,
        table_rows: int | None = None,
        norm: Callable[..., Any] | None = None,
    ) -> TokenRouter:
        """Make the router of an expert block, which is replicated on all devices.

        Its weight is float32. On a GPU it stays in bfloat16 if file and model have that dtype,
        because tensor cores multiply such numbers exactly. The path of the router is
        ``block.token_router``, and those of its parts have the names of its attributes.

        Args:
          block: path of the block.
          num_experts: number of experts.
          hidden: width of the tokens.
          router: the rule that turns logits into experts.
          correction_bias: whether the scores are corrected. Defaults to False.
          stored_bias: shape of the correction in the file, if it has further axes of length 1.
          logit_bias: whether the logits have a bias. Defaults to False.
          scale: whether each expert has a factor of its own. Defaults to False.
          logit_cap: bound of the logits; None (default) for no bound.
          table_rows: number of token ids whose experts are in a table; None (default) for no table.
          norm: module through which the router reads tokens; None (default) for none.
        """
        settings, path, e = self.settings, f"{block}.token_router", num_experts
        exact = settings.dtype == jnp.bfloat16 and settings.target.platform == "cuda"

        def part(name, wanted, shape=(e,), dtype: Any = jnp.float32, **options):
            return self.array(f"{path}.{name}", shape, dtype=dtype, **options) if wanted else None

        return TokenRouter(
            e,
            hidden,
            router=router,
            weight=part("weight", True, (e, hidden), keeps_bfloat16=exact),
            correction_bias=part("correction_bias", correction_bias, stored=stored_bias),
            logit_bias=part("logit_bias", logit_bias),
            scale=part("scale", scale),
            token_experts=part("token_experts", table_rows, (table_rows, router.top_k), jnp.int32),
            norm=norm,
            logit_cap=logit_cap,
            target=settings.target,
            dtype=settings.dtype,
        )

    def variable(
        self,
        path: str,
        shape: Sequence[int],
        *,
        dtype: Any = None,
        kind: Callable[[Any], nnx.Variable] = nnx.Param,
        stored: Sequence[int] | None = None,
    ) -> Any:
        """Make a variable that holds the unquantized array at `path`.

        Args:
          path: path of the variable.
          shape: shape of one shard.
          dtype: dtype of the value. None takes the model's dtype.
          kind: class of the variable. Defaults to `nnx.Param`.
          stored: shape of the tensor in the file, if it has further axes of length 1. None takes
            `shape`.
        """
        spec = self._spec(path)
        source = self._table.array(
            self.key(path), _whole(shape, spec), dtype=dtype, stored=stored and tuple(stored)
        )

        def construct(values):
            return mark(kind(values[""]), spec and spec.layout(shape[0], self.shards))

        return self._note(path, {"": source}, construct, {"": spec})

    def merged_variable(
        self, path: str, rows: Mapping[str, int], shape: Sequence[int], *, dtype: Any = None
    ) -> Any:
        """Make one variable with the rows of several unquantized arrays.

        Args:
          path: path of the variable. The path of one of the arrays is ``path.name``.
          rows: name of each array -> its number of rows in one shard.
          shape: shape of a row.
          dtype: dtype of the value. None takes the model's dtype.
        """
        specs = {name: self._spec(f"{path}.{name}") for name in rows}
        sources = {
            name: self._table.array(
                self.key(f"{path}.{name}"), _whole((n, *shape), specs[name]), dtype=dtype
            )
            for name, n in rows.items()
        }

        def construct(values):
            made = nnx.Param(jnp.concatenate([values[name] for name in rows]))
            found = [
                spec and spec.layout(n, self.shards)
                for n, spec in zip(rows.values(), specs.values(), strict=True)
            ]
            return mark(made, join_layouts(found, rows.values()))

        return self._note(path, sources, construct, specs)

    def norm(self, path: str, width: int, eps: float, *, centered: bool = False) -> RMSNorm:
        """Make an RMS norm.

        Args:
          path: path of the norm.
          width: number of channels in one shard.
          eps: added to the mean of the squares.
          centered: whether the file stores ``weight - 1``. The weight is then kept in float32.
            Defaults to False.
        """
        spec, dtype = self._spec(path), jnp.float32 if centered else None
        name = f"{self.key(path)}.weight"
        source = self._table.array(name, _whole((width,), spec), dtype=dtype)

        def construct(values):
            weight = 1 + values[""] if centered else values[""]
            made = RMSNorm(weight, eps, self.settings.target)
            made.weight = mark(made.weight, spec and spec.layout(width, self.shards))
            return made

        return self._note(path, {"": source}, construct, {"": spec})

    def layer_norm(self, path: str, width: int, eps: float, *, bias: bool = True) -> LayerNorm:
        """Make a layer norm, which is replicated on all devices.

        Args:
          path: path of the norm.
          width: number of channels.
          eps: added to the variance.
          bias: whether the norm has a bias. Defaults to True.
        """
        sources = {
            name: self._table.array(f"{self.key(path)}.{name}", (width,))
            for name in ("weight", "bias")[: 1 + bias]
        }

        def construct(values):
            return LayerNorm(values["weight"], values.get("bias"), eps, self.settings.target)

        return self._note(path, sources, construct)

    def linear(self, path: str, n: int, k: int, bias: Bias = False) -> Any:
        """Make the linear layer at `path`, quantized or unquantized as in the file.

        Args:
          path: path of the layer.
          n: number of outputs of one shard.
          k: number of inputs of one shard.
          bias: whether the layer has a bias, see `Bias`. Defaults to False.
        """
        return self.converted_linear(path, n, k, lambda linear: linear, bias)

    def converted_linear(
        self,
        path: str,
        n: int,
        k: int,
        convert: Callable[[Any], Any],
        bias: Bias = False,
    ) -> Any:
        """Make the module ``convert(linear)`` for the linear layer at `path`.

        Args:
          path: path of the layer.
          n: number of outputs of one shard.
          k: number of inputs of one shard.
          convert: function from the linear layer to the module.
          bias: as for `linear`.
        """
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
        bias: Bias | Mapping[str, Bias] = False,
    ) -> MergedLinear:
        """Make linear layers that read the same input, joined if their formats allow it.

        Args:
          path: path of the merged layer. The path of one of its layers is ``path.name``.
          k: number of inputs.
          rows: name of each layer -> its number of outputs in one shard.
          bias: as for `linear`, for all layers or by name.
        """
        settings = self.settings
        specs = {name: self._spec(f"{path}.{name}") for name in rows}
        biases = bias if isinstance(bias, Mapping) else dict.fromkeys(rows, bias)
        sources = {
            name: self._linear_source(f"{path}.{name}", n, k, specs[name], biases[name])
            for name, n in rows.items()
        }

        def construct(values):
            linears = {}
            # The values may come in another order, because tree operations sort dictionaries.
            for names in find_runs({name: values[name] for name in rows}, settings):
                widths = [rows[name] for name in names]
                joined = join_weights([values[name] for name in names])
                made = make_linear(joined, sum(widths), k, settings)
                found = [
                    spec and spec.layout(n, settings.shards)
                    for n, spec in zip(widths, map(specs.get, names), strict=True)
                ]
                inner = made.linear if isinstance(made, ScaledLinear) else made
                layout = join_layouts(found, widths)
                inner.weight, inner.bias = mark(inner.weight, layout), mark(inner.bias, layout)
                linears["_".join(names)] = made
            return MergedLinear(**linears)

        return self._note(path, sources, construct, specs)

    def cache_scales(
        self, path: str, construct: Callable[[CacheScales | None], Any], **heads: int
    ) -> Any:
        """Make the module at `path` that rounds the keys and values of an attention to FP8.

        Args:
          path: path of the module.
          construct: function from the scales to the module. It gets None if nothing is rounded.
          heads: number of heads in one shard of each cache entry, by the names "k" and "v".
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
                layout = spec and spec.layout(heads[name], self.shards)
                made.scales[name] = mark(made.scales[name], layout)
            return made

        return self._note(path, {"": source}, make, {"": specs})

    def experts(
        self, path: str, num_experts: int, hidden: int, intermediate: int, **options: Any
    ) -> ExpertWeights:
        """Make the routed experts of one layer, in the canonical layout.

        The module that takes them chooses a kernel. Its abstract weights then have the layout to
        which `filling.fill` converts the values.

        Args:
          path: path of the variable that holds the experts.
          num_experts: number of experts.
          hidden: width of the tokens.
          intermediate: width between the two products.
          **options: options of `WeightTable.experts`.
        """
        if self._square_inputs_first is not None and hidden in (intermediate, 2 * intermediate):
            options = {"inputs_first": self._square_inputs_first} | options
        source = self._table.experts(self.key(path), num_experts, hidden, intermediate, **options)
        interleaved = bool(options.get("interleaved"))
        self.parts.append(Part(self._scope + path, {"": source}, interleaved=interleaved))
        params, expert_mesh = source.value, self.settings.expert_mesh
        if expert_mesh is not None:
            check_experts(params, expert_mesh)
        return ExpertWeights(make_zeros(params), source.checkpoint_scheme)

    def _spec(self, path) -> ShardSpec | None:
        """Return how the part at `path` is sharded, or None if it is replicated."""
        *_, parent, name = ("", *path.split("."))
        return self._specs.get(f"{parent}.{name}", self._specs.get(name))

    def _linear_source(self, path, n, k, spec, bias) -> Source:
        """Return the source of a linear layer, with the sizes of all shards together."""
        parts = spec.parts if spec else 1
        rows, columns = (1, parts) if spec and spec.axis == "columns" else (parts, 1)
        denied = bias == "denied"
        name, bias = self.key(path), None if denied else bias
        source = self._table.linear(name, n * rows, k * columns, bias=bias)
        if denied and source.value.bias is not None:
            self.warn("the file stores biases that the configuration denies; they are used")
        return source

    def _note(self, path, sources, construct, specs=None):
        """Note a part, and return it, abstract, with the shapes of all shards together."""
        part = Part(self._scope + path, sources, construct, specs or {}, self.shards)
        self.parts.append(part)
        values = {name: make_zeros(source.value) for name, source in sources.items()}
        made = construct(values_of_shard(values, part.specs, 0, part.shards))
        return made if part.shards == 1 else _widen(made, part.shards)


def values_of_shard(values: Values, specs: Mapping[str, Any], index: int, shards: int) -> Values:
    """Return the part of each value that one shard holds.

    Args:
      values: values of all sources of a part.
      specs: name of a source -> how its value is sharded.
      index: index of the shard.
      shards: number of shards; with 1, the values are returned unchanged.
    """
    if shards == 1:
        return values
    return {
        name: take_scales(value, specs[name], index, shards)
        if isinstance(value, CacheScales)
        else take_shard(value, specs.get(name), index, shards)
        for name, value in values.items()
    }


def _widen(made: Any, shards: int) -> Any:
    """Return the abstract module of one shard with the shapes of all shards together."""
    leaves, tree = jax.tree.flatten(made)

    def widen(leaf, axis):
        if axis is None:
            return leaf
        shape = list(leaf.shape)
        shape[axis] *= shards
        return jnp.zeros(shape, leaf.dtype)

    return tree.unflatten(map(widen, leaves, module_axes(made)))


def _whole(shape: Sequence[int], spec: ShardSpec | None) -> tuple[int, ...]:
    """Return the shape in the file of an array whose shards have `shape`."""
    return (shape[0] * spec.parts, *shape[1:]) if spec else tuple(shape)


def make_zeros(tree: Any) -> Any:
    """Return zeros with the shapes and dtypes of the leaves of `tree`."""
    return jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), tree)


def check_parts_cover(model: Any, parts: Sequence[Part], prefix: str) -> None:
    """Check that the parts fill every variable of an abstract model.

    Args:
      model: abstract model, or one of its modules.
      parts: all parts of the model.
      prefix: path of `model` in the whole model; empty for the whole model.

    Raises:
      RuntimeError: a variable would have no value. This is a fault in the code of the architecture.
    """
    scope = f"{prefix}." if prefix else ""
    paths = tuple(f"{part.path}." for part in parts)
    found = (".".join(map(str, path)) for path, _ in nnx.to_flat_state(nnx.state(model)))
    missing = [path for path in found if not f"{scope}{path}.".startswith(paths)]
    if missing:
        raise RuntimeError(
            f"{missing}: the code of this architecture names no tensors for these variables"
        )
