"""GLM-4.5V and GLM-4.6V, the language model.

It is a GLM-4.5 whose heads are not normalized. The multimodal rotary embedding (``mrope_section``)
divides the channels among positions in time, height and width. For text these three positions are
equal, so that the embedding is the usual one.

Source: `modeling_glm4v_moe` of transformers; arXiv:2507.01006.
"""

from collections.abc import Mapping
from typing import Any

from jax_nvfp4_moe.models import glm4_moe
from jax_nvfp4_moe.models.decoder import Architecture
from jax_nvfp4_moe.models.sparse import SparseConfig


def read_config(config: Mapping[str, Any]) -> SparseConfig:
    """Read a parsed ``config.json``, its ``text_config`` at the top level.

    Raises:
      CheckpointError: lists all values that are missing, wrong or not supported.
    """
    bias = config.get("attention_bias")
    return glm4_moe.read_config({**config, "attention_bias": True if bias is None else bias})


ARCHITECTURE = Architecture(read_config, glm4_moe.build_model, glm4_moe.build_moe, glm4_moe.KEYS)
