"""DeepSeek-V4.

Layers attend to a window of tokens and to compressed keys of the text before, and exchange vectors
with several residual streams. In the first layers, the id of a token decides its experts.

Source: `modeling_deepseek_v4` of transformers.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jaxtyping import Array, Float, Int32

from jax_nvfp4_moe.checkpoint.errors import quoted
from jax_nvfp4_moe.models.config import Fields, find_rope_fields, read_rope
from jax_nvfp4_moe.models.decoder import Architecture, Decoder, build_around
from jax_nvfp4_moe.models.drafter import Drafter
from jax_nvfp4_moe.models.drafting_layers import DraftForm
from jax_nvfp4_moe.models.sparse import (
    SparseConfig,
    read_sparse,
    read_top_k,
    require_experts,
)
from jax_nvfp4_moe.nn.attention.compressed_attention import (
    CompressedAttention,
    CompressedConfig,
    build_compressed_attention,
)
from jax_nvfp4_moe.nn.attention.indexer import IndexerSizes
from jax_nvfp4_moe.nn.attention.key_pool import PoolSizes
from jax_nvfp4_moe.nn.building.builder import Builder
from jax_nvfp4_moe.nn.building.keys import KeyTable
from jax_nvfp4_moe.nn.experts.gated_mlp import GatedMLP, build_gated_mlp
from jax_nvfp4_moe.nn.experts.moe import NVFP4MoE
from jax_nvfp4_moe.nn.hyper_connections import HyperConnection, StreamCollapse, StreamSizes
from jax_nvfp4_moe.nn.indexed_tuple import register_indexed
from jax_nvfp4_moe.nn.norm import RMSNorm
from jax_nvfp4_moe.numerics.activations import ActivationCall, find_activation
from jax_nvfp4_moe.numerics.rope import Rope
from jax_nvfp4_moe.numerics.routing import Router

_EXPERTS = ("n_routed_experts", "num_local_experts")
_EPS = 1e-6
_SLIDING = "sliding_attention"
_SPARSE = "compressed_sparse_attention"
_HEAVY = "heavily_compressed_attention"
_HASH, _ROUTED = "hash_moe", "moe"
# The number of tokens for which a compressed key stands, by the type of the layer.
_RATES = {_SPARSE: 4, _HEAVY: 128}
# The older name of such a number, which takes precedence.
_OLD_RATES = {_SPARSE: "compress_rate_csa", _HEAVY: "compress_rate_hca"}
# The types of layers by their published `compress_ratios`.
_TYPES = {0: _SLIDING, 4: _SPARSE, 128: _HEAVY}
_THETAS = {"rope_theta": 10000.0, "compress_rope_theta": 160000.0}
_SCORES = {"sqrtsoftplus": "sqrt_softplus", "softmax": "softmax", "sigmoid": "sigmoid"}


@dataclasses.dataclass(frozen=True)
class DeepseekV4Config(SparseConfig):
    """The sizes of a DeepSeek-V4 model. `attention` has one element for each layer.

    Attributes:
      streams: the sizes of the residual streams.
      hash_layers: the indices of layers in which token ids decide the experts.
      activation: the activation of experts and shared experts.
      drafting_attention: the sizes of the attention of the drafting layer.
    """

    streams: StreamSizes
    hash_layers: frozenset[int]
    activation: ActivationCall
    drafting_attention: CompressedConfig


def read_config(config: Mapping[str, Any]) -> DeepseekV4Config:
    """Read a parsed ``config.json``.

    Raises:
      CheckpointError: lists all values that are missing, wrong or not supported.
    """
    fields = Fields(config)
    fields.only("norm_topk_prob", (True,), True)
    fields.only("mlp_bias", (False,), False)
    fields.only("attention_bias", (False,), False)
    fields.only("num_key_value_heads", (1,), 1)
    score = fields.only("scoring_func", tuple(_SCORES), "sqrtsoftplus")
    router = Router(
        read_top_k(fields, *_EXPERTS),
        score=_SCORES[score],
        scaling=fields.number("routed_scaling_factor", 1.5),
    )
    limit = fields.number("swiglu_limit", 10.0)
    fields.require(limit > 0, f"swiglu_limit: expected a positive number, got {limit}")
    streams = StreamSizes(
        streams=fields.size("hc_mult", default=4),
        hidden=fields.size("hidden_size"),
        rounds=fields.size("hc_sinkhorn_iters", default=20),
        eps=fields.number("hc_eps", 1e-6),
        norm_eps=fields.number("rms_norm_eps", _EPS),
    )
    kinds = fields.layer_types((_HASH, _ROUTED), (), "mlp_layer_types")
    layers = fields.size("num_hidden_layers")
    first = range(min(fields.count("num_hash_layers", 3), layers))
    hashed = (n for n, kind in enumerate(kinds) if kind == _HASH)
    hash_layers = frozenset(hashed if kinds else first)
    *attention, drafting = _read_attention(fields, config)
    read = read_sparse(
        fields,
        tuple(attention),
        router,
        eps=_EPS,
        experts=_EXPERTS,
        intermediate="moe_intermediate_size",
        shared_experts=fields.count("n_shared_experts", 1),
    )
    call = find_activation("silu", limit=limit)
    return DeepseekV4Config(
        **vars(read),
        streams=streams,
        hash_layers=hash_layers,
        activation=call,
        drafting_attention=drafting,
    )


def _read_attention(fields, config) -> tuple[CompressedConfig, ...]:
    """Return the sizes of the attention of each layer, and last of the drafting layer."""
    head_dim, heads = fields.size("head_dim", default=512), fields.size("num_attention_heads")
    groups = fields.size("o_groups", default=8)
    fields.relate(heads % groups == 0, f"o_groups: {heads} heads do not divide by {groups} groups")
    main, compressed = _read_ropes(fields, config, head_dim)
    plain = CompressedConfig(
        hidden=fields.size("hidden_size"),
        num_heads=heads,
        head_dim=head_dim,
        q_lora_rank=fields.size("q_lora_rank"),
        groups=groups,
        group_rank=fields.size("o_lora_rank", default=1024),
        window=fields.size("sliding_window", default=128),
        rope=main,
        eps=fields.number("rms_norm_eps", _EPS),
    )
    indexer = IndexerSizes(
        heads=fields.size("index_n_heads", default=64),
        head_dim=fields.size("index_head_dim", default=128),
        count=fields.size("index_topk", default=512),
        interleaved=True,
    )
    rotated = 2 * len(compressed.frequencies)
    fields.relate(
        indexer.head_dim >= rotated, f"index_head_dim: expected at least {rotated} rotated channels"
    )
    rates = _read_rates(fields, config)

    def compress(kind):
        pool = PoolSizes(rates[kind], kind == _SPARSE, head_dim, compressed, plain.eps)
        chosen = indexer if kind == _SPARSE else None
        return dataclasses.replace(plain, rope=compressed, pool=pool, indexer=chosen)

    kinds = {_SLIDING: plain, _SPARSE: compress(_SPARSE), _HEAVY: compress(_HEAVY)}
    return tuple(kinds[kind] for kind in (*_read_types(fields, config), _drafting_type(config)))


def _read_ropes(fields, config, head_dim) -> tuple[Rope, Rope]:
    """Return the rotation of sliding layers, and that of layers with compressed keys.

    Files of transformers have an object for each of them. Published files have one object, which
    applies to layers with compressed keys. YaRN does not scale their cosines and sines.
    """
    given = find_rope_fields(config)
    if not isinstance(given, dict):
        fields.require(False, f"rope_parameters: expected an object, got {quoted(given)}")
        given = {}
    width = fields.size("qk_rope_head_dim", default=max(head_dim // 8, 1))
    if config.get("partial_rotary_factor") is not None:
        width = int(head_dim * fields.number("partial_rotary_factor"))
    positions = fields.size("max_position_embeddings")
    if not (isinstance(given.get("main"), dict) and isinstance(given.get("compress"), dict)):
        theta = {name: fields.number(name, value) for name, value in _THETAS.items()}
        scaled = {"attention_factor": 1.0} | given | {"rope_theta": theta["compress_rope_theta"]}
        given = {"main": {"rope_theta": theta["rope_theta"]}, "compress": scaled}
    known = {"partial_rotary_factor": 1.0}  # `width` counts the rotated channels alone
    main, compressed = (
        read_rope(fields, {"rope_parameters": given[kind] | known}, width, positions)
        for kind in ("main", "compress")
    )
    return main, dataclasses.replace(compressed, attention_scale=1.0)


def _read_rates(fields, config) -> dict[str, int]:
    """Return the number of tokens for which a compressed key stands, by the type of the layer."""
    given = config.get("compress_rates") or {}
    if not isinstance(given, dict):
        fields.require(False, f"compress_rates: expected an object, got {quoted(given)}")
        given = {}
    rates = Fields(given)
    found = {kind: rates.size(kind, default=rate) for kind, rate in _RATES.items()}
    fields.problems += rates.problems
    return {kind: fields.size(_OLD_RATES[kind], default=rate) for kind, rate in found.items()}


def _drafting_type(config) -> str:
    """Return the type of the drafting layer, whose ratio follows those of the other layers."""
    ratios, layers = config.get("compress_ratios"), config.get("num_hidden_layers")
    given = ratios[layers:] if isinstance(ratios, list) and type(layers) is int else []
    return _TYPES.get(given[0], _SLIDING) if given and type(given[0]) is int else _SLIDING


def _read_types(fields, config) -> tuple[str, ...]:
    """Return the type of each layer.

    Without a list of types or of ratios, the first two layers are heavily compressed, and then
    heavily compressed and sparse layers alternate.
    """
    layers = fields.size("num_hidden_layers")
    default = [_SPARSE if n > 2 and n % 2 else _HEAVY for n in range(layers)]
    ratios = config.get("compress_ratios")
    if ratios is not None and config.get("layer_types") is None:
        known = isinstance(ratios, list) and all(ratio in tuple(_TYPES) for ratio in ratios)
        fields.require(
            known and len(ratios) >= layers,
            f"compress_ratios: expected a list of {layers} values from "
            f"{', '.join(map(str, _TYPES))}; got {quoted(ratios)}",
        )
        # A layer that predicts further tokens may follow.
        return tuple(_TYPES[ratio] for ratio in ratios[:layers]) if known else tuple(default)
    return fields.layer_types((_SLIDING, _SPARSE, _HEAVY), default)


@register_indexed
class Streams(NamedTuple):
    """What layers hand on, in rows or packed.

    Attributes:
      x: ``[b, t, n, h]``, the residual streams of each token.
      ids: int32 ``[b, t]``, the tokens.
    """

    x: Float[Array, "b t n h"]
    ids: Int32[Array, "b t"]


class StreamLayer(nnx.Module):
    """Attention and experts, each with a norm before it and connections to the streams around it.

    Attributes:
      attention_connection: reads and writes the streams around the attention.
      attention_norm: the norm before the attention.
      attention: the attention.
      mlp_connection: reads and writes the streams around the experts.
      mlp_norm: the norm before the experts.
      mlp: the expert block, or a dense MLP.
    """

    def __init__(
        self,
        config: Any,
        layer: int,
        make: Builder,
        build_attention: Callable[..., Any],
        build_mlp: Callable[..., Any],
    ):
        """Build the layer with the index `layer`.

        Args:
          config: the sizes of the model, of which `streams`, `hidden` and `eps` are used here.
          layer: the index.
          make: builds the parts.
          build_attention: takes the three arguments above, and returns the attention.
          build_mlp: takes the same arguments, and returns the expert block or the dense MLP.
        """
        path, sizes = f"layers.{layer}", config.streams
        self.attention_connection = HyperConnection(sizes, make, f"{path}.attention_connection")
        self.attention_norm: RMSNorm = make.norm(
            f"{path}.attention_norm", config.hidden, config.eps
        )
        self.attention = build_attention(config, layer, make)
        self.mlp_connection = HyperConnection(sizes, make, f"{path}.mlp_connection")
        self.mlp_norm: RMSNorm = make.norm(f"{path}.mlp_norm", config.hidden, config.eps)
        self.mlp = build_mlp(config, layer, make)

    def init_cache(self, batch: int, max_length: int) -> Mapping[str, Array]:
        """Return the empty cache entries of `batch` rows."""
        return self.attention.init_cache(batch, max_length)

    def __call__(self, stream: Streams, positions, entries) -> tuple[Streams, Any]:
        """Run the layer with the arguments and results of `DecoderLayer`."""
        x, ids = stream
        with jax.named_scope("attention"):
            read, connection = self.attention_connection(x)
            y, entries = self.attention(self.attention_norm(read), positions, entries)
            x = connection.apply(x, y)
        with jax.named_scope("mlp"):
            read, connection = self.mlp_connection(x)
            router = getattr(self.mlp, "token_router", None)
            own = (ids,) if getattr(router, "token_experts", None) is not None else ()
            y = self.mlp(self.mlp_norm(read), *own)
            return Streams(connection.apply(x, y), ids), entries


class StreamDecoder(Decoder):
    """A decoder whose layers share several residual streams.

    Attributes:
      collapse: makes one vector of the streams before the last norm.
    """

    collapse: Callable[..., Any]

    def open_stream(self, table, input_ids) -> Streams:
        """Return the streams, which all begin with the vectors of the tokens."""
        x = self.embed(table, input_ids)[:, :, None]
        shape = (*x.shape[:2], self.config.streams.streams, x.shape[-1])
        return Streams(jnp.broadcast_to(x, shape), jnp.asarray(input_ids, jnp.int32))

    def close_stream(self, stream: Streams) -> Array:
        """Return the normalized vectors ``[b, t, h]`` of what leaves the last layer."""
        return self.norm(self.collapse(stream.x))

    def drafted_from(self, stream: Streams, x: Array) -> Array:
        """Return the vectors with which drafts are made, ``[b, t, n * h]``: all streams.

        Without drafting layers that read the streams, return `x`.
        """
        return lax.collapse(stream.x, 2) if isinstance(self.drafter, StreamDrafter) else x


class StreamDrafter(Drafter):
    """Drafting layers that read the residual streams of the model ``[b, t, n * h]``.

    ``x[i] = hidden_joint(hidden_norm(hidden[i])) + joint(embedding_norm(embedded))`` for each
    stream i, then the layer, then ``normal = norm(collapse(x))``. To draft a token further, it
    reads its own streams.

    Attributes:
      joint: the linear from embeddings to ``[h]``.
      hidden_joint: the linear from one stream to ``[h]``.
      collapse: makes one vector of the streams before the last norm.
    """

    hidden_joint: Any
    collapse: StreamCollapse

    @property
    def streams(self) -> int:
        """The number of residual streams."""
        return self.collapse.sizes.streams

    def __call__(self, embedded, hidden, positions, entries):
        """Read pairs, with the arguments and results of `Drafter`."""
        x = hidden.reshape(*hidden.shape[:2], self.streams, -1)
        x = self.hidden_joint(self.hidden_norm(x))
        x = x + self.joint(self.embedding_norm(embedded))[:, :, None]
        (layer,), entry = self.layers, None if entries is None else entries[0]
        # No table of token ids chooses the experts of this layer.
        stream, entry = layer(Streams(x, positions), positions, entry)
        return lax.collapse(stream.x, 2), self.norm(self.collapse(stream.x)), (entry,)


def build_attention(config: DeepseekV4Config, layer: int, make: Builder) -> CompressedAttention:
    """Make the attention of `layer`, whose heads are sharded along the mesh axis `tensor`."""
    return build_compressed_attention(config.attention[layer], f"layers.{layer}.attention", make)


def build_moe(config: DeepseekV4Config, layer: int, make: Builder) -> NVFP4MoE:
    """Make the expert block of `layer` with its shared experts.

    Raises:
      ValueError: there is no such layer.
    """
    require_experts(config, layer)
    path, e, h = f"layers.{layer}.mlp", config.num_experts, config.hidden
    params, checkpoint_scheme = make.experts(f"{path}.experts.params", e, h, config.intermediate)
    shared = None
    if config.shared_intermediate:
        build = functools.partial(GatedMLP, activation=config.activation)
        width = config.shared_intermediate
        shared = build_gated_mlp(make, f"{path}.shared_experts", h, width, build)
    hashed = layer in config.hash_layers  # the id of a token decides its experts
    return NVFP4MoE(
        e,
        h,
        config.intermediate,
        activation=config.activation,
        params=params,
        token_router=make.token_router(
            path,
            e,
            h,
            config.router,
            correction_bias=not hashed,
            table_rows=config.vocab_size if hashed else None,
        ),
        shared_experts=shared,
        checkpoint_scheme=checkpoint_scheme,
        **make.settings.block_arguments(),
    )


def build_model(config: DeepseekV4Config, make: Builder) -> Decoder:
    """Make the whole model."""

    def build_layer(layer):
        return StreamLayer(config, layer, make, build_attention, build_moe)

    model = build_around(config, make, build_layer, tied=config.tied, decoder=StreamDecoder)
    assert isinstance(model, StreamDecoder)
    model.collapse = StreamCollapse(config.streams, make, "collapse")
    return model


_LAYER = "model.layers.*"
# Parts of a layer -> their names in published files, and in transformers.
_PARTS: Mapping[str, tuple[str, ...]] = {
    "attention_connection.projection": ("hc_attn_fn", "attn_hc.fn"),
    "attention_connection.bias": ("hc_attn_base", "attn_hc.base"),
    "attention_connection.scale": ("hc_attn_scale", "attn_hc.scale"),
    "mlp_connection.projection": ("hc_ffn_fn", "ffn_hc.fn"),
    "mlp_connection.bias": ("hc_ffn_base", "ffn_hc.base"),
    "mlp_connection.scale": ("hc_ffn_scale", "ffn_hc.scale"),
    "attention_norm": ("attn_norm", "input_layernorm"),
    "mlp_norm": ("ffn_norm", "post_attention_layernorm"),
    "attention.down.q_a": ("attn.wq_a", "self_attn.q_a_proj"),
    "attention.down.kv": ("attn.wkv", "self_attn.kv_proj"),
    "attention.q_norm": ("attn.q_norm", "self_attn.q_a_norm"),
    # transformers 5.23 writes the second name into files.
    "attention.kv_norm": ("attn.kv_norm", "attn.norm", "self_attn.kv_norm"),
    "attention.q": ("attn.wq_b", "self_attn.q_b_proj"),
    "attention.sinks": ("attn.attn_sink", "self_attn.sinks"),
    "attention.out_a": ("attn.wo_a.weight", "self_attn.o_a_proj.weight"),
    "attention.out_b": ("attn.wo_b", "self_attn.o_b_proj"),
    "attention.indexer.queries": ("attn.indexer.wq_b", "self_attn.compressor.indexer.q_b_proj"),
    "attention.indexer.head_weights": (
        "attn.indexer.weights_proj",
        "self_attn.compressor.indexer.scorer.weights_proj",
    ),
    "mlp.experts.params": ("ffn.experts", "mlp.experts"),
    "mlp.token_router.weight": ("ffn.gate.weight", "mlp.gate.weight"),
    "mlp.token_router.correction_bias": ("ffn.gate.bias", "mlp.gate.e_score_correction_bias"),
    "mlp.token_router.token_experts": ("ffn.gate.tid2eid", "mlp.gate.tid2eid"),
    "mlp.shared_experts.gate_up.gate": ("ffn.shared_experts.w1", "mlp.shared_experts.gate_proj"),
    "mlp.shared_experts.gate_up.up": ("ffn.shared_experts.w3", "mlp.shared_experts.up_proj"),
    "mlp.shared_experts.down": ("ffn.shared_experts.w2", "mlp.shared_experts.down_proj"),
}
# Parts of a `KeyPool` -> their names in both.
_POOL = {
    "projections.values": ("wkv", "kv_proj"),
    "projections.gates": ("wgate", "gate_proj"),
    "bias": ("ape", "position_bias"),
    "norm": ("norm", "kv_norm"),
}
_POOLS = {
    "attention.pool": ("attn.compressor", "self_attn.compressor"),
    "attention.indexer.pool": ("attn.indexer.compressor", "self_attn.compressor.indexer"),
}
KEYS: KeyTable = {
    "embedding": "model.embed_tokens.weight",
    "norm": "model.norm",
    "head": "lm_head",
    "collapse.projection": ("model.hc_head_fn", "model.hc_head.hc_fn"),
    "collapse.bias": ("model.hc_head_base", "model.hc_head.hc_base"),
    "collapse.scale": ("model.hc_head_scale", "model.hc_head.hc_scale"),
    **{
        f"layers.*.{part}": tuple(f"{_LAYER}.{name}" for name in names)
        for part, names in _PARTS.items()
    },
    **{
        f"layers.*.{pool}.{part}": tuple(
            f"{_LAYER}.{stem}.{name}" for stem, name in zip(stems, names, strict=True)
        )
        for pool, stems in _POOLS.items()
        for part, names in _POOL.items()
    },
}


def _build_drafting_layers(config: DeepseekV4Config, make: Builder) -> list[StreamLayer]:
    """Make the drafting layer, which has no table of experts."""
    attention = (config.drafting_attention,)
    own = dataclasses.replace(config, num_layers=1, attention=attention, hash_layers=frozenset())
    return [StreamLayer(own, 0, make, build_attention, build_moe)]


def _complete_drafter(config: DeepseekV4Config, make: Builder, *parts, **own) -> StreamDrafter:
    """Make the drafter of its parts, and of those that other drafters do not have."""
    drafter = StreamDrafter(*parts, **own)
    drafter.hidden_joint = make.linear("hidden_joint", config.hidden, config.hidden)
    drafter.collapse = StreamCollapse(config.streams, make, "collapse")
    return drafter


_DRAFTING = DraftForm(
    {
        "joint": "mtp.0.e_proj",
        "hidden_joint": "mtp.0.h_proj",
        "embedding_norm": "mtp.0.enorm",
        "hidden_norm": "mtp.0.hnorm",
        "layers": "mtp.0",
        "norm": "mtp.0.norm",
        "collapse.projection": "mtp.0.hc_head_fn",
        "collapse.bias": "mtp.0.hc_head_base",
        "collapse.scale": "mtp.0.hc_head_scale",
        "embedding": "mtp.0.emb.tok_emb.weight",
        "head": "mtp.0.head",
        "further.*": "mtp.*",
        "all": "mtp.0",
    },
    _build_drafting_layers,
    drafter=_complete_drafter,
    joined=1,
)
_RENAMED = {
    ".attn.indexer.compressor.": ".self_attn.compressor.indexer.",
    ".attn.indexer.weights_proj": ".self_attn.compressor.indexer.scorer.weights_proj",
    ".attn.indexer.": ".self_attn.compressor.indexer.",
    ".attn.": ".self_attn.",
    ".ffn.": ".mlp.",
    ".wq_a": ".q_a_proj",
    ".wq_b": ".q_b_proj",
    ".wkv": ".kv_proj",
    ".wgate": ".gate_proj",
    ".wo_b": ".o_b_proj",
    ".w1": ".gate_proj",
    ".w2": ".down_proj",
    ".w3": ".up_proj",
}
ARCHITECTURE = Architecture(
    read_config, build_model, build_moe, KEYS, drafting=_DRAFTING, renamed=_RENAMED
)
