"""Solar Open.

It has grouped-query attention, and the expert block of DeepSeek-V3 in every layer.

Source: `modeling_solar_open` of transformers.
"""

from collections.abc import Mapping
from typing import Any

from jax_nvfp4_moe.models import glm4_moe
from jax_nvfp4_moe.models.config import Fields
from jax_nvfp4_moe.models.decoder import Architecture
from jax_nvfp4_moe.models.grouped_query_config import read_grouped_query
from jax_nvfp4_moe.models.keys import DECODER_KEYS, gqa_keys, moe_keys
from jax_nvfp4_moe.models.sparse import SparseConfig, read_grouped_router, read_sparse

_EXPERTS = ("n_routed_experts", "num_local_experts")
_EPS, _THETA = 1e-5, 1e6


def read_config(config: Mapping[str, Any]) -> SparseConfig:
    """Read a parsed ``config.json``.

    Raises:
      CheckpointError: lists all values that are missing, wrong or not supported.
    """
    fields = Fields(config)
    # GLM-4.5 reads these fields too. Here, transformers does not.
    fields.only("use_qk_norm", (False,), False)
    fields.only("first_k_dense_replace", (0,), 0)
    attention = read_grouped_query(
        fields,
        config,
        eps=_EPS,
        theta=_THETA,
        head_dim=128,
        bias=fields.flag("attention_bias", False),
    )
    return read_sparse(
        fields,
        attention,
        read_grouped_router(fields, *_EXPERTS),
        eps=_EPS,
        experts=_EXPERTS,
        intermediate="moe_intermediate_size",
        shared_experts=fields.count("n_shared_experts", 1),
    )


KEYS = {
    **DECODER_KEYS,
    **gqa_keys("layers.*.attention", "model.layers.*.self_attn"),
    **moe_keys("model.layers.*.mlp", bias="gate.e_score_correction_bias", shared="shared_experts"),
}
ARCHITECTURE = Architecture(read_config, glm4_moe.build_model, glm4_moe.build_moe, KEYS)
