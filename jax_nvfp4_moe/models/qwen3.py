"""Qwen2, Qwen2.5 and Qwen3, the dense models.

Qwen2 has biases at queries, keys and values. Qwen3 normalizes the heads of queries and keys.

Source: `modeling_qwen2` and `modeling_qwen3` of transformers; arXiv:2407.10671, arXiv:2505.09388.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

from jax_nvfp4_moe.models.config import Fields
from jax_nvfp4_moe.models.dense import DenseConfig, architecture, read_dense
from jax_nvfp4_moe.models.grouped_query_config import read_grouped_query

_EPS = 1e-6
_SLIDING, _FULL = "sliding_attention", "full_attention"


def read_qwen2(config: Mapping[str, Any]) -> DenseConfig:
    """Read a parsed ``config.json`` of Qwen2.

    Raises:
      CheckpointError: lists all values that are missing, wrong or not supported.
    """
    return _read(Fields(config), config, bias=True)


def read_qwen3(config: Mapping[str, Any]) -> DenseConfig:
    """Read a parsed ``config.json`` of Qwen3; raises as `read_qwen2`."""
    fields = Fields(config)
    bias = fields.flag("attention_bias", False)
    options = {"bias": bias, "out_bias": bias, "normalize": "heads", "head_dim": 128}
    return _read(fields, config, **options)


def _read(fields, config, **options):
    """Read the sizes; `options` are those of `read_grouped_query`."""
    attention = read_grouped_query(fields, config, eps=_EPS, **options)
    windows = _read_windows(fields, fields.size("num_hidden_layers"))
    layers = tuple(dataclasses.replace(attention, window=window) for window in windows)
    return read_dense(fields, layers, eps=_EPS)


def _read_windows(fields, layers):
    """Return the window of each layer, None for a layer that sees all keys.

    Without ``layer_types``, the layers from ``max_window_layers`` on have a window.
    """
    if not fields.flag("use_sliding_window", False):
        return (None,) * layers
    first = fields.count("max_window_layers", 28)
    default = [_FULL if layer < first else _SLIDING for layer in range(layers)]
    types = fields.layer_types((_SLIDING, _FULL), default)
    window = fields.size("sliding_window", default=4096)
    return tuple(window if kind == _SLIDING else None for kind in types)


QWEN2 = architecture(read_qwen2)
QWEN3 = architecture(read_qwen3)
