"""Llama 2 and 3.

They have grouped-query attention; Llama 3.1 and later stretch the rotation for long texts.

Source: `modeling_llama` of transformers; arXiv:2407.21783.
"""

from collections.abc import Mapping
from typing import Any

from jax_nvfp4_moe.models.config import Fields
from jax_nvfp4_moe.models.dense import DenseConfig, architecture, read_dense
from jax_nvfp4_moe.models.grouped_query_config import read_grouped_query

_EPS = 1e-6


def read_config(config: Mapping[str, Any]) -> DenseConfig:
    """Read a parsed ``config.json``.

    Raises:
      CheckpointError: lists all values that are missing, wrong or not supported.
    """
    fields = Fields(config)
    bias = fields.flag("attention_bias", False)
    fields.only("mlp_bias", (False,), False)
    attention = read_grouped_query(fields, config, eps=_EPS, bias=bias, out_bias=bias)
    return read_dense(fields, attention, eps=_EPS)


ARCHITECTURE = architecture(read_config)
