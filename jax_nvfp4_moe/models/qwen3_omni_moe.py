"""Qwen3-Omni, the language model of the thinker.

It is a Qwen3-MoE with the multimodal rotary embedding of Qwen3-VL-MoE, which is the usual one for
text. The talker, which makes speech, is not loaded.

Source: `modeling_qwen3_omni_moe` of transformers; arXiv:2509.17765.
"""

from collections.abc import Mapping
from typing import Any

from jax_nvfp4_moe.models import qwen3_moe
from jax_nvfp4_moe.models.config import Fields
from jax_nvfp4_moe.models.decoder import Architecture
from jax_nvfp4_moe.models.qwen3_vl_moe import read_text
from jax_nvfp4_moe.models.sparse import SparseConfig

_THETA = 1e6


def read_config(config: Mapping[str, Any]) -> SparseConfig:
    """Read a parsed ``config.json``, the ``text_config`` of the thinker at the top level.

    Raises:
      CheckpointError: lists all values that are missing, wrong or not supported.
    """
    fields = Fields(config)
    renormalize = fields.flag("norm_topk_prob", True)
    return read_text(fields, config, theta=_THETA, renormalize=renormalize)


ARCHITECTURE = Architecture(read_config, qwen3_moe.build_model, qwen3_moe.build_moe, qwen3_moe.KEYS)
