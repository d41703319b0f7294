"""ERNIE-4.5-MoE.

The two channels of a rotated pair stand side by side. The router adds a correction bias to softmax
scores for the choice of experts.

Source: `modeling_ernie4_5_moe` of transformers.
"""

from collections.abc import Mapping
from typing import Any

from jax_nvfp4_moe.models.config import Fields
from jax_nvfp4_moe.models.decoder import Architecture, Decoder, build_decoder
from jax_nvfp4_moe.models.grouped_query_config import read_grouped_query
from jax_nvfp4_moe.models.keys import DECODER_KEYS, gated_mlp_keys, gqa_keys, moe_keys
from jax_nvfp4_moe.models.sparse import SparseConfig, build_block, read_sparse
from jax_nvfp4_moe.nn.attention.grouped_query import build_attention
from jax_nvfp4_moe.nn.building.builder import Builder
from jax_nvfp4_moe.nn.experts.moe import NVFP4MoE
from jax_nvfp4_moe.numerics.routing import Router

_EXPERTS = ("moe_num_experts", "num_experts")
_TOP_K = ("moe_k", "num_experts_per_tok")
_EPS, _THETA = 1e-5, 5e5


def read_config(config: Mapping[str, Any]) -> SparseConfig:
    """Read a parsed ``config.json``.

    Raises:
      CheckpointError: lists all values that are missing, wrong or not supported.
    """
    fields = Fields(config)
    # With use_bias the linears of MLPs and shared experts would have biases too. No published model
    # has any.
    fields.only("use_bias", (False,), False)
    attention = read_grouped_query(fields, config, eps=_EPS, theta=_THETA, interleaved=True)
    top_k, total = fields.size(*_TOP_K, default=6), fields.size(*_EXPERTS)
    fields.relate(top_k <= total, f"moe_k: {top_k} of {total} experts")
    return read_sparse(
        fields,
        attention,
        Router(top_k),
        eps=_EPS,
        experts=_EXPERTS,
        intermediate="moe_intermediate_size",
        dense_layers=_read_dense(fields, config),
        shared_experts=fields.count("moe_num_shared_experts", 2),
        tied=True,
    )


def _read_dense(fields, config):
    """Return the layers without experts: outside of a range, or not at one of its steps."""
    layers = fields.size("num_hidden_layers")
    first = fields.count("moe_layer_start_index", 1)
    step = fields.size("moe_layer_interval", default=1)
    end = config.get("moe_layer_end_index")
    last = layers - 1 if end in (None, -1) else fields.count("moe_layer_end_index")
    sparse = (n for n in range(layers) if first <= n <= last and (n + 1) % step == 0)
    return frozenset(range(layers)).difference(sparse)


def build_moe(config: SparseConfig, layer: int, make: Builder) -> NVFP4MoE:
    """Make the expert block of `layer`; raises the errors of `sparse.build_block`."""
    return build_block(config, layer, make, bias=True, stored_bias=(1, config.num_experts))


def build_model(config: SparseConfig, make: Builder) -> Decoder:
    """Make the whole model."""
    return build_decoder(config, make, build_attention, build_moe)


_BLOCK = "model.layers.*.mlp"
KEYS = {
    **DECODER_KEYS,
    **gqa_keys("layers.*.attention", "model.layers.*.self_attn"),
    **gated_mlp_keys("layers.*.mlp", _BLOCK),
    **moe_keys(_BLOCK, bias="moe_statics.e_score_correction_bias", shared="shared_experts"),
}
ARCHITECTURE = Architecture(read_config, build_model, build_moe, KEYS)
