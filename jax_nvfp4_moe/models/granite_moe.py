"""Granite-MoE, with shared experts or without, and the hybrids of Granite 4.

Numbers in the config scale the embedding, the scores of the attention, what each part of a layer
adds to the residual stream, and the logits. Hybrids have Mamba-2 mixers in most layers.

Source: `modeling_granitemoe`, `modeling_granitemoeshared` and `modeling_granitemoehybrid` of
transformers.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any

import jax

from jax_nvfp4_moe.checkpoint.errors import quoted
from jax_nvfp4_moe.models.config import Fields, is_finite
from jax_nvfp4_moe.models.decoder import Architecture, Decoder, DecoderLayer, build_around
from jax_nvfp4_moe.models.dense import refuse_experts
from jax_nvfp4_moe.models.grouped_query_config import read_grouped_query
from jax_nvfp4_moe.models.keys import DECODER_KEYS, gqa_keys, mamba2_keys
from jax_nvfp4_moe.models.sparse import ACTIVATIONS, read_top_k, require_experts
from jax_nvfp4_moe.nn.attention.grouped_query import GQAConfig, build_attention
from jax_nvfp4_moe.nn.building.builder import Builder
from jax_nvfp4_moe.nn.building.keys import below
from jax_nvfp4_moe.nn.experts.gated_mlp import build_joined_mlp
from jax_nvfp4_moe.nn.experts.moe import NVFP4MoE
from jax_nvfp4_moe.nn.norm import Residual
from jax_nvfp4_moe.nn.recurrent.mamba2 import Mamba2Config, build_mamba2
from jax_nvfp4_moe.numerics.routing import Router

_EXPERTS = ("num_local_experts", "num_experts")
_EPS = 1e-6
# Whether a layer of this type has a Mamba-2 mixer. Older files use the second and fourth name.
_RECURRENT = {
    "linear_attention": True,
    "mamba": True,
    "full_attention": False,
    "attention": False,
}


@dataclasses.dataclass(frozen=True)
class Multipliers:
    """The numbers that scale vectors and logits.

    Attributes:
      embedding: multiplies the vectors that the embedding returns.
      residual: multiplies what each part of a layer adds to the residual stream.
      logits: divides the logits.
    """

    embedding: float
    residual: float
    logits: float


@dataclasses.dataclass(frozen=True)
class GraniteConfig:
    """The sizes of a Granite-MoE model.

    Attributes:
      vocab_size: the number of token ids.
      hidden: the size of the residual stream.
      num_layers: the number of layers.
      max_positions: the number of positions that the model was trained for.
      eps: the epsilon of the norms.
      attention: the sizes of the attention.
      mamba: the sizes of the Mamba-2 mixers; None in models without them.
      recurrent: the indices of layers with a Mamba-2 mixer. The other layers have attention.
      num_experts: the number of routed experts in a layer. 0 for none.
      intermediate: the intermediate size of one expert. 0 without experts.
      shared_intermediate: the intermediate size of all shared experts together. 0 for none.
      router: how tokens choose experts; None without experts.
      multipliers: the numbers that scale vectors and logits.
      tied: whether the head shares the weights of the embedding.
      dense_layers: the indices of layers without experts: all or none.
    """

    vocab_size: int
    hidden: int
    num_layers: int
    max_positions: int
    eps: float
    attention: GQAConfig
    mamba: Mamba2Config | None
    recurrent: frozenset[int]
    num_experts: int
    intermediate: int
    shared_intermediate: int
    router: Router | None
    multipliers: Multipliers
    tied: bool
    dense_layers: frozenset[int] = frozenset()


def read_config(config: Mapping[str, Any]) -> GraniteConfig:
    """Read a parsed ``config.json`` of a model without Mamba-2 mixers.

    Raises:
      CheckpointError: lists all values that are missing, wrong or not supported.
    """
    fields = Fields(config)
    return _read(fields, config, fields.count("shared_intermediate_size"))


def read_hybrid_config(config: Mapping[str, Any]) -> GraniteConfig:
    """Read a parsed ``config.json`` of a hybrid; raises the errors of `read_config`."""
    fields = Fields(config)
    layers = fields.size("num_hidden_layers")
    listed = config.get("layer_types") or config.get("layers_block_type")
    types = fields.layer_types(_RECURRENT, ["linear_attention"] * layers, listed=listed)
    recurrent = frozenset(n for n, kind in enumerate(types) if _RECURRENT[kind])
    shared = fields.count("shared_intermediate_size", 1024)
    mamba = _read_mamba(fields, config)
    rotates = fields.only("position_embedding_type", (None, "nope", "rope"), None) == "rope"
    return _read(fields, config, shared, mamba, recurrent, rotates)


def _read(fields, config, shared, mamba=None, recurrent=frozenset(), rotates=True):
    """Read the sizes that all these models have, and return all sizes."""
    fields.only("hidden_act", ACTIVATIONS, "silu")
    bias = fields.flag("attention_bias", False)
    attention = read_grouped_query(
        fields,
        config,
        eps=_EPS,
        bias=bias,
        out_bias=bias,
        scale=fields.number("attention_multiplier", 1.0),
    )
    multipliers = read_multipliers(fields)
    layers, dense = fields.size("num_hidden_layers"), mamba is not None and _is_dense(config)
    fields.relate(
        not dense or shared > 0,
        f"shared_intermediate_size: expected a positive integer without experts, got {shared}",
    )
    read = GraniteConfig(
        vocab_size=fields.size("vocab_size"),
        hidden=fields.size("hidden_size"),
        num_layers=layers,
        max_positions=fields.positions() if rotates else fields.size("max_position_embeddings"),
        eps=fields.number("rms_norm_eps", _EPS),
        attention=attention if rotates else dataclasses.replace(attention, rope=None),
        mamba=mamba,
        recurrent=recurrent,
        num_experts=0 if dense else fields.size(*_EXPERTS),
        intermediate=0 if dense else fields.size("intermediate_size"),
        shared_intermediate=shared,
        router=None if dense else Router(read_top_k(fields, *_EXPERTS), select="logits"),
        multipliers=multipliers,
        tied=fields.flag("tie_word_embeddings", False),
        dense_layers=frozenset(range(layers) if dense else ()),
    )
    fields.finish()
    return read


def read_multipliers(fields: Fields) -> Multipliers:
    """Read the numbers that scale vectors and logits."""
    read = Multipliers(
        fields.number("embedding_multiplier", 1.0),
        fields.number("residual_multiplier", 1.0),
        fields.number("logits_scaling", 1.0),
    )
    fields.relate(read.logits != 0, f"logits_scaling: expected not zero, got {read.logits}")
    return read


def _is_dense(config) -> bool:
    """Return whether a hybrid has no experts, so that the shared experts are the only MLP."""
    count = next((config[name] for name in _EXPERTS if config.get(name) is not None), None)
    return type(count) is int and count == 0


def _read_mamba(fields, config) -> Mamba2Config:
    hidden = fields.size("hidden_size")
    heads, groups = (
        fields.size("mamba_n_heads", default=128),
        fields.size("mamba_n_groups", default=1),
    )
    inner = fields.size("mamba_expand", default=2) * hidden
    if config.get("mamba_d_head", "auto") == "auto":
        head_dim = max(inner // heads, 1)
    else:
        head_dim = fields.size("mamba_d_head")
    fields.multiple("mamba_n_heads", heads, groups, "groups")
    fields.relate(
        heads * head_dim == inner,
        f"mamba_d_head: expected {heads} heads to fill {inner} channels, got {head_dim}",
    )
    return Mamba2Config(
        hidden=hidden,
        heads=heads,
        head_dim=head_dim,
        state_size=fields.size("mamba_d_state", default=256),
        groups=groups,
        conv_size=fields.size("mamba_d_conv", default=4),
        activation="silu_no_mul",
        bias=fields.flag("mamba_proj_bias", False),
        conv_bias=fields.flag("mamba_conv_bias", True),
        eps=fields.number("rms_norm_eps", _EPS),
        step_limits=_read_step_limits(fields, config),
    )


def _read_step_limits(fields, config) -> tuple[float, float]:
    """Return the smallest and the largest time step."""
    given = config.get("time_step_limit") or [0.0, math.inf]
    pair = given if isinstance(given, list) and len(given) == 2 else [None, None]
    low, high = map(_read_float, pair)
    fields.require(
        0 <= low <= high,
        f"time_step_limit: expected two numbers, the smaller first; got {quoted(given)}",
    )
    return low, high


def _read_float(value: Any) -> float:
    """Return a number, NaN for anything else. transformers 5 writes infinity as an object."""
    if value == {"__float__": "Infinity"}:
        return math.inf
    known = type(value) is float or (type(value) is int and is_finite(value))
    return float(value) if known else math.nan


class Layer(DecoderLayer):
    """A layer whose results are multiplied before they are added to the residual stream.

    Attributes:
      multiplier: static; the factor.
    """

    multiplier: float = 1.0

    def __call__(self, stream, positions, entries):
        """Run the layer with the arguments and results of `DecoderLayer`."""
        with jax.named_scope("attention"):
            x, normal = self.attention_norm.normalize_sum(stream)
            y, entries = self.attention(normal, positions, entries)
        with jax.named_scope("mlp"):
            x, normal = self.mlp_norm.normalize_sum(Residual(x, y * self.multiplier))
            return Residual(x, self.mlp(normal) * self.multiplier), entries


class GraniteDecoder(Decoder):
    """A decoder whose embedding and logits are scaled by ``config.multipliers``."""

    def embed(self, table, input_ids):
        """Return the vectors of tokens ``[b, t, h]``; `table` is the embedding's value."""
        return super().embed(table, input_ids) * self.config.multipliers.embedding

    def _logits(self, x):
        return super()._logits(x) / self.config.multipliers.logits


def build_mixer(config: GraniteConfig, layer: int, make: Builder):
    """Make the attention or the Mamba-2 mixer of `layer`."""
    if layer in config.recurrent:
        assert config.mamba is not None
        return build_mamba2(config.mamba, f"layers.{layer}.attention", make)
    return build_attention(config, layer, make)


def build_moe(config: GraniteConfig, layer: int, make: Builder) -> NVFP4MoE:
    """Make the expert block of `layer` with its shared experts.

    Raises:
      ValueError: there is no such layer, or no layer has experts.
    """
    if config.router is None:
        return refuse_experts(config, layer, make)
    require_experts(config, layer)
    path, e, h = f"layers.{layer}.mlp", config.num_experts, config.hidden
    params, checkpoint_scheme = make.experts(
        f"{path}.experts.params", e, h, config.intermediate, inputs_first=False
    )
    shared = None
    if config.shared_intermediate:
        shared = build_joined_mlp(make, f"{path}.shared_experts", h, config.shared_intermediate)
    return NVFP4MoE(
        e,
        h,
        config.intermediate,
        params=params,
        token_router=make.token_router(path, e, h, config.router),
        shared_experts=shared,
        checkpoint_scheme=checkpoint_scheme,
        **make.settings.block_arguments(),
    )


def build_mlp(config: GraniteConfig, layer: int, make: Builder):
    """Make the expert block of `layer`, or its one MLP if the layer has no experts."""
    if layer in config.dense_layers:
        path, width = f"layers.{layer}.mlp", config.shared_intermediate
        return build_joined_mlp(make, path, config.hidden, width)
    return build_moe(config, layer, make)


def build_model(config: GraniteConfig, make: Builder) -> Decoder:
    """Make the whole model."""
    return build_scaled(config, make, build_mixer, build_mlp)


def build_scaled(config: Any, make: Builder, build_mixer: Callable, build_mlp: Callable) -> Decoder:
    """Make a model whose vectors and logits are scaled by ``config.multipliers``.

    Args:
      config: the sizes.
      make: builds the parts.
      build_mixer: takes the sizes, the index of a layer and `make`, and returns its mixer.
      build_mlp: takes the same arguments, and returns the MLP or the expert block of the layer.
    """

    def build_layer(index):
        path = f"layers.{index}"
        layer = Layer(
            make.norm(f"{path}.attention_norm", config.hidden, config.eps),
            build_mixer(config, index, make),
            make.norm(f"{path}.mlp_norm", config.hidden, config.eps),
            build_mlp(config, index, make),
        )
        layer.multiplier = config.multipliers.residual
        return layer

    return build_around(config, make, build_layer, tied=config.tied, decoder=GraniteDecoder)


_BLOCK = "model.layers.*.block_sparse_moe"
_SHARED = {"input": "input_linear", "output": "output_linear"}
KEYS = {
    **DECODER_KEYS,
    **gqa_keys("layers.*.attention", "model.layers.*.self_attn"),
    **mamba2_keys("layers.*.attention", "model.layers.*.mamba"),
    **below("layers.*.mlp.shared_experts", "model.layers.*.shared_mlp", _SHARED),
    **below("layers.*.mlp", "model.layers.*.shared_mlp", _SHARED),  # without experts
    "layers.*.mlp.experts.params": f"{_BLOCK}.experts",
    # The name in published files, and the name that transformers 5 uses in memory.
    "layers.*.mlp.token_router.weight": (
        f"{_BLOCK}.router.layer.weight",
        f"{_BLOCK}.router.weight",
    ),
}
ARCHITECTURE = Architecture(read_config, build_model, build_moe, KEYS)
HYBRID = Architecture(read_hybrid_config, build_model, build_moe, KEYS)
