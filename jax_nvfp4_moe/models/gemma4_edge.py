"""Gemma 4 E2B and E4B, the language model.

A second embedding has a vector for each token and layer. Each layer adds this vector, through a
gate, to the residual stream. The last layers have no keys and values: they attend to those of the
last layer before them with the same kind of attention.

Source: `modeling_gemma4` of transformers.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from jax_nvfp4_moe.models.decoder import Decoder, build_around, divide_vocabulary
from jax_nvfp4_moe.models.gemma3 import ACTIVATION, GemmaConfig, GemmaDecoder
from jax_nvfp4_moe.models.post_norms import PostNormLayer, add, build_dense_parts
from jax_nvfp4_moe.nn.attention.grouped_query import build_attention, build_heads
from jax_nvfp4_moe.nn.attention.shared_keys import SharedKeysAttention
from jax_nvfp4_moe.nn.building.builder import Builder
from jax_nvfp4_moe.nn.indexed_tuple import register_indexed
from jax_nvfp4_moe.nn.norm import Residual, RMSNorm
from jax_nvfp4_moe.numerics.activations import activate, find_activation
from jax_nvfp4_moe.numerics.casts import compute

_UNUSED = ("qkv.k", "qkv.v", "k_norm")  # parts that files may have for layers without keys


@dataclasses.dataclass(frozen=True)
class EdgeConfig(GemmaConfig):
    """The sizes of a Gemma 4 model with embeddings of single layers.

    Attributes:
      kinds: the kind of attention of each layer, as ``layer_types`` names it.
      layer_hidden: the size of the embeddings of single layers.
      sharing: the number of last layers without keys of their own.
      wide: whether the MLPs of these layers are twice as wide.
    """

    kinds: tuple[str, ...]
    layer_hidden: int
    sharing: int
    wide: bool

    def shares(self, layer: int) -> bool:
        """Return whether a layer attends to the keys of an earlier one."""
        return layer >= self.num_layers - self.sharing

    def hands_on(self, layer: int) -> bool:
        """Return whether later layers attend to the keys of this one."""
        first = self.num_layers - self.sharing
        later = self.kinds[layer + 1 : first]
        return bool(self.sharing) and layer < first and self.kinds[layer] not in later


@register_indexed
class EdgeStream(NamedTuple):
    """What layers hand on, in rows or packed.

    Attributes:
      x: ``[b, t, h]``, the residual stream.
      inputs: ``[b, t, layers, d]``, the vectors of each token for all layers.
      shared: the kind of a layer -> the keys and values ``[b, m, s, d]`` that later layers of that
        kind attend to.
    """

    x: Float[Array, "b t h"]
    inputs: Float[Array, "b t layers d"]
    shared: Mapping[str, Any]


class LayerInputs(nnx.Module):
    """The vectors of tokens for single layers.

    ``(norm(projection(x) * h ** -0.5) + sqrt(d) * embedding[ids]) * sqrt(0.5)``, where `x` are the
    vectors of the tokens.

    Attributes:
      embedding: ``[v, layers * d]``.
      projection: the linear from `x` to ``[layers * d]``.
      norm: the norm of the projected vector for one layer.
    """

    def __init__(self, config: EdgeConfig, make: Builder, path: str):
        """Make the module, with the rows of one shard of the embedding."""
        width = config.num_layers * config.layer_hidden
        vocabulary, rows, _ = divide_vocabulary(config, make)
        self.embedding = vocabulary.variable(f"{path}.embedding", (rows, width))
        self.projection = make.linear(f"{path}.projection", width, config.hidden)
        self.norm: RMSNorm = make.norm(f"{path}.norm", config.layer_hidden, config.eps)

    def __call__(self, x, embedded):
        """Return the vectors ``[b, t, layers, d]``.

        Args:
          x: ``[b, t, h]``.
          embedded: ``[b, t, layers * d]``, the rows of the embedding.
        """
        width = self.norm.weight.shape[0]
        shape = (*x.shape[:2], embedded.shape[-1] // width, width)
        projected = compute(jnp.multiply, self.projection(x), x.shape[-1] ** -0.5).reshape(shape)
        embedded = embedded * jnp.asarray(width**0.5, embedded.dtype)
        return (self.norm(projected) + embedded.reshape(shape)) * 2.0**-0.5


class LayerGate(nnx.Module):
    """What a layer adds to the residual stream: ``norm(out(gelu(gate(x)) * inputs))``.

    Attributes:
      gate: the linear from the residual stream to ``[d]``.
      out: the linear from ``[d]`` to the residual stream.
      norm: the norm of the result.
    """

    def __init__(self, config: EdgeConfig, make: Builder, path: str):
        """Make the module at `path`."""
        h, d = config.hidden, config.layer_hidden
        self.gate = make.linear(f"{path}.gate", d, h)
        self.out = make.linear(f"{path}.out", h, d)
        self.norm = make.norm(f"{path}.norm", h, config.eps)

    def __call__(self, x, inputs):
        """Return the vectors to add to ``x [b, t, h]``, for ``inputs [b, t, d]``."""
        gate = activate(find_activation("gelu_tanh_no_mul"), self.gate(x)).astype(x.dtype)
        return self.norm(self.out(gate * inputs))


class EdgeLayer(PostNormLayer):
    """A layer that adds a vector of its own for each token, and may share keys.

    Attributes:
      scale: `nnx.Param` ``[1]``, which multiplies the result.
      added: the `LayerGate`.
      index: the index of the layer. Static.
      config: the sizes of the model. Static.
    """

    def __init__(self, config: EdgeConfig, index: int, make: Builder):
        """Build the layer with the index `index`."""
        wide = config.wide and config.shares(index)
        parts = build_dense_parts(
            config,
            index,
            make,
            before=True,
            activation=ACTIVATION,
            build_attention=_build_attention,
            intermediate=config.dense_intermediate * (2 if wide else 1),
        )
        super().__init__(*parts)
        path = f"layers.{index}"
        self.scale = make.variable(f"{path}.scale", (1,))
        self.added = LayerGate(config, make, f"{path}.added")
        self.index, self.config = index, config

    def init_cache(self, batch: int, max_length: int) -> Mapping[str, Array]:
        """Return the empty cache entries of `batch` rows: none for a layer without keys."""
        if self.config.shares(self.index):
            return {}
        return super().init_cache(batch, max_length)

    def __call__(self, stream: EdgeStream, positions, entries) -> tuple[Any, Any]:
        """Run the layer.

        Args:
          stream: what the layer before has handed on.
          positions: int32 ``[b, t]``, the position of each token in its row.
          entries: the layer's cache entries. None runs without a cache.

        Returns:
          An `EdgeStream`, or the `Residual` stream of the last layer, and the cache entries.
        """
        kind, shared = self.config.kinds[self.index], stream.shared
        hands_on = self.config.hands_on(self.index)
        own = entries
        if self.config.shares(self.index):
            own = shared[kind]
        elif entries is None and hands_on:  # the keys that later layers see
            own = self.attention.init_cache(*positions.shape)
        residual, own = super().__call__(Residual(stream.x), positions, own)
        x = add(residual)
        with jax.named_scope("layer_input"):
            x = x + self.added(x, stream.inputs[:, :, self.index])
        x = x * self.scale.get_value()[None, None]
        if hands_on:
            shared = {**shared, kind: self.attention.kv.widen(own)}
        if entries is not None and not self.config.shares(self.index):
            entries = own
        if self.index == self.config.num_layers - 1:
            return Residual(x), entries
        return EdgeStream(x, stream.inputs, shared), entries


def _build_attention(config, layer, make):
    """Make the attention of a layer, with keys of its own or not."""
    if not config.shares(layer):
        return build_attention(config, layer, make)
    path = f"layers.{layer}.attention"
    for part in _UNUSED:
        if make.holds(f"{path}.{part}"):
            make.ignore(
                f"{path}.{part}", "keys and values of layers that attend to those of others"
            )
    return build_heads(config.attention[layer], path, make, SharedKeysAttention)


class EdgeDecoder(GemmaDecoder):
    """A decoder with a second embedding, of which each layer reads a part.

    Attributes:
      layer_inputs: makes the vectors of tokens for single layers.
    """

    opening_parts = ("layer_inputs",)
    layer_inputs: LayerInputs

    def open_stream(self, table, input_ids) -> EdgeStream:
        """Return what enters the first layer."""
        x, embedding = self.embed(table, input_ids), self.layer_inputs.embedding
        found = self._look_up(embedding, embedding.get_value(), input_ids)
        return EdgeStream(x, self.layer_inputs(x, found), {})


def build_edge_model(config: EdgeConfig, make: Builder) -> Decoder:
    """Make the whole model."""

    def build_layer(layer):
        return EdgeLayer(config, layer, make)

    model = build_around(config, make, build_layer, tied=config.tied, decoder=EdgeDecoder)
    assert isinstance(model, EdgeDecoder)
    model.layer_inputs = LayerInputs(config, make, "layer_inputs")
    return model


_LAYER = "model.layers.*"
EDGE_KEYS = {
    "layers.*.attention.q": f"{_LAYER}.self_attn.q_proj",
    "layers.*.added.gate": f"{_LAYER}.per_layer_input_gate",
    "layers.*.added.out": f"{_LAYER}.per_layer_projection",
    "layers.*.added.norm": f"{_LAYER}.post_per_layer_input_norm",
    "layer_inputs.embedding": "model.embed_tokens_per_layer.weight",
    "layer_inputs.projection": "model.per_layer_model_projection",
    "layer_inputs.norm": "model.per_layer_projection_norm",
}
