"""DeepSeek-V3.2 and GLM-5.

They are DeepSeek-V3 with sparse attention: an indexer chooses the keys that each query attends to.
In later versions of GLM-5, several layers in a row share what the indexer of the first one chose.

Source: `modeling_deepseek_v32` and `modeling_glm_moe_dsa` of transformers; arXiv:2512.02556
and arXiv:2603.12201.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax

from jax_nvfp4_moe.models import deepseek_v3
from jax_nvfp4_moe.models.config import Fields
from jax_nvfp4_moe.models.decoder import Architecture, Decoder, DecoderLayer, build_decoder
from jax_nvfp4_moe.models.drafting_layers import BEHIND, one_layer
from jax_nvfp4_moe.models.sparse import (
    SparseConfig,
    read_dense_layers,
    read_grouped_router,
)
from jax_nvfp4_moe.nn.attention.indexer import IndexerSizes
from jax_nvfp4_moe.nn.attention.latent_attention import MLAConfig, build_latent_attention
from jax_nvfp4_moe.nn.attention.sparse_latent_attention import (
    FollowingLatentAttention,
    SparseLatentAttention,
)
from jax_nvfp4_moe.nn.building.builder import Builder
from jax_nvfp4_moe.nn.building.keys import KeyTable, below
from jax_nvfp4_moe.nn.norm import Residual

FULL, SHARED = "full", "shared"
_LETTERS = {"F": FULL, "S": SHARED}


@dataclasses.dataclass(frozen=True)
class Indexed:
    """The attention of all layers.

    Attributes:
      latent: sizes of the attention and of its indexer.
      types: "full" for a layer with an indexer, or "shared" for a layer that attends to the keys
        that the last layer with an indexer chose.
    """

    latent: MLAConfig
    types: tuple[str, ...]

    def is_shared(self, layer: int) -> bool:
        """Return whether `layer` exists and takes the choice of the layer before it."""
        return layer < len(self.types) and self.types[layer] == SHARED


class SharingLayer(DecoderLayer):
    """A layer that takes the choice of the layer before it, or hands a choice to the next layer.

    Such layers pass on a pair: the `Residual` stream, and the positions of the keys that each token
    attends to ``[b, t, c]``, or None for all keys.

    Attributes:
      takes: whether the layer gets such a pair. Static.
      hands_on: whether it returns one. Static.
    """

    def __init__(self, *parts, takes: bool, hands_on: bool):
        """Make a layer of the parts of a `DecoderLayer`."""
        super().__init__(*parts)
        self.takes, self.hands_on = takes, hands_on

    def __call__(self, stream, positions, entries):
        """Run the layer with the arguments and results of `DecoderLayer`, or with pairs."""
        stream, chosen = stream if self.takes else (stream, None)
        with jax.named_scope("attention"):
            x, normal = self.attention_norm.normalize_sum(stream)
            y, entries, chosen = self.attention(normal, positions, entries, chosen)
        with jax.named_scope("mlp"):
            x, normal = self.mlp_norm.normalize_sum(Residual(x, y))
            stream = Residual(x, self.mlp(normal))
        return ((stream, chosen) if self.hands_on else stream), entries


def read_config(config: Mapping[str, Any]) -> SparseConfig:
    """Read a parsed ``config.json`` of DeepSeek-V3.2.

    Raises:
      CheckpointError: lists all values that are missing, wrong or not supported.
    """
    fields = Fields(config)
    router = read_grouped_router(fields, *deepseek_v3.EXPERTS, groups=8, kept=4, scaling=2.5)
    latent = _read_attention(fields, config, heads=64, interleaved=False)
    indexed = Indexed(latent, (FULL,) * fields.size("num_hidden_layers"))
    dense = read_dense_layers(fields, 3)
    return deepseek_v3.read_model(fields, indexed, router, dense, 1e-6)


def read_glm_config(config: Mapping[str, Any]) -> SparseConfig:
    """Read a parsed ``config.json`` of GLM-5; raises the errors of `read_config`."""
    fields = Fields(config)
    router = read_grouped_router(fields, *deepseek_v3.EXPERTS, scaling=2.5)
    latent = _read_attention(fields, config, heads=32, interleaved=True)
    indexed = Indexed(latent, _read_types(fields, config))
    dense = read_dense_layers(fields, 3)
    return deepseek_v3.read_model(fields, indexed, router, dense, 1e-5)


def _read_types(fields, config) -> tuple[str, ...]:
    """Return "full" or "shared" for each layer.

    The config has a list of these words, or a string of their first letters. Without both, every
    ``index_topk_freq``-th layer has an indexer, and all layers before ``index_skip_topk_offset``.
    """
    layers = fields.size("num_hidden_layers")
    step = fields.size("index_topk_freq", default=1)
    offset = fields.count("index_skip_topk_offset", 2)
    types = tuple(SHARED if max(layer - offset + 1, 0) % step else FULL for layer in range(layers))
    pattern = config.get("index_topk_pattern")
    if isinstance(pattern, str):
        pattern = [_LETTERS.get(letter, letter) for letter in pattern]
    listed = config.get("indexer_types") or pattern
    types = fields.layer_types((FULL, SHARED), types, "indexer_types", listed)
    fields.relate(
        types[0] == FULL,
        'indexer_types: expected "full" for the first layer, because no layer before it can choose '
        "keys for it",
    )
    return types


def _read_attention(fields, config, heads, interleaved) -> MLAConfig:
    """Read the sizes of the attention and of its indexer.

    Args:
      fields: the fields of ``config.json``.
      config: the parsed ``config.json``.
      heads: the default of ``index_n_heads``.
      interleaved: the default of ``indexer_rope_interleave``. transformers does not read this
        field; the family decides.
    """
    latent = deepseek_v3.read_attention(fields, config)
    fields.only("rope_interleave", (True,), True)
    fields.size("q_lora_rank")  # the indexer reads the latents of the queries
    sizes = IndexerSizes(
        heads=fields.size("index_n_heads", default=heads),
        head_dim=fields.size("index_head_dim", default=128),
        count=fields.size("index_topk", default=2048),
        interleaved=fields.flag("indexer_rope_interleave", interleaved),
    )
    fields.relate(
        sizes.head_dim >= latent.qk_rope_head_dim,
        f"index_head_dim: expected at least qk_rope_head_dim, {latent.qk_rope_head_dim}, because "
        f"so many channels are rotated; got {sizes.head_dim}",
    )
    return dataclasses.replace(latent, indexer=sizes)


def build_attention(config: SparseConfig, layer: int, make: Builder):
    """Make the attention of `layer`, whose heads are sharded along the mesh axis `tensor`."""
    shared = config.attention.is_shared(layer)
    kind = FollowingLatentAttention if shared else SparseLatentAttention
    return build_latent_attention(config.attention.latent, f"layers.{layer}.attention", make, kind)


def build_model(config: SparseConfig, make: Builder) -> Decoder:
    """Make the whole model."""
    shared = config.attention.is_shared

    def make_layer(layer, *parts):
        takes, hands_on = shared(layer), shared(layer + 1)
        if not takes and not hands_on:
            return DecoderLayer(*parts)
        return SharingLayer(*parts, takes=takes, hands_on=hands_on)

    moe = deepseek_v3.build_moe
    return build_decoder(config, make, build_attention, moe, make_layer=make_layer)


_INDEXER = {
    "queries": "wq_b",
    "keys": "wk",
    "head_weights": "weights_proj",
    "norm_weight": "k_norm.weight",
    "norm_bias": "k_norm.bias",
}
KEYS: KeyTable = {
    **deepseek_v3.KEYS,
    **below("layers.*.attention.indexer", "model.layers.*.self_attn.indexer", _INDEXER),
}
_MOE = deepseek_v3.build_moe
_DRAFTING = one_layer(
    BEHIND,
    build_attention,
    _MOE,
    attention=lambda config: Indexed(config.attention.latent, (FULL,)),
)
ARCHITECTURE = Architecture(read_config, build_model, _MOE, KEYS, drafting=_DRAFTING)
GLM = Architecture(read_glm_config, build_model, _MOE, KEYS, drafting=_DRAFTING)
