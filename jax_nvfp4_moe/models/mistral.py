"""Mistral, the dense models.

They have grouped-query attention, in the first models over a window.

Source: `modeling_mistral` of transformers; arXiv:2310.06825.
"""

from collections.abc import Mapping
from typing import Any

from jax_nvfp4_moe.models.config import Fields
from jax_nvfp4_moe.models.dense import DenseConfig, architecture, read_dense
from jax_nvfp4_moe.models.grouped_query_config import read_grouped_query, read_window

_EPS = 1e-6
_WINDOW = 4096  # where the config does not have the field


def read_config(config: Mapping[str, Any]) -> DenseConfig:
    """Read a parsed ``config.json``.

    Raises:
      CheckpointError: lists all values that are missing, wrong or not supported.
    """
    fields = Fields(config)
    window = read_window(fields) if "sliding_window" in config else _WINDOW
    attention = read_grouped_query(fields, config, eps=_EPS, key_heads=8, window=window)
    return read_dense(fields, attention, eps=_EPS)


ARCHITECTURE = architecture(read_config)
