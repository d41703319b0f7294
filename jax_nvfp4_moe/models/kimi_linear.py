"""Kimi-Linear and Ling 3.

Most layers have Kimi delta attention, and the others have latent attention. The latent attention of
Kimi-Linear does not rotate queries and keys. The latent attention of Ling has a gate for each head.

Source: `modeling_kimi_linear` and `modeling_bailing_hybrid` of transformers; arXiv:2510.26692.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

from jax_nvfp4_moe.models.config import Fields, read_rope
from jax_nvfp4_moe.models.decoder import Architecture, Decoder, build_decoder
from jax_nvfp4_moe.models.deepseek_v3 import ATTENTION_PARTS
from jax_nvfp4_moe.models.keys import DECODER_KEYS, gated_mlp_keys, moe_keys
from jax_nvfp4_moe.models.sparse import (
    SparseConfig,
    build_block,
    read_dense_layers,
    read_grouped_router,
    read_sparse,
)
from jax_nvfp4_moe.nn.attention.latent_attention import MLAConfig, build_latent_attention
from jax_nvfp4_moe.nn.building.builder import Builder
from jax_nvfp4_moe.nn.building.keys import KeyTable, below
from jax_nvfp4_moe.nn.experts.moe import NVFP4MoE
from jax_nvfp4_moe.nn.recurrent.kimi_delta import KimiDeltaSizes, build_kimi_delta

_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
_LINEAR, _FULL = "linear_attention", "full_attention"
# Names of sizes in these models' configs, and the names that other models use for the same sizes.
_NAMES = {
    "num_experts_per_token": "num_experts_per_tok",
    "moe_renormalize": "norm_topk_prob",
    "num_expert_group": "n_group",
    "num_shared_experts": "n_shared_experts",
    "model_max_length": "max_position_embeddings",
}


@dataclasses.dataclass(frozen=True)
class Mixers:
    """The mixers of all layers.

    Attributes:
      latent: the sizes of the latent attention.
      delta: the sizes of the Kimi delta attention.
      types: "full_attention" (latent) or "linear_attention" (delta) for each layer.
    """

    latent: MLAConfig
    delta: KimiDeltaSizes
    types: tuple[str, ...]


def read_config(config: Mapping[str, Any]) -> SparseConfig:
    """Read a parsed ``config.json`` of Kimi-Linear.

    Raises:
      CheckpointError: lists all values that are missing, wrong or not supported.
    """
    config = _renamed(config)
    given = config.get("linear_attn_config")
    if isinstance(given, dict):  # published files keep these sizes in an object
        config |= {
            "linear_head_dim": given.get("head_dim"),
            "linear_num_heads": given.get("num_heads"),
            "linear_conv_kernel_dim": given.get("short_conv_kernel_size"),
        }
    fields = Fields(config)
    fields.only("moe_router_activation_func", ("sigmoid",), "sigmoid")
    fields.only("mla_use_nope", (True,), True)
    layers = fields.size("num_hidden_layers")
    default = [_FULL if n and n % 4 == 0 else _LINEAR for n in range(layers)]
    if isinstance(given, dict) and "full_attn_layers" in given:
        listed = Fields(given)
        full = frozenset(listed.indices("full_attn_layers"))  # the first layer is 1
        fields.problems += listed.problems
        default = [_FULL if n + 1 in full else _LINEAR for n in range(layers)]
    mixers = Mixers(
        _read_latent(fields, None),
        KimiDeltaSizes(
            hidden=fields.size("hidden_size"),
            heads=fields.size("linear_num_heads", default=32),
            head_dim=fields.size("linear_head_dim", default=128),
            conv_size=fields.size("linear_conv_kernel_dim", default=4),
            eps=fields.number("rms_norm_eps", 1e-5),
            low_rank=True,
            rate_shape=(1, 1, fields.size("linear_num_heads", default=32), 1),
        ),
        fields.layer_types((_LINEAR, _FULL), default),
    )
    router = read_grouped_router(fields, *_EXPERTS, scaling=2.446)
    return _read(fields, config, mixers, router, 1, 1e-5)


def read_ling_config(config: Mapping[str, Any]) -> SparseConfig:
    """Read a parsed ``config.json`` of Ling 3; raises the errors of `read_config`."""
    config = _renamed(config)
    fields = Fields(config)
    layers, heads = fields.size("num_hidden_layers"), fields.size("num_attention_heads")
    group = fields.size("layer_group_size", default=6)
    default = [_FULL if (n + 1) % group == 0 else _LINEAR for n in range(layers)]
    width, positions = fields.size("qk_rope_head_dim"), fields.size("max_position_embeddings")
    rope = read_rope(fields, config, width, positions, theta=6e6)
    bound = fields.number("kda_lower_bound", -5.0)
    fields.relate(bound < 0, f"kda_lower_bound: expected a negative number, got {bound}")
    mixers = Mixers(
        dataclasses.replace(_read_latent(fields, rope), q_lora_rank=None, gated=True),
        KimiDeltaSizes(
            hidden=fields.size("hidden_size"),
            heads=fields.size("linear_num_heads", default=heads),
            head_dim=fields.size("linear_head_dim", "head_dim", default=128),
            conv_size=fields.size("short_conv_kernel_size", default=4),
            eps=fields.number("rms_norm_eps", 1e-6),
            low_rank=False,
            lower_bound=bound if fields.flag("kda_safe_gate", True) else None,
        ),
        fields.layer_types((_LINEAR, _FULL), default),
    )
    router = read_grouped_router(fields, *_EXPERTS, groups=8, kept=4, scaling=2.5)
    return _read(fields, config, mixers, router, 2, 1e-6)


def _renamed(config) -> dict[str, Any]:
    """Return the config with the sizes also under the names that other models use."""
    known = {new: config.get(old) for old, new in _NAMES.items() if config.get(new) is None}
    return {**config, **known}


def _read_latent(fields, rope) -> MLAConfig:
    return MLAConfig(
        hidden=fields.size("hidden_size"),
        num_heads=fields.size("num_attention_heads"),
        q_lora_rank=fields.size("q_lora_rank") if fields.present("q_lora_rank") else None,
        kv_lora_rank=fields.size("kv_lora_rank"),
        qk_nope_head_dim=fields.size("qk_nope_head_dim"),
        qk_rope_head_dim=fields.size("qk_rope_head_dim"),
        v_head_dim=fields.size("v_head_dim"),
        interleaved=True,
        bias=fields.flag("attention_bias", False),
        rope=rope,
    )


def _read(fields, config, mixers, router, leading, eps):
    """Read the sizes that both models have, and return all sizes."""
    return read_sparse(
        fields,
        mixers,
        router,
        eps=eps,
        experts=_EXPERTS,
        intermediate="moe_intermediate_size",
        dense_layers=read_dense_layers(fields, leading),
        shared_experts=fields.count("n_shared_experts", 1),
    )


def build_mixer(config: SparseConfig, layer: int, make: Builder):
    """Make the mixer of `layer`."""
    mixers, path = config.attention, f"layers.{layer}.attention"
    if mixers.types[layer] == _FULL:
        return build_latent_attention(mixers.latent, path, make)
    return build_kimi_delta(mixers.delta, path, make)


def build_moe(config: SparseConfig, layer: int, make: Builder) -> NVFP4MoE:
    """Make the expert block of `layer`; raises the errors of `sparse.build_block`."""
    return build_block(config, layer, make, bias=True)


def build_model(config: SparseConfig, make: Builder) -> Decoder:
    """Make the whole model."""
    return build_decoder(config, make, build_mixer, build_moe)


# The names of the mixer. Published files of Ling use the second one.
_MIXERS = ("model.layers.*.self_attn", "model.layers.*.attention")
_OUTPUTS = ("o_proj", "dense")  # and of its last linear
_BIASES = ("gate.e_score_correction_bias", "gate.expert_bias")  # and of the router's bias
# Where the parts of a Kimi delta attention stand below its name in the file.
DELTA_PARTS = {
    "projections.q": "q_proj",
    "projections.k": "k_proj",
    "projections.v": "v_proj",
    "projections.rate": "b_proj",
    "gate_down": "g_a_proj",
    "norm": "o_norm.weight",
    "conv.qkv": "conv1d.weight",
    "conv.q": "q_conv1d.weight",
    "conv.k": "k_conv1d.weight",
    "conv.v": "v_conv1d.weight",
}
# transformers 5 keeps these one module deeper in memory, and so do ModelOpt's files.
FORGET_PARTS = {"decay_down": "f_a_proj", "A_log": "A_log", "dt_bias": "dt_bias"}


def _keys(up: str, decay: str, blocks: tuple[str, ...]) -> KeyTable:
    """Return the key table of a model.

    Args:
      up: the name of the last linear of the output's gate.
      decay: the name of the last linear of the decays.
      blocks: the names that the expert block and the dense MLP may have.
    """
    path = "layers.*.attention"
    outputs = tuple(f"{name}.{last}" for name in _MIXERS for last in _OUTPUTS)
    forget = tuple(f"{name}.forget_gate" for name in _MIXERS)
    return {
        **DECODER_KEYS,
        "embedding": ("model.embed_tokens.weight", "model.word_embeddings.weight"),
        **below(path, _MIXERS, ATTENTION_PARTS),
        **below(path, _MIXERS, DELTA_PARTS | {"gate_up": up, "gate": "g_proj"}),
        **below(path, (*_MIXERS, *forget), FORGET_PARTS | {"decay_up": decay}),
        **dict.fromkeys((f"{path}.out", f"{path}.out_proj"), outputs),
        **gated_mlp_keys("layers.*.mlp", blocks),
        **moe_keys(*blocks, shared="shared_experts"),
        "layers.*.mlp.token_router.correction_bias": tuple(
            f"{name}.{bias}" for name in blocks for bias in _BIASES
        ),
    }


_BLOCKS = ("model.layers.*.block_sparse_moe", "model.layers.*.mlp")
ARCHITECTURE = Architecture(
    read_config, build_model, build_moe, _keys("g_b_proj", "f_b_proj", _BLOCKS)
)
LING = Architecture(
    read_ling_config, build_model, build_moe, _keys("g_proj", "f_proj", _BLOCKS[1:])
)
