"""Qwen3.5-MoE and Qwen3.6-MoE, the language model: Qwen3-Next with other names and fewer choices.

All layers have experts, whose weights are renormalized; the gated delta net has one linear for
queries, keys and values and one each for z, beta and the decay. Of multimodal rotary embedding
(``mrope_section``) nothing is left for text, whose three positions are one and the same.

Source: `modeling_qwen3_5_moe` of transformers.
"""

from collections.abc import Mapping
from typing import Any

from jax_nvfp4_moe.models import qwen3_next
from jax_nvfp4_moe.models.config import Fields
from jax_nvfp4_moe.models.decoder import Architecture


def read_config(config: Mapping[str, Any]) -> qwen3_next.Qwen3NextConfig:
    """Read a parsed ``config.json``, its ``text_config`` at the top level.

    Raises:
      CheckpointError: lists all values that are missing, wrong or not supported.
    """
    return qwen3_next.read_sizes(Fields(config), config, dense_layers=frozenset(), renormalize=True)


ARCHITECTURE = Architecture(
    read_config, qwen3_next.build_model, qwen3_next.build_moe, qwen3_next.KEYS
)
