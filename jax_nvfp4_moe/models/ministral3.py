"""Ministral 3, the language model.

It has grouped-query attention with queries that grow with their position.

Source: `modeling_ministral3` of transformers.
"""

from collections.abc import Mapping
from typing import Any

from jax_nvfp4_moe.models.config import Fields, find_rope_fields
from jax_nvfp4_moe.models.dense import DenseConfig, architecture, read_dense
from jax_nvfp4_moe.models.grouped_query_config import read_grouped_query, read_window
from jax_nvfp4_moe.models.mistral4 import read_temperature

_EPS = 1e-5
_YARN = {
    "rope_type": "yarn",
    "rope_theta": 1000000.0,
    "factor": 16.0,
    "original_max_position_embeddings": 16384,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale_all_dim": 1.0,
    "mscale": 1.0,
    "llama_4_scaling_beta": 0.1,
}


def read_config(config: Mapping[str, Any]) -> DenseConfig:
    """Read a parsed ``config.json`` with the values of ``text_config`` at its top level.

    Raises:
      CheckpointError: lists all values that are missing, wrong or not supported.
    """
    if not find_rope_fields(config):
        config = {**config, "rope_parameters": _YARN}
    fields = Fields(config)
    attention = read_grouped_query(
        fields,
        config,
        eps=_EPS,
        head_dim=128,
        key_heads=8,
        window=read_window(fields),
        temperature=read_temperature(fields, config),
    )
    return read_dense(fields, attention, eps=_EPS)


ARCHITECTURE = architecture(read_config)
