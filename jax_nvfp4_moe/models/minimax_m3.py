"""MiniMax-M3, the language model.

In most layers, an indexer chooses the blocks of keys that a query sees. Gate and up are clamped in
all MLPs and experts, and all norms are stored as ``weight - 1``.

Source: `modeling_minimax_m3_vl` of transformers.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

from jax_nvfp4_moe.checkpoint.errors import quoted
from jax_nvfp4_moe.models.config import Fields
from jax_nvfp4_moe.models.decoder import Architecture, Decoder, DecoderLayer, build_around
from jax_nvfp4_moe.models.grouped_query_config import read_grouped_query
from jax_nvfp4_moe.models.keys import DECODER_KEYS, gated_mlp_keys, gqa_keys, moe_keys
from jax_nvfp4_moe.models.sparse import (
    SparseConfig,
    find_dense_layers,
    read_sparse,
    read_top_k,
    require_experts,
)
from jax_nvfp4_moe.nn.attention.block_sparse import BlockSparseAttention, BlockSparseConfig
from jax_nvfp4_moe.nn.attention.grouped_query import Attention, build_heads
from jax_nvfp4_moe.nn.building.builder import Builder
from jax_nvfp4_moe.nn.building.keys import below
from jax_nvfp4_moe.nn.experts.gated_mlp import GatedMLP, build_gated_mlp, build_joined_mlp
from jax_nvfp4_moe.nn.experts.moe import NVFP4MoE
from jax_nvfp4_moe.numerics.activations import ActivationCall, find_activation
from jax_nvfp4_moe.numerics.routing import Router
from jax_nvfp4_moe.ops.block_attention import BlockChoice

_EXPERTS = ("num_local_experts", "num_experts")
_EPS, _HEAD_DIM = 1e-6, 128
_SPARSE, _FULL = "minimax_m3_sparse", "full_attention"
# The names of the indexer's sizes in transformers 5, and their names in published files, which have
# them in an object `sparse_attention_config`.
_INDEX = {
    "index_n_heads": "sparse_num_index_heads",
    "index_head_dim": "sparse_index_dim",
    "index_block_size": "sparse_block_size",
    "index_topk_blocks": "sparse_topk_blocks",
    "index_local_blocks": "sparse_local_block",
}


@dataclasses.dataclass(frozen=True)
class MiniMaxM3Config(SparseConfig):
    """The sizes of a MiniMax-M3 model.

    Attributes:
      activation: the activation of all MLPs and experts.
    """

    activation: ActivationCall


def read_config(config: Mapping[str, Any]) -> MiniMaxM3Config:
    """Read a parsed ``config.json``, its ``text_config`` at the top level.

    Raises:
      CheckpointError: lists all values that are missing, wrong or not supported.
    """
    # Published files call the activation "swigluoai". transformers does not read the name either.
    config, problems = _with_flat_fields({**config, "hidden_act": None})
    fields = Fields(config)
    fields.problems += problems
    alpha, limit = fields.number("swiglu_alpha", 1.702), fields.number("swiglu_limit", 7.0)
    fields.require(limit > 0, f"swiglu_limit: expected a positive number, got {limit}")
    scaling = fields.number("routed_scaling_factor", 2.0)
    router = Router(read_top_k(fields, *_EXPERTS), score="sigmoid", scaling=scaling)
    dense = find_dense_layers(fields) or frozenset()
    attentions = _read_attentions(fields, config)
    width = fields.size("dense_intermediate_size") if dense else 1
    read = read_sparse(
        fields,
        attentions,
        router,
        eps=_EPS,
        experts=_EXPERTS,
        intermediate="intermediate_size",
        dense_layers=dense,
        shared_intermediate="shared_intermediate_size",
    )
    call = find_activation("swigluoai_uninterleave", alpha=alpha, limit=limit)
    return MiniMaxM3Config(**vars(read) | {"dense_intermediate": width}, activation=call)


def _with_flat_fields(config):
    """Return the config with the names of transformers 5, and a list of problems."""
    given = config.get("sparse_attention_config") or {}
    if not isinstance(given, dict):
        problem = f"config.json: sparse_attention_config: expected an object, got {quoted(given)}"
        return config, [problem]
    flat = {new: given[old] for new, old in _INDEX.items() if old in given}
    lists = {
        "layer_types": (given.get("sparse_attention_freq"), (_FULL, _SPARSE)),
        "mlp_layer_types": (config.get("moe_layer_freq"), ("dense", "sparse")),
    }
    for name, (flags, kinds) in lists.items():
        if config.get(name) is None and isinstance(flags, list):
            flat[name] = [kinds[bool(flag)] for flag in flags]
    return config | flat, []


def _read_attentions(fields, config):
    """Return the sizes of the attention of each layer."""
    count = fields.size("num_hidden_layers")
    types = fields.layer_types((_SPARSE, _FULL), [_FULL] * count)
    head_dim = fields.size("head_dim", default=_HEAD_DIM)
    # As in MiniMax-M2, a factor takes precedence over the number of channels.
    share = min(fields.size("rotary_dim", default=head_dim) / head_dim, 1.0)
    plain = read_grouped_query(
        fields,
        config,
        eps=_EPS,
        theta=5e6,
        head_dim=_HEAD_DIM,
        share=share,
        normalize="heads",
        centered=True,
    )
    if _SPARSE not in types:
        return (plain,) * count
    heads = fields.size("index_n_heads", default=4)
    fields.relate(
        heads == plain.num_kv_heads,
        f"index_n_heads: expected {plain.num_kv_heads}, one for each key head, got {heads}",
    )
    width = fields.size("index_head_dim", default=128)
    rotated = 2 * len(plain.rope.frequencies) if plain.rope is not None else 0
    fields.relate(width >= rotated, f"index_head_dim: expected at least {rotated} rotated channels")
    choice = BlockChoice(
        fields.size("index_block_size", default=128),
        fields.size("index_topk_blocks", default=16),
        fields.count("index_local_blocks", 1),
    )
    sparse = BlockSparseConfig(**vars(plain), index_dim=width, choice=choice)
    return tuple(sparse if kind == _SPARSE else plain for kind in types)


def build_attention(config: MiniMaxM3Config, layer: int, make: Builder):
    """Make the attention of `layer`, whose heads are sharded along the mesh axis `tensor`."""
    sizes = config.attention[layer]
    kind = BlockSparseAttention if isinstance(sizes, BlockSparseConfig) else Attention
    return build_heads(sizes, f"layers.{layer}.attention", make, kind)


def build_mlp(config: MiniMaxM3Config, path: str, intermediate: int, make: Builder):
    """Make a dense MLP, or shared experts. Files of ModelOpt have gate and up in one linear."""
    call, h = config.activation, config.hidden
    if make.has(f"{path}.input"):
        return build_joined_mlp(make, path, h, intermediate, call)

    def build(make, path, hidden, width):
        return GatedMLP(make, path, hidden, width, call)

    return build_gated_mlp(make, path, h, intermediate, build)


def build_moe(config: MiniMaxM3Config, layer: int, make: Builder) -> NVFP4MoE:
    """Make the expert block of `layer` with its shared experts.

    Raises:
      ValueError: the layer has no experts.
    """
    require_experts(config, layer)
    path, e, h = f"layers.{layer}.mlp", config.num_experts, config.hidden
    params, checkpoint_scheme = make.experts(f"{path}.experts.params", e, h, config.intermediate)
    shared = build_mlp(config, f"{path}.shared_experts", config.shared_intermediate, make)
    return NVFP4MoE(
        e,
        h,
        config.intermediate,
        activation=config.activation,
        params=params,
        token_router=make.token_router(path, e, h, config.router, correction_bias=True),
        shared_experts=shared,
        checkpoint_scheme=checkpoint_scheme,
        **make.settings.block_arguments(),
    )


def build_model(config: MiniMaxM3Config, make: Builder) -> Decoder:
    """Make the whole model."""

    def build_layer(layer):
        path, h, eps = f"layers.{layer}", config.hidden, config.eps
        if layer in config.dense_layers:
            mlp = build_mlp(config, f"{path}.mlp", config.dense_intermediate, make)
        else:
            mlp = build_moe(config, layer, make)
        return DecoderLayer(
            make.norm(f"{path}.attention_norm", h, eps, centered=True),
            build_attention(config, layer, make),
            make.norm(f"{path}.mlp_norm", h, eps, centered=True),
            mlp,
        )

    return build_around(config, make, build_layer, tied=config.tied, centered=True)


_LAYER = "model.layers.*"
_ATTENTION = f"{_LAYER}.self_attn"
# The name of the expert block in published files, and its name in transformers 5.
_BLOCKS = (f"{_LAYER}.block_sparse_moe", f"{_LAYER}.mlp")
_JOINED = {"input": "gate_up_proj", "output": "down_proj"}


def _index_key(part):
    """Return the name of a part of the indexer in published files, and in transformers 5."""
    return f"{_ATTENTION}.index_{part}", f"{_ATTENTION}.indexer.{part}"


KEYS = {
    **DECODER_KEYS,
    **gqa_keys("layers.*.attention", _ATTENTION),
    "layers.*.attention.index.q": _index_key("q_proj"),
    "layers.*.attention.index.k": _index_key("k_proj"),
    "layers.*.attention.index_q_norm": _index_key("q_norm"),
    "layers.*.attention.index_k_norm": _index_key("k_norm"),
    **gated_mlp_keys("layers.*.mlp", f"{_LAYER}.mlp"),
    **below("layers.*.mlp", f"{_LAYER}.mlp", _JOINED),
    **moe_keys(*_BLOCKS, shared="shared_experts"),
    **below(
        "layers.*.mlp.shared_experts", tuple(f"{name}.shared_experts" for name in _BLOCKS), _JOINED
    ),
    "layers.*.mlp.token_router.correction_bias": (
        f"{_BLOCKS[0]}.e_score_correction_bias",
        f"{_BLOCKS[1]}.gate.e_score_correction_bias",
    ),
}
ARCHITECTURE = Architecture(read_config, build_model, build_moe, KEYS)
