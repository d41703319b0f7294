"""Qwen3.5-MoE and Qwen3.6-MoE, the language model.

It is a variant of Qwen3-Next, and differs from it in these points:

* All layers have experts, and the weights of the chosen experts always add up to 1.
* The gated delta net has one linear for queries, keys and values, and separate linears for z, beta
  and the decay.
* The config has a multimodal rotary embedding (``mrope_section``). For text, its three positions
  are equal, so that it is an ordinary rotary embedding.

Source: `modeling_qwen3_5_moe` of transformers.
"""

from collections.abc import Mapping
from typing import Any

from jax_nvfp4_moe.models import qwen3_next
from jax_nvfp4_moe.models.config import Fields
from jax_nvfp4_moe.models.decoder import Architecture


def read_config(config: Mapping[str, Any]) -> qwen3_next.Qwen3NextConfig:
    """Read a parsed ``config.json`` in which the fields of ``text_config`` are at the top level.

    Raises:
      CheckpointError: lists all values that are missing, wrong or not supported.
    """
    return qwen3_next.read_sizes(Fields(config), config, dense_layers=frozenset(), renormalize=True)


ARCHITECTURE = Architecture(
    read_config,
    qwen3_next.build_model,
    qwen3_next.build_moe,
    qwen3_next.KEYS,
    drafting=qwen3_next.DRAFTING,
)
