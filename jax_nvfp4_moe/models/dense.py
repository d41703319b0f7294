"""What dense decoders share: their sizes, and how a model of them is built."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from jax_nvfp4_moe.models.config import Fields
from jax_nvfp4_moe.models.decoder import Architecture, Decoder, build_decoder
from jax_nvfp4_moe.models.keys import DECODER_KEYS, gated_mlp_keys, gqa_keys
from jax_nvfp4_moe.models.sparse import ACTIVATIONS
from jax_nvfp4_moe.nn.attention.grouped_query import build_attention
from jax_nvfp4_moe.nn.building.builder import Builder


@dataclasses.dataclass(frozen=True)
class DenseConfig:
    """The sizes of a model with attention and one gated MLP in each layer.

    Attributes:
      vocab_size: the number of token ids.
      hidden: the size of the residual stream.
      num_layers: the number of layers.
      max_positions: the number of positions that the model was trained for.
      eps: the epsilon of the norms.
      attention: the sizes and options of the attention, as the attention module reads them. It is
        a tuple with one element for each layer if layers differ.
      dense_intermediate: the intermediate size of the MLPs.
      tied: whether the head shares the weights of the embedding.
    """

    vocab_size: int
    hidden: int
    num_layers: int
    max_positions: int
    eps: float
    attention: Any
    dense_intermediate: int
    tied: bool

    @property
    def dense_layers(self) -> range:
        """The indices of layers without experts, which are all."""
        return range(self.num_layers)


def read_dense(
    fields: Fields,
    attention: Any,
    *,
    eps: float,
    tied: bool = False,
    activation: str | None = None,
) -> DenseConfig:
    """Read the sizes that all these models store under the same names, and return all sizes.

    Args:
      fields: the fields of ``config.json``.
      attention: the sizes of the attention, which the caller has read.
      eps: the default epsilon of the norms.
      tied: the default of ``tie_word_embeddings``.
      activation: the activation, if the caller has read it. None reads ``hidden_act``, which must
        be SiLU.

    Raises:
      CheckpointError: lists all values that are missing, wrong or not supported.
    """
    if activation is None:
        fields.only("hidden_act", ACTIVATIONS, "silu")
    read = DenseConfig(
        vocab_size=fields.size("vocab_size"),
        hidden=fields.size("hidden_size"),
        num_layers=fields.size("num_hidden_layers"),
        max_positions=fields.positions(),
        eps=fields.number("rms_norm_eps", eps),
        attention=attention,
        dense_intermediate=fields.size("intermediate_size"),
        tied=fields.flag("tie_word_embeddings", tied),
    )
    fields.finish()
    return read


def refuse_experts(config: Any, layer: int, make: Builder):
    """Refuse to make the expert block of a layer.

    Raises:
      ValueError: always, because no layer has experts.
    """
    del make
    raise ValueError(
        f"layer: expected a layer with experts, and none of the {config.num_layers} layers of this "
        f"dense model has any; got {layer}. Load the whole model with load_model"
    )


def build_model(config: DenseConfig, make: Builder) -> Decoder:
    """Make the whole model."""
    return build_decoder(config, make, build_attention, refuse_experts)


KEYS = {
    **DECODER_KEYS,
    **gqa_keys("layers.*.attention", "model.layers.*.self_attn"),
    **gated_mlp_keys("layers.*.mlp", "model.layers.*.mlp"),
}


def architecture(read_config: Any, keys: Mapping[str, Any] = KEYS) -> Architecture:
    """Return the row of a dense architecture.

    Args:
      read_config: takes a parsed ``config.json`` and returns the `DenseConfig`.
      keys: the key table.
    """
    return Architecture(read_config, build_model, refuse_experts, keys)
