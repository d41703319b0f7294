"""Seed-OSS.

It has grouped-query attention with biases at queries, keys and values.

Source: `modeling_seed_oss` of transformers.
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
    fields.only("mlp_bias", (False,), False)
    attention = read_grouped_query(
        fields,
        config,
        eps=_EPS,
        head_dim=128,
        key_heads=8,
        bias=fields.flag("attention_bias", True),
        out_bias=fields.flag("attention_out_bias", False),
    )
    return read_dense(fields, attention, eps=_EPS)


ARCHITECTURE = architecture(read_config)
