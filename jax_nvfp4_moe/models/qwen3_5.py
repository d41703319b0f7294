"""Qwen3.5 and Qwen3.6 without experts, the language model.

The mixers are those of Qwen3.5-MoE: every fourth layer has a gated attention, and the others have a
gated delta net. Each layer has one gated MLP.

Source: `modeling_qwen3_5` of transformers.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

from jax_nvfp4_moe.models import qwen3_next
from jax_nvfp4_moe.models.config import Fields
from jax_nvfp4_moe.models.decoder import Decoder, build_decoder
from jax_nvfp4_moe.models.dense import KEYS, DenseConfig, architecture, refuse_experts
from jax_nvfp4_moe.models.drafting_layers import MTP, one_layer
from jax_nvfp4_moe.models.keys import delta_keys
from jax_nvfp4_moe.nn.building.builder import Builder
from jax_nvfp4_moe.nn.recurrent.gated_delta_net import DeltaSizes


@dataclasses.dataclass(frozen=True)
class Qwen35Config(DenseConfig):
    """The sizes of a Qwen3.5 model.

    Attributes:
      attention_layers: the indices of layers with an attention. The others have a gated delta net.
      delta: the sizes of the gated delta net.
    """

    attention_layers: frozenset[int]
    delta: DeltaSizes


def read_config(config: Mapping[str, Any]) -> Qwen35Config:
    """Read a parsed ``config.json`` in which the fields of ``text_config`` are at the top level.

    Raises:
      CheckpointError: lists all values that are missing, wrong or not supported.
    """
    fields = Fields(config)
    mixers = qwen3_next.read_mixers(fields, config)
    read = Qwen35Config(**mixers, dense_intermediate=fields.size("intermediate_size"))
    fields.finish()
    return read


def build_model(config: Qwen35Config, make: Builder) -> Decoder:
    """Make the whole model."""
    return build_decoder(config, make, qwen3_next.build_mixer, refuse_experts, centered=True)


_KEYS = {**KEYS, **delta_keys("layers.*.attention", "model.layers.*.linear_attn")}
_DRAFTING = one_layer(
    MTP,
    qwen3_next.build_mixer,
    refuse_experts,
    centered=True,
    dense=True,
    attention_layers=lambda config: frozenset({0}),  # whatever the layers of the model have
)
ARCHITECTURE = architecture(read_config, _KEYS, build_model=build_model, drafting=_DRAFTING)
