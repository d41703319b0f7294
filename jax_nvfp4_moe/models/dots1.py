"""dots.llm1.

It has grouped-query attention with normalized heads, and the expert block of DeepSeek-V3.

Source: `modeling_dots1` of transformers; arXiv:2506.05767.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

from jax_nvfp4_moe.models import glm4_moe
from jax_nvfp4_moe.models.config import Fields
from jax_nvfp4_moe.models.decoder import Architecture
from jax_nvfp4_moe.models.grouped_query_config import read_grouped_query, read_window
from jax_nvfp4_moe.models.sparse import (
    SparseConfig,
    read_grouped_router,
    read_leading_dense,
    read_sparse,
)

_EXPERTS = ("n_routed_experts", "num_local_experts")
_EPS = 1e-6
_SLIDING, _FULL = "sliding_attention", "full_attention"
_WINDOW = 4096  # where the config does not have the field


def read_config(config: Mapping[str, Any]) -> SparseConfig:
    """Read a parsed ``config.json``.

    Raises:
      CheckpointError: lists all values that are missing, wrong or not supported.
    """
    # Published files call their sigmoid scores by the name of the method that corrects them.
    own = config.get("scoring_func")
    config = {**config, "scoring_func": "sigmoid" if own == "noaux_tc" else own}
    fields = Fields(config)
    return read_sparse(
        fields,
        _read_attentions(fields, config),
        dataclasses.replace(
            read_grouped_router(fields, *_EXPERTS),
            renormalize=fields.flag("norm_topk_prob", False),
        ),
        eps=_EPS,
        experts=_EXPERTS,
        intermediate="moe_intermediate_size",
        dense_layers=read_leading_dense(fields, 0),
        shared_experts=fields.size("n_shared_experts"),
    )


def _read_attentions(fields, config):
    """Return the sizes of the attention of each layer.

    Without ``layer_types``, the layers from ``max_window_layers`` on have a window.
    """
    window = read_window(fields) if "sliding_window" in config else _WINDOW
    first = fields.count("max_window_layers", 62)
    default = [
        _FULL if window is None or layer < first else _SLIDING
        for layer in range(fields.size("num_hidden_layers"))
    ]
    types = fields.layer_types((_SLIDING, _FULL), default)
    fields.relate(
        window is not None or _SLIDING not in types,
        "sliding_window: null, but layer_types has sliding_attention",
    )
    bias = fields.flag("attention_bias", False)
    options = {"bias": bias, "out_bias": bias, "normalize": "heads"}
    full = read_grouped_query(fields, config, eps=_EPS, **options)
    sliding = dataclasses.replace(full, window=window)
    return tuple(sliding if kind == _SLIDING else full for kind in types)


ARCHITECTURE = Architecture(read_config, glm4_moe.build_model, glm4_moe.build_moe, glm4_moe.KEYS)
