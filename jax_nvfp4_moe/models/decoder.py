"""What the decoder models share: norm, rotary embedding, attention, cache, loop of layers."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.experimental.layout import Layout, with_layout_constraint
from jaxtyping import Array, Bool, Float, Int32

from jax_nvfp4_moe.checkpoint.resolve import LinearWeights
from jax_nvfp4_moe.models.config import Rope
from jax_nvfp4_moe.nn import (
    DenseLinear,
    ModuleProblem,
    NVFP4Linear,
    dense,
    find_problems,
    precision_for,
)
from jax_nvfp4_moe.scheme import Target

_QUERIES = 512  # attended at once, which bounds the memory of the scores


@dataclasses.dataclass(frozen=True)
class Settings:
    """How the modules of one model are made: what the caller of `load_model` asked for."""

    target: Target
    scheme: str | None = None
    backend: str | None = None
    dtype: Any = jnp.bfloat16

    def module_arguments(self) -> dict[str, Any]:
        """Return the arguments that all NVFP4 modules take."""
        return dataclasses.asdict(self) | {"target": self.target}


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
    """Keys and values of past tokens.

    Attributes:
      layers: for each layer, name -> array ``[b, m, max_length, d]`` of m heads.
      lengths: int32 ``[b]``, valid entries of each row. Entries past it may hold anything.
    """

    layers: tuple[Mapping[str, jax.Array], ...]
    lengths: jax.Array


class RMSNorm(nnx.Module):
    """``weight * x / sqrt(mean(x^2) + eps)`` over the last axis, float32 inside."""

    def __init__(self, weight: Float[Array, "*n h"], eps: float):
        """Make a norm of `weight` ``[h]``, or ``[n, h]`` where each head has its own."""
        self.weight = nnx.Param(weight)
        self.eps = eps

    def __call__(self, x: Float[Array, "... h"]) -> Float[Array, "... h"]:
        """Normalize; the result has the dtype of `x`."""
        wide = x.astype(jnp.float32)
        mean = jnp.mean(jnp.square(wide), axis=-1, keepdims=True)
        normal = (wide * lax.rsqrt(mean + self.eps)).astype(x.dtype)
        weight = self.weight.get_value()
        return normal * jnp.expand_dims(weight, range(x.ndim - weight.ndim))


class SideBySide(nnx.Module):
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
        self.gate_up = SideBySide(
            gate=linear(weights, f"{prefix}.gate_proj", intermediate, hidden, settings),
            up=linear(weights, f"{prefix}.up_proj", intermediate, hidden, settings),
        )
        self.down = linear(weights, f"{prefix}.down_proj", hidden, intermediate, settings)

    def __call__(self, x: Float[Array, "... h"]) -> Float[Array, "... h"]:
        """Run the three products; the activation is float32."""
        gate, up = jnp.split(self.gate_up(x).astype(jnp.float32), 2, axis=-1)
        return self.down((jax.nn.silu(gate) * up).astype(x.dtype))


class DecoderLayer(nnx.Module):
    """Attention and feed-forward, each on normalized input and added to the residual stream."""

    def __init__(self, attention_norm: RMSNorm, attention, mlp_norm: RMSNorm, mlp):
        """Make a layer of its four parts."""
        self.attention_norm, self.attention = attention_norm, attention
        self.mlp_norm, self.mlp = mlp_norm, mlp

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
      layers: of `DecoderLayer`.
    """

    def __init__(
        self,
        config,
        embedding: Float[Array, "v h"],
        layers: Sequence[DecoderLayer],
        norm: RMSNorm,
        head: Callable | None,
        settings: Settings,
    ):
        """Make a model; `head` None shares the embedding (tied)."""
        self.config = config
        self.dtype = jnp.dtype(settings.dtype)
        self.embedding = nnx.Param(embedding)
        self.layers = nnx.List(list(layers))
        self.norm = norm
        self.head = head

    def init_cache(self, batch: int, max_length: int) -> Cache:
        """Return an empty cache for `batch` rows of up to `max_length` tokens.

        Raises:
          ValueError: a size is not positive.
        """
        if batch < 1 or max_length < 1:
            raise ValueError(f"cache: expected positive sizes, got {batch} rows of {max_length}")
        layers = tuple(
            {
                name: jnp.zeros((batch, heads, max_length, width), self.dtype)
                for name, (heads, width) in layer.attention.cache_shapes().items()
            }
            for layer in self.layers
        )
        return Cache(layers, jnp.zeros(batch, jnp.int32))

    def __call__(
        self,
        input_ids: Int32[Array, "b t"],
        cache: Cache | None = None,
        *,
        logits_at: Int32[Array, " b"] | None = None,
    ):
        """Return float32 logits ``[b, t, vocab]``, and the extended cache where one is given.

        Args:
          input_ids: not checked: ids lie in the vocabulary.
          cache: each row's t tokens follow its ``lengths`` valid entries, and lengths grow by t.
            Not checked: that they fit; tokens past max_length are dropped.
          logits_at: an index into t for each row: logits of that position alone, ``[b, 1, vocab]``.

        Raises:
          ValueError: a shape or dtype is wrong.
        """
        _check_call(input_ids, cache)
        b, t = input_ids.shape
        start = jnp.zeros(b, jnp.int32) if cache is None else cache.lengths
        positions = start[:, None] + jnp.arange(t, dtype=jnp.int32)[None, :]
        x = self.embedding.get_value()[input_ids]
        entries = []
        for index, layer in enumerate(self.layers):
            with jax.named_scope(f"layer_{index}"):
                x, entry = layer(x, positions, None if cache is None else cache.layers[index])
            entries.append(entry)
        if logits_at is not None:
            x = jnp.take_along_axis(x, logits_at[:, None, None], axis=1)
        logits = self._logits(self.norm(x))
        return logits if cache is None else (logits, Cache(tuple(entries), start + t))

    def _logits(self, x):
        with jax.named_scope("head"):
            if self.head is None:
                return dense(x, self.embedding.get_value())
            if isinstance(self.head, DenseLinear) and self.head.bias is None:
                return dense(x, self.head.weight.get_value())
            return self.head(x).astype(jnp.float32)

    def nvfp4_problems(self):
        """Return what each NVFP4 module asks of a backend, for `explain`."""
        found: list[ModuleProblem] = list(find_problems(self))
        return found


def _check_call(input_ids, cache):
    if input_ids.ndim != 2 or not jnp.issubdtype(input_ids.dtype, jnp.integer):
        raise ValueError(
            f"input_ids: expected integers [b, t], got {input_ids.dtype.name} {input_ids.shape}"
        )
    if cache is None:
        return
    rows, _, length, _ = jax.tree.leaves(cache.layers)[0].shape
    if input_ids.shape[0] != rows or input_ids.shape[1] > length:
        raise ValueError(
            f"input_ids: expected [{rows}, t] with t of at most {length}, as the cache has; "
            f"got {input_ids.shape}"
        )


def linear(weights, prefix: str, n: int, k: int, settings: Settings, bias: bool | None = False):
    """Make the linear `prefix` ``[n, k]``, quantized or dense as the file has it."""
    found: LinearWeights = weights.linear(prefix, n, k, bias=bias)
    if found.declared is None:
        return DenseLinear(found.weight, found.bias, dtype=settings.dtype)
    return NVFP4Linear(
        k,
        n,
        weight=found.weight,
        bias=found.bias,
        input_scale=found.input_scale,
        declared=found.declared,
        **settings.module_arguments(),
    )


def norm(weights, prefix: str, width: int, eps: float) -> RMSNorm:
    """Make the norm `prefix` of `width` channels."""
    return RMSNorm(weights.array(f"{prefix}.weight", (width,)), eps)


def build_decoder(config, weights, settings: Settings, attention, build_moe) -> Decoder:
    """Make a model of the usual shape, layer by layer, under the usual names.

    Args:
      config: also has `dense_layers`, `dense_intermediate` and `tied`.
      weights: the source of `checkpoint.resolve`.
      settings: how modules are made.
      attention: class of the attention, ``(config, weights, prefix, settings)``.
      build_moe: ``(config, layer, weights, settings)`` makes the expert block of a layer.
    """
    h, eps = config.hidden, config.eps
    embedding = weights.array("model.embed_tokens.weight", (config.vocab_size, h))
    layers = []
    for layer in range(config.num_layers):
        prefix = f"model.layers.{layer}"
        if layer in config.dense_layers:
            mlp = GatedMLP(weights, f"{prefix}.mlp", h, config.dense_intermediate, settings)
        else:
            mlp = build_moe(config, layer, weights, settings)
        layers.append(
            DecoderLayer(
                norm(weights, f"{prefix}.input_layernorm", h, eps),
                attention(config, weights, f"{prefix}.self_attn", settings),
                norm(weights, f"{prefix}.post_attention_layernorm", h, eps),
                mlp,
            )
        )
    final = norm(weights, "model.norm", h, eps)
    head = None
    if config.tied:
        weights.ignore("lm_head.", "the head shares the embedding")
    else:
        head = linear(weights, "lm_head", config.vocab_size, h, settings)
    return Decoder(config, embedding, layers, final, head, settings)


def rotate(x: Float[Array, "b t n d"], positions: Int32[Array, "b t"], rope: Rope):
    """Rotate channel pairs ``(i, i + d/2)`` by ``position * frequency_i``, in float32."""
    angles = positions.astype(jnp.float32)[..., None] * jnp.asarray(
        rope.frequencies, jnp.float32
    ).reshape(1, 1, -1)
    cos, sin = (f(angles)[:, :, None, None, :] * rope.scale for f in (jnp.cos, jnp.sin))
    # Halves are turned over rather than concatenated, so that XLA fuses this into what reads it.
    halves = x.astype(jnp.float32).reshape(*x.shape[:-1], 2, -1)
    signs = jnp.array([-1.0, 1.0], jnp.float32).reshape(1, 1, 1, 2, 1)
    rotated = halves * cos + jnp.flip(halves, axis=-2) * (signs * sin)
    return rotated.reshape(x.shape).astype(x.dtype)


def append(entries, positions: Int32[Array, "b t"], **new: Float[Array, "b t m d"]):
    """Write `new` into the cache `entries` at `positions`; those past the end are dropped.

    Returns:
      The arrays ``[b, m, s, d]`` to attend to, all entries or without a cache just `new`, and the
      entries.
    """
    if entries is None:
        return {name: jnp.moveaxis(value, 1, 2) for name, value in new.items()}, None
    row = jnp.arange(positions.shape[0])[:, None, None]
    written = {}
    for name, value in new.items():
        # An index for each head: XLA turns a scatter of one index into copies of all entries.
        place = entries[name].at[row, jnp.arange(value.shape[2]), positions[:, :, None]]
        put = place.set(value, mode="drop", unique_indices=True)
        # For one row XLA would keep keys transposed in its loops, and copy them at each call.
        written[name] = with_layout_constraint(put, Layout((0, 1, 2, 3)))
    return written, written


def attend(
    q: Float[Array, "b t n d"],
    k: Float[Array, "b m s d"],
    v: Float[Array, "b m s dv"],
    positions: Int32[Array, "b t"],
    scale: float,
) -> Float[Array, "b t n dv"]:
    """Attend causally: the query at position p sees keys 0 to p; softmax in float32.

    ``y = softmax(scale * q @ k.T) @ v`` for each head, n / m query heads to a key head.
    """
    b, t = positions.shape
    if t <= _QUERIES:
        return _attend(q, k, v, positions, scale)
    padded = -(-t // _QUERIES) * _QUERIES

    def split(x):
        x = jnp.pad(x, [(0, 0), (0, padded - t)] + [(0, 0)] * (x.ndim - 2))
        return jnp.moveaxis(x.reshape(b, -1, _QUERIES, *x.shape[2:]), 1, 0)

    y = lax.map(
        lambda piece: _attend(piece[0], k, v, piece[1], scale), (split(q), split(positions))
    )
    return jnp.moveaxis(y, 0, 1).reshape(b, padded, *y.shape[3:])[:, :t]


def _attend(q, k, v, positions, scale):
    """Attend with all queries at once; every product is a batch over rows and key heads."""
    (b, t, n, d), (m, s) = q.shape, k.shape[1:3]
    grouped = jnp.moveaxis(q.reshape(b, t, m, n // m, d), 1, 3)
    scores = _batched(grouped, k, 3)
    visible: Bool[Array, "b t s"] = jnp.arange(s)[None, None, :] <= positions[:, :, None]
    scores = jnp.where(visible[:, None, None], scores * scale, -jnp.inf)
    weights = jax.nn.softmax(scores, axis=-1).astype(v.dtype)
    y = _batched(weights, v, 2).astype(q.dtype)
    return jnp.moveaxis(y, 3, 1).reshape(b, t, n, v.shape[-1])


def _batched(x, y, contracted):
    """Return the float32 products of ``x [b, m, g, t, k]`` and `y` over its axis `contracted`."""
    return lax.dot_general(
        x,
        y,
        (((4,), (contracted,)), ((0, 1), (0, 1))),
        precision=precision_for(x.dtype),
        preferred_element_type=jnp.float32,
    )
