"""What the decoder models share: norm, linears, cache, the loop of layers."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jaxtyping import Array, Float, Int32

from jax_nvfp4_moe.checkpoint.resolve import LinearWeights
from jax_nvfp4_moe.models.attention import PADDING
from jax_nvfp4_moe.models.cutting import build_cut, cut_table, cut_vocabulary
from jax_nvfp4_moe.models.settings import Settings as Settings
from jax_nvfp4_moe.nn.dense import DenseLinear, FP8Linear
from jax_nvfp4_moe.nn.linear import ModuleProblem, NVFP4Linear, find_problems
from jax_nvfp4_moe.ops.dense import dense
from jax_nvfp4_moe.parallel.expert_mesh import ExpertMesh, check_context
from jax_nvfp4_moe.parallel.parts import Split, build_parts, join_columns, look_up
from jax_nvfp4_moe.scheme import FP8ActivationScaling


@dataclasses.dataclass(frozen=True)
class Architecture:
    """One row of the table of architectures.

    Attributes:
      read_config: parsed ``config.json`` -> a frozen dataclass; CheckpointError says what is wrong.
      build_model: config, weights, settings -> `Decoder`.
      build_moe: config, layer, weights, settings -> `NVFP4MoE`.
      moe_prefix: layer -> the module whose tensors `build_moe` asks for.
    """

    read_config: Callable
    build_model: Callable
    build_moe: Callable
    moe_prefix: Callable[[int], str]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Cache:
    """What a model keeps of past tokens.

    Attributes:
      layers: for each layer, name -> array: keys and values ``[b, m, max_length, d]`` of m heads,
        or a recurrent state ``[b, ...]``.
      lengths: int32 ``[b]``, tokens taken in of each row. Keys and values past it may hold
        anything.
      max_length: static; tokens that there is room for.
    """

    layers: tuple[Mapping[str, jax.Array], ...]
    lengths: jax.Array
    max_length: int = dataclasses.field(metadata={"static": True})


class RMSNorm(nnx.Module):
    """``weight * x / sqrt(mean(x^2) + eps)`` over the last axis, float32 inside.

    The product with the weight is in the weight's dtype.
    """

    def __init__(self, weight: Float[Array, "*n h"], eps: float):
        """Make a norm of `weight` ``[h]``, or ``[n, h]`` where each head has its own."""
        self.weight = nnx.Param(weight)
        self.eps = eps

    def __call__(
        self, x: Float[Array, "... h"], mean: Float[Array, "... 1"] | None = None
    ) -> Float[Array, "... h"]:
        """Normalize; the result has the dtype of `x`.

        Args:
          x: a vector, or the part of one that `weight` is for.
          mean: of the squares of the whole vector; None where `x` is that.
        """
        wide = x.astype(jnp.float32)
        mean = mean_square(x) if mean is None else mean
        weight = self.weight.get_value()
        normal = (wide * lax.rsqrt(mean + self.eps)).astype(weight.dtype)
        return (normal * jnp.expand_dims(weight, range(x.ndim - weight.ndim))).astype(x.dtype)


def mean_square(x: Float[Array, "... h"]) -> Float[Array, "... 1"]:
    """Return ``mean(x^2)`` over the last axis, in float32."""
    return jnp.mean(jnp.square(x.astype(jnp.float32)), axis=-1, keepdims=True)


class MergedLinear(nnx.Module):
    """Linears that read the same input: one product, where none of them is quantized.

    ``y[..., n1 + n2] = concatenate([first(x), second(x)])``. While decoding, a product of one token
    is bound by reading its weights: one large read is faster than some small ones.
    """

    def __init__(self, **linears):
        """Join `linears`; they are attributes under their names where one is quantized."""
        self.names = tuple(linears)
        self.joined = _join(tuple(linears.values()))
        for name, part in linears.items() if self.joined is None else ():
            setattr(self, name, part)

    def __call__(self, x: Float[Array, "... k"]) -> Float[Array, "... n"]:
        """Return the results of all linears, one behind the other."""
        if self.joined is not None:
            return self.joined(x)
        return jnp.concatenate([getattr(self, name)(x) for name in self.names], axis=-1)


def _join(linears):
    """Return one linear of all rows, or None."""
    if not all(isinstance(part, DenseLinear) for part in linears):
        return None
    biases = [part.bias for part in linears]
    bias = None
    if any(one is not None for one in biases):
        rows = [part.weight.get_value().shape[:1] for part in linears]
        bias = jnp.concatenate(
            [
                jnp.zeros(shape, linears[0].dtype) if one is None else one.get_value()
                for one, shape in zip(biases, rows, strict=True)
            ]
        )
    weight = jnp.concatenate([part.weight.get_value() for part in linears])
    return DenseLinear(weight, bias, dtype=linears[0].dtype)


class GatedMLP(nnx.Module):
    """``down(silu(gate(x)) * up(x))``: dense layers and shared experts."""

    def __init__(self, weights, prefix: str, hidden: int, intermediate: int, settings: Settings):
        """Ask `weights` for the three linears below `prefix`."""
        self.gate_up = MergedLinear(
            gate=linear(weights, f"{prefix}.gate_proj", intermediate, hidden, settings),
            up=linear(weights, f"{prefix}.up_proj", intermediate, hidden, settings),
        )
        self.down = linear(weights, f"{prefix}.down_proj", hidden, intermediate, settings)

    def __call__(self, x: Float[Array, "... h"]) -> Float[Array, "... h"]:
        """Run the three products; the activation is float32."""
        gate, up = jnp.split(self.gate_up(x).astype(jnp.float32), 2, axis=-1)
        return self.down((jax.nn.silu(gate) * up).astype(x.dtype))


def gated_mlp(weights, prefix: str, hidden: int, intermediate: int, settings: Settings):
    """Make a `GatedMLP`, over a mesh in parts along `tensor`."""
    parts = settings.shards
    rows, columns = Split("rows", parts), Split("columns", parts)
    return build_cut(
        lambda weights, width: GatedMLP(weights, prefix, hidden, width, settings),
        intermediate,
        intermediate // parts,
        weights,
        settings,
        splits={"gate_proj": rows, "up_proj": rows, "down_proj": columns},
        last=f"{prefix}.down_proj",
        width=intermediate,
    )


class DecoderLayer(nnx.Module):
    """Attention and feed-forward, each on normalized input and added to the residual stream."""

    def __init__(self, attention_norm: RMSNorm, attention, mlp_norm: RMSNorm, mlp):
        """Make a layer of its four parts."""
        self.attention_norm, self.attention = attention_norm, attention
        self.mlp_norm, self.mlp = mlp_norm, mlp

    def init_cache(self, batch: int, max_length: int) -> Mapping[str, Array]:
        """Return empty cache entries of `batch` rows."""
        return self.attention.init_cache(batch, max_length)

    def __call__(self, x, positions, entries):
        """Run the layer on ``x [b, t, h]``; returns the result and the updated cache entries."""
        with jax.named_scope("attention"):
            y, entries = self.attention(self.attention_norm(x), positions, entries)
        x = x + y
        with jax.named_scope("mlp"):
            return x + self.mlp(self.mlp_norm(x)), entries


class Decoder(nnx.Module):
    """A causal language model: embedding, layers, norm, and logits over the vocabulary.

    Attributes:
      config: static; has vocab_size, hidden, num_layers, max_positions and eps.
      dtype: static; of activations, dense weights and cache.
      layers: of `DecoderLayer`, or others called in the same way.
      expert_mesh: static; where embedding and head are cut along the vocabulary, else None.
    """

    def __init__(
        self,
        config,
        embedding: Float[Array, "v h"],
        layers: Sequence[Any],
        norm: RMSNorm,
        head: Callable | None,
        settings: Settings,
        expert_mesh: ExpertMesh | None = None,
    ):
        """Make a model; `head` None shares the embedding (tied).

        Over a `expert_mesh` embedding and head have an axis more in front, that of the parts.
        """
        self.config = config
        self.dtype = jnp.dtype(settings.dtype)
        self.embedding = nnx.Param(embedding)
        self.layers = nnx.List(list(layers))
        self.norm = norm
        self.head, self.expert_mesh = head, expert_mesh

    def init_cache(self, batch: int, max_length: int) -> Cache:
        """Return an empty cache for `batch` rows of up to `max_length` tokens.

        Raises:
          ValueError: a size is not positive.
        """
        if batch < 1 or max_length < 1:
            raise ValueError(f"cache: expected positive sizes, got {batch} rows of {max_length}")
        layers = tuple(layer.init_cache(batch, max_length) for layer in self.layers)
        return Cache(layers, jnp.zeros(batch, jnp.int32), max_length)

    def __call__(
        self,
        input_ids: Int32[Array, "b t"],
        cache: Cache | None = None,
        *,
        lengths: Int32[Array, " b"] | None = None,
        logits_at: Int32[Array, " b"] | None = None,
    ):
        """Return float32 logits ``[b, t, vocab]``, and the extended cache where one is given.

        Args:
          input_ids: not checked: ids lie in the vocabulary.
          cache: each row's tokens follow those that it has taken in. Not checked: that they fit;
            tokens past max_length are dropped.
          lengths: true tokens of each row, 0 to t, the rest being padding; t where None.
          logits_at: an index into t for each row: logits of that position alone, ``[b, 1, vocab]``.

        Raises:
          ValueError: a shape or dtype is wrong, or ``jax.set_mesh`` has Explicit axes.
        """
        _check_call(input_ids, cache)
        b, t = input_ids.shape
        start = jnp.zeros(b, jnp.int32) if cache is None else cache.lengths
        steps = jnp.arange(t, dtype=jnp.int32)[None, :]
        positions = start[:, None] + steps
        if lengths is not None:
            positions = jnp.where(steps < lengths[:, None], positions, PADDING + steps)
        table = self.embedding.get_value()
        check_context(table)
        x = (
            table[input_ids]
            if self.expert_mesh is None
            else look_up(table, input_ids, self.expert_mesh)
        )
        entries = []
        for index, layer in enumerate(self.layers):
            with jax.named_scope(f"layer_{index}"):
                x, entry = layer(x, positions, None if cache is None else cache.layers[index])
            entries.append(entry)
        if logits_at is not None:
            x = jnp.take_along_axis(x, logits_at[:, None, None], axis=1)
        logits = self._logits(self.norm(x))
        if cache is None:
            return logits
        grown = start + (t if lengths is None else lengths)
        return logits, Cache(tuple(entries), grown, cache.max_length)

    def _logits(self, x):
        head = self.embedding.get_value() if self.head is None else self.head
        with jax.named_scope("head"):
            if self.expert_mesh is None:
                return _score(head, x)
            return join_columns(_score, head, x, self.expert_mesh)

    def nvfp4_problems(self):
        """Return what each NVFP4 module asks of a backend, for `explain`."""
        found: list[ModuleProblem] = list(find_problems(self))
        return found


def _score(head, x):
    """Return float32 logits; `head` is a linear, or a table whose rows are its weights."""
    if isinstance(head, DenseLinear) and head.bias is None:
        return dense(x, head.weight.get_value())
    if isinstance(head, nnx.Module):
        return head(x).astype(jnp.float32)
    return dense(x, head)


def _check_call(input_ids, cache):
    if input_ids.ndim != 2 or not jnp.issubdtype(input_ids.dtype, jnp.integer):
        raise ValueError(
            f"input_ids: expected integers [b, t], got {input_ids.dtype.name} {input_ids.shape}"
        )
    if cache is None:
        return
    rows, length = cache.lengths.shape[0], cache.max_length
    if input_ids.shape[0] != rows or input_ids.shape[1] > length:
        raise ValueError(
            f"input_ids: expected [{rows}, t] with t of at most {length}, as the cache has; "
            f"got {input_ids.shape}"
        )


def linear(weights, prefix: str, n: int, k: int, settings: Settings, bias: bool | None = False):
    """Make the linear `prefix` ``[n, k]``, quantized or dense as the file has it."""
    found: LinearWeights = weights.linear(prefix, n, k, bias=bias)
    if found.checkpoint_scheme is None:
        made = DenseLinear(found.weight, found.bias, dtype=settings.dtype)
        return made if settings.observer is None else settings.observer.linear(prefix, made)
    if isinstance(found.checkpoint_scheme, FP8ActivationScaling):
        return FP8Linear(
            found.weight,
            found.bias,
            found.input_scale,
            checkpoint_scheme=found.checkpoint_scheme,
            multiply_by_reciprocal=found.multiply_by_reciprocal,
            scheme=settings.scheme,
            target=settings.target,
            dtype=settings.dtype,
        )
    return NVFP4Linear(
        k,
        n,
        weight=found.weight,
        bias=found.bias,
        input_scale=found.input_scale,
        checkpoint_scheme=found.checkpoint_scheme,
        **settings.module_arguments(),
    )


def embed(
    weights, rows: int, width: int, settings: Settings, expert_mesh: ExpertMesh | None = None
):
    """Make the embedding ``[rows, width]``, over a `expert_mesh` of `cut_vocabulary` its parts."""
    name = "model.embed_tokens.weight"
    if expert_mesh is not None:
        return cut_table(weights, name, rows, width, expert_mesh)
    table = weights.array(name, (rows, width))
    return table if settings.observer is None else settings.observer.embedding(table)


def finish_layer(layer: Callable, settings: Settings):
    """Return `layer`, all of whose parts are made, or what an observer puts in its place."""
    return layer if settings.observer is None else settings.observer.layer(layer)


def norm(weights, prefix: str, width: int, eps: float) -> RMSNorm:
    """Make the norm `prefix` of `width` channels."""
    return RMSNorm(weights.array(f"{prefix}.weight", (width,)), eps)


def centered_norm(weights, prefix: str, width: int, eps: float) -> RMSNorm:
    """Make the norm `prefix`, in the file as ``weight - 1``; float32, which keeps what is small."""
    return RMSNorm(1 + weights.array(f"{prefix}.weight", (width,), dtype=jnp.float32), eps)


def build_decoder(
    config,
    weights,
    settings: Settings,
    build_attention,
    build_moe,
    build_norm=norm,
    *,
    mlp_name: str = "mlp",
) -> Decoder:
    """Make a model of the usual shape, layer by layer, under the usual names.

    Args:
      config: also has `dense_layers`, `dense_intermediate` and `tied`.
      weights: the source of `checkpoint.resolve`.
      settings: how modules are made.
      build_attention: ``(config, layer, weights, settings)`` makes the attention of a layer.
      build_moe: makes the expert block of a layer in the same way.
      build_norm: makes the norms beside layers and behind the last; called as `norm`.
      mlp_name: of the feed-forward inside a layer.
    """
    h, eps = config.hidden, config.eps
    vocabulary = config.vocab_size
    expert_mesh = cut_vocabulary(weights, settings, vocabulary)
    embedding = embed(weights, vocabulary, h, settings, expert_mesh)
    layers = []
    for layer in range(config.num_layers):
        prefix = f"model.layers.{layer}"
        if layer in config.dense_layers:
            name = f"{prefix}.{mlp_name}"
            mlp = gated_mlp(weights, name, h, config.dense_intermediate, settings)
        else:
            mlp = build_moe(config, layer, weights, settings)
        made = DecoderLayer(
            build_norm(weights, f"{prefix}.input_layernorm", h, eps),
            build_attention(config, layer, weights, settings),
            build_norm(weights, f"{prefix}.post_attention_layernorm", h, eps),
            mlp,
        )
        layers.append(finish_layer(made, settings))
    final = build_norm(weights, "model.norm", h, eps)
    head = None
    if config.tied:
        weights.ignore("lm_head.", "the head shares the embedding")
    else:
        head = make_head(weights, vocabulary, h, settings, expert_mesh)
    return Decoder(config, embedding, layers, final, head, settings, expert_mesh)


def make_head(
    weights, vocabulary: int, hidden: int, settings: Settings, expert_mesh: ExpertMesh | None
):
    """Make the linear of the logits, over a `expert_mesh` of `cut_vocabulary` its parts."""
    if expert_mesh is None:
        return linear(weights, "lm_head", vocabulary, hidden, settings)
    own, splits = vocabulary // expert_mesh.tensor, {"lm_head": Split("rows", expert_mesh.tensor)}
    return build_parts(
        lambda part: linear(part, "lm_head", own, hidden, settings), weights, splits, expert_mesh
    )
