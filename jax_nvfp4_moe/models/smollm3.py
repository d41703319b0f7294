"""SmolLM3.

It has grouped-query attention, in every fourth layer without rotation.

Source: `modeling_smollm3` of transformers; arXiv:2501.18795 for the layers without rotation.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

from jax_nvfp4_moe.models.config import Fields
from jax_nvfp4_moe.models.dense import DenseConfig, architecture, read_dense
from jax_nvfp4_moe.models.grouped_query_config import read_grouped_query, read_window

_EPS = 1e-6
_SLIDING, _FULL = "sliding_attention", "full_attention"


def read_config(config: Mapping[str, Any]) -> DenseConfig:
    """Read a parsed ``config.json``.

    Raises:
      CheckpointError: lists all values that are missing, wrong or not supported.
    """
    config = {"num_key_value_heads": 4, **config}
    fields = Fields(config)
    bias = fields.flag("attention_bias", False)
    fields.only("mlp_bias", (False,), False)
    attention = read_grouped_query(fields, config, eps=_EPS, theta=2e6, bias=bias, out_bias=bias)
    rotates = _read_rotated(fields)
    windows = _read_windows(fields, rotates)
    layers = tuple(
        dataclasses.replace(attention, rope=attention.rope if rotated else None, window=window)
        for rotated, window in zip(rotates, windows, strict=True)
    )
    return read_dense(fields, layers, eps=_EPS, tied=True)


def _read_rotated(fields) -> tuple[bool, ...]:
    """Return whether each layer rotates queries and keys.

    Despite its name, ``no_rope_layers`` stores 1 for a layer that does.
    """
    layers, given = fields.size("num_hidden_layers"), fields.indices("no_rope_layers")
    interval = fields.size("no_rope_layer_interval", default=4)
    if not given:
        return tuple((layer + 1) % interval != 0 for layer in range(layers))
    fields.require(
        len(given) >= layers, f"no_rope_layers: expected {layers} integers, got {len(given)}"
    )
    return tuple(bool(one) for one in (*given, *[1] * layers)[:layers])


def _read_windows(fields, rotates) -> tuple[int | None, ...]:
    """Return the window of each layer, None for a layer that sees all keys.

    Without ``layer_types``, the layers without rotation have the window, if there is one.
    """
    window = read_window(fields) if fields.flag("use_sliding_window", False) else None
    default = [_FULL if rotated or window is None else _SLIDING for rotated in rotates]
    types = fields.layer_types((_SLIDING, _FULL), default)
    fields.relate(
        window is not None or _SLIDING not in types,
        "layer_types: sliding_attention expects use_sliding_window and a sliding_window",
    )
    return tuple(window if kind == _SLIDING else None for kind in types)


ARCHITECTURE = architecture(read_config)
