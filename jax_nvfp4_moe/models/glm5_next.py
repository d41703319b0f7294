"""GLM-5-Next (GLM-5.3-Flash), the language model.

Most layers have Kimi delta attention. The others have latent attention without rotation, to windows
of tokens that an indexer chooses. Layers exchange vectors with several residual streams, and the
activations of all MLPs are bounded.

Source: `modeling_glm5_next` and `configuration_glm5_next` of transformers.
"""

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float

from jax_nvfp4_moe.checkpoint.errors import quoted
from jax_nvfp4_moe.models.config import Fields
from jax_nvfp4_moe.models.decoder import Architecture, Decoder, build_around
from jax_nvfp4_moe.models.deepseek_v3 import ATTENTION_PARTS, EXPERTS
from jax_nvfp4_moe.models.deepseek_v4 import StreamDecoder, StreamLayer
from jax_nvfp4_moe.models.keys import DECODER_KEYS, gated_mlp_keys, moe_keys
from jax_nvfp4_moe.models.kimi_linear import DELTA_PARTS, FORGET_PARTS
from jax_nvfp4_moe.models.sparse import (
    SparseConfig,
    build_block,
    find_dense_layers,
    read_grouped_router,
    read_sparse,
)
from jax_nvfp4_moe.nn.attention.indexer import IndexerSizes
from jax_nvfp4_moe.nn.attention.key_pool import PoolSizes
from jax_nvfp4_moe.nn.attention.latent_attention import MLAConfig, build_latent_attention
from jax_nvfp4_moe.nn.attention.pooled_latent_attention import PooledLatentAttention
from jax_nvfp4_moe.nn.building.builder import Builder
from jax_nvfp4_moe.nn.building.keys import KeyTable, below
from jax_nvfp4_moe.nn.experts.gated_mlp import GatedMLP, build_gated_mlp
from jax_nvfp4_moe.nn.experts.moe import NVFP4MoE
from jax_nvfp4_moe.nn.hyper_connections import StreamSizes
from jax_nvfp4_moe.nn.recurrent.kimi_delta import KimiDeltaSizes, build_kimi_delta
from jax_nvfp4_moe.numerics.activations import ActivationCall, find_activation
from jax_nvfp4_moe.numerics.casts import cast

_EPS = 1e-5
_LINEAR, _INDEXED, _FULL = "linear_attention", "indexed_attention", "full_attention"
_STEP = 4  # without layer_types, each layer of this number has latent attention
_DENSE = 3  # without mlp_layer_types, so many leading layers have no experts
_LOWER_BOUND = -5.0
# The names in the object `linear_attn_config` of published files -> the names at the top level.
_LINEAR_NAMES = {
    "head_dim": "linear_head_dim",
    "num_heads": "linear_num_heads",
    "short_conv_kernel_size": "linear_conv_kernel_dim",
    "gate_lower_bound": "linear_lower_bound",
}


@dataclasses.dataclass(frozen=True)
class Glm5NextConfig(SparseConfig):
    """The sizes of a GLM-5-Next model.

    `attention` has for each layer the sizes of its mixer: `MLAConfig` or `KimiDeltaSizes`.

    Attributes:
      streams: the sizes of the residual streams.
      activation: the activation of MLPs and experts.
    """

    streams: StreamSizes
    activation: ActivationCall


def read_config(config: Mapping[str, Any]) -> Glm5NextConfig:
    """Read a parsed ``config.json``, its ``text_config`` at the top level.

    Raises:
      CheckpointError: lists all values that are missing, wrong or not supported.
    """
    config = _with_linear_sizes(config)
    fields = Fields(config)
    limit = fields.number("swiglu_limit", 10.0)
    fields.require(limit > 0, f"swiglu_limit: expected a positive number, got {limit}")
    streams = StreamSizes(
        streams=fields.size("hc_mult", default=4),
        hidden=fields.size("hidden_size"),
        rounds=fields.size("hc_sinkhorn_iters", default=20),
        eps=fields.number("hc_eps", 1e-6),
        norm_eps=fields.number("rms_norm_eps", _EPS),
    )
    dense = find_dense_layers(fields)
    layers = fields.size("num_hidden_layers")
    read = read_sparse(
        fields,
        _read_mixers(fields, config, layers),
        read_grouped_router(fields, *EXPERTS, scaling=2.5),
        eps=_EPS,
        experts=EXPERTS,
        intermediate="moe_intermediate_size",
        dense_layers=frozenset(range(min(_DENSE, layers))) if dense is None else dense,
        shared_experts=fields.count("n_shared_experts", 1),
    )
    call = find_activation("silu", limit=limit)
    return Glm5NextConfig(**vars(read), streams=streams, activation=call)


def _with_linear_sizes(config) -> dict[str, Any]:
    """Return the config with the sizes of linear attention at the top level."""
    given = config.get("linear_attn_config")
    if not isinstance(given, dict):
        return dict(config)
    own = {name: given[old] for old, name in _LINEAR_NAMES.items() if old in given}
    if given.get("safe_gate", True) and own.get("linear_lower_bound", _LOWER_BOUND) is None:
        own["linear_lower_bound"] = _LOWER_BOUND
    return {**config, **own}


def _read_mixers(fields, config, layers):
    """Return the sizes of the mixer of each layer."""
    default = [_INDEXED if layer % _STEP == _STEP - 1 else _LINEAR for layer in range(layers)]
    types = fields.layer_types((_LINEAR, _INDEXED, _FULL), default)
    modes = fields.layer_types(("full", "shared"), ["full"] * layers, "indexer_types")
    pattern = config.get("index_topk_pattern")
    derived = fields.size("index_topk_freq", default=1) == 1 and pattern is None
    own = zip(types, modes, strict=False)
    fields.require(
        all(mode == "full" for kind, mode in own if kind != _LINEAR)
        and (derived or fields.present("indexer_types")),
        f"indexer_types: expected full for each layer of {_INDEXED}, because layers that take the "
        "choice of another indexer are not supported here",
    )
    latent, delta = _read_latent(fields), _read_delta(fields, config)
    return tuple(delta if kind == _LINEAR else latent for kind in types)


def _read_latent(fields) -> MLAConfig:
    fields.require(
        fields.count("qk_rope_head_dim") == 0,
        "qk_rope_head_dim: expected 0, because this architecture rotates no channels",
    )
    heads = fields.size("num_attention_heads")
    fields.only("num_key_value_heads", (heads,), heads)
    fields.only("index_kpool_always_select_tail", (True,), True)
    rate, count = fields.size("index_kpool", default=16), fields.size("index_topk", default=2048)
    fields.multiple("index_topk", count, rate, "tokens of a window, index_kpool")
    width, eps = fields.size("index_head_dim", default=128), fields.number("rms_norm_eps", _EPS)
    return MLAConfig(
        hidden=fields.size("hidden_size"),
        num_heads=heads,
        q_lora_rank=fields.size("q_lora_rank", default=1536),
        kv_lora_rank=fields.size("kv_lora_rank", default=512),
        qk_nope_head_dim=fields.size("qk_nope_head_dim", default=256),
        qk_rope_head_dim=0,
        v_head_dim=fields.size("v_head_dim", default=256),
        interleaved=False,
        bias=fields.flag("attention_bias", False),
        rope=None,
        indexer=IndexerSizes(
            heads=fields.size("index_n_heads", default=32),
            head_dim=width,
            count=max(count // rate, 1),
            interleaved=False,
        ),
        pool=PoolSizes(rate, overlaps=False, head_dim=width, rope=None, eps=eps),
        eps=eps,
    )


def _read_delta(fields, config) -> KimiDeltaSizes:
    bound = None
    if config.get("linear_lower_bound", _LOWER_BOUND) is not None:
        bound = fields.number("linear_lower_bound", _LOWER_BOUND)
        fields.require(
            bound < 0, f"linear_lower_bound: expected a negative number, got {quoted(bound)}"
        )
    return KimiDeltaSizes(
        hidden=fields.size("hidden_size"),
        heads=fields.size("linear_num_heads", default=64),
        head_dim=fields.size("linear_head_dim", default=128),
        conv_size=fields.size("linear_conv_kernel_dim", default=4),
        eps=fields.number("rms_norm_eps", _EPS),
        low_rank=True,
        lower_bound=bound,
    )


class MeanStreamDecoder(StreamDecoder):
    """A decoder of several residual streams, whose mean the last norm reads."""

    def close_stream(self, stream) -> Float[Array, "b t h"]:
        """Return the normalized vectors of what leaves the last layer."""
        mean = jnp.mean(stream.x.astype(jnp.float32), axis=2)
        return self.norm(cast(mean, stream.x.dtype))


def build_mixer(config: Glm5NextConfig, layer: int, make: Builder):
    """Make the mixer of `layer`, whose heads are sharded along the mesh axis `tensor`."""
    sizes, path = config.attention[layer], f"layers.{layer}.attention"
    if isinstance(sizes, KimiDeltaSizes):
        return build_kimi_delta(sizes, path, make)
    return build_latent_attention(sizes, path, make, PooledLatentAttention)


def build_moe(config: Glm5NextConfig, layer: int, make: Builder) -> NVFP4MoE:
    """Make the expert block of `layer`; raises the errors of `sparse.build_block`."""
    call = config.activation
    return build_block(config, layer, make, bias=True, activation=call, shared_activation=call)


def build_mlp(config: Glm5NextConfig, layer: int, make: Builder):
    """Make the dense MLP or the expert block of `layer`."""
    if layer not in config.dense_layers:
        return build_moe(config, layer, make)
    build = functools.partial(GatedMLP, activation=config.activation)
    return build_gated_mlp(
        make, f"layers.{layer}.mlp", config.hidden, config.dense_intermediate, build
    )


def build_model(config: Glm5NextConfig, make: Builder) -> Decoder:
    """Make the whole model."""

    def build_layer(layer):
        return StreamLayer(config, layer, make, build_mixer, build_mlp)

    return build_around(config, make, build_layer, tied=config.tied, decoder=MeanStreamDecoder)


_LAYER = "model.layers.*"
_MIXER = f"{_LAYER}.self_attn"
_INDEXER = {
    "queries": "wq_b",
    "head_weights": "weights_proj",
    "pool.keys": "wk",
    "pool.norm_weight": "k_norm.weight",
    "pool.norm_bias": "k_norm.bias",
    "pool.gates": "index_kpool_compress_gate",
    "pool.bias": "index_kpool_compress_ape",
}
KEYS: KeyTable = {
    **DECODER_KEYS,
    # The names in published files, and the names of transformers in memory.
    **{
        f"layers.*.{part}_connection.{own}": (
            f"{_LAYER}.hc_{old}_{name}",
            f"{_LAYER}.{old}_hc.{name}",
        )
        for part, old in (("attention", "attn"), ("mlp", "ffn"))
        for own, name in (("projection", "fn"), ("bias", "base"), ("scale", "scale"))
    },
    **below("layers.*.attention", _MIXER, ATTENTION_PARTS),
    **below("layers.*.attention", _MIXER, DELTA_PARTS | {"gate_up": "g_b_proj"}),
    **below(
        "layers.*.attention",
        (_MIXER, f"{_MIXER}.forget_gate"),
        FORGET_PARTS | {"decay_up": "f_b_proj"},
    ),
    "layers.*.attention.out_proj": f"{_MIXER}.o_proj",
    **below("layers.*.attention.indexer", f"{_MIXER}.indexer", _INDEXER),
    **gated_mlp_keys("layers.*.mlp", f"{_LAYER}.mlp"),
    **moe_keys(f"{_LAYER}.mlp", bias="gate.e_score_correction_bias", shared="shared_experts"),
}
ARCHITECTURE = Architecture(read_config, build_model, build_moe, KEYS)
