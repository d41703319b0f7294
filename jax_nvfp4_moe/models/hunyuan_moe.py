"""Hunyuan-MoE (A13B).

Queries and keys are normalized after the rotation, and each layer has a shared expert.

Source: `modeling_hunyuan_v1_moe` of transformers.
"""

from collections.abc import Mapping
from typing import Any

from jax_nvfp4_moe.checkpoint.errors import quoted
from jax_nvfp4_moe.models.config import Fields
from jax_nvfp4_moe.models.decoder import Architecture, Decoder, build_decoder
from jax_nvfp4_moe.models.grouped_query_config import read_grouped_query
from jax_nvfp4_moe.models.keys import DECODER_KEYS, gqa_keys, moe_keys
from jax_nvfp4_moe.models.sparse import SparseConfig, build_block, read_sparse
from jax_nvfp4_moe.nn.attention.grouped_query import build_attention
from jax_nvfp4_moe.nn.building.builder import Builder
from jax_nvfp4_moe.nn.experts.moe import NVFP4MoE
from jax_nvfp4_moe.numerics.routing import Router

_EXPERTS = ("num_experts", "num_local_experts")
_TOP_K = ("moe_topk", "num_experts_per_tok")
_EPS = 1e-5
# Numbers that published files give as a list with one number for each layer.
_LISTED = ("num_experts", "moe_topk", "moe_intermediate_size", "num_shared_expert")


def read_config(config: Mapping[str, Any]) -> SparseConfig:
    """Read a parsed ``config.json``.

    Raises:
      CheckpointError: lists all values that are missing, wrong or not supported.
    """
    config, problems = _without_lists(config)
    fields = Fields(config)
    fields.problems += problems
    fields.only("use_cla", (False,), False)
    fields.only("moe_layer_num_skipped", (0,), 0)
    bias = fields.flag("attention_bias", False)
    attention = read_grouped_query(
        fields,
        _with_theta(fields, config),
        eps=_EPS,
        bias=bias,
        out_bias=bias,
        normalize="rotated" if fields.flag("use_qk_norm", True) else None,
    )
    top_k, total = fields.size(*_TOP_K, default=1), fields.size(*_EXPERTS)
    fields.relate(top_k <= total, f"moe_topk: {top_k} of {total} experts")
    return read_sparse(
        fields,
        attention,
        Router(top_k),
        eps=_EPS,
        experts=_EXPERTS,
        intermediate="intermediate_size",
        shared_experts=fields.count("num_shared_expert", 1),
    )


def _without_lists(config):
    """Return the config with one number for each list of equal numbers, and a list of problems."""
    plain, problems = dict(config), []
    for name in _LISTED:
        value = config.get(name)
        if isinstance(value, list) and value:
            plain[name] = value[0]
            if any(one != value[0] for one in value):
                problems.append(
                    f"config.json: {name}: layers that differ are not supported, got "
                    f"{quoted(value)}"
                )
    width = plain.get("moe_intermediate_size")
    if width not in (None, plain.get("intermediate_size")):
        problems.append(
            "config.json: moe_intermediate_size: expected intermediate_size "
            f"{quoted(plain.get('intermediate_size'))}, got {quoted(width)}"
        )
    return plain, problems


def _with_theta(fields, config):
    """Return the config with a rotation whose base includes ``alpha``.

    The file calls this rotation "dynamic". A fixed alpha makes its frequencies static.
    """
    given = config.get("rope_scaling") or config.get("rope_parameters") or {}
    kind = given.get("rope_type", given.get("type")) if isinstance(given, dict) else None
    if kind != "dynamic" or not given.get("alpha"):
        return config
    rope = Fields({"rope_theta": config.get("rope_theta")} | given)
    alpha, theta = rope.number("alpha"), rope.number("rope_theta", 10000.0)
    rope.relate(alpha > 0, f"rope alpha: expected a positive number, got {alpha}")
    fields.problems += rope.problems
    heads = fields.size("num_attention_heads")
    width = fields.size("head_dim", default=max(fields.size("hidden_size") // heads, 1))
    fields.relate(width > 2, f"head_dim: expected more than 2, got {width}")
    stretched = theta if rope.problems or width <= 2 else theta * alpha ** (width / (width - 2))
    plain = {"rope_type": "default", "rope_theta": stretched}
    return {**config, "rope_scaling": None, "rope_parameters": plain}


def build_moe(config: SparseConfig, layer: int, make: Builder) -> NVFP4MoE:
    """Make the expert block of `layer`; raises the errors of `sparse.build_block`."""
    return build_block(config, layer, make)


def build_model(config: SparseConfig, make: Builder) -> Decoder:
    """Make the whole model."""
    return build_decoder(config, make, build_attention, build_moe)


_ATTENTION = "model.layers.*.self_attn"
KEYS = {
    **DECODER_KEYS,
    **gqa_keys("layers.*.attention", _ATTENTION),
    "layers.*.attention.q_norm": f"{_ATTENTION}.query_layernorm",
    "layers.*.attention.k_norm": f"{_ATTENTION}.key_layernorm",
    **moe_keys("model.layers.*.mlp", router="gate.wg", shared="shared_mlp"),
}
ARCHITECTURE = Architecture(read_config, build_model, build_moe, KEYS)
