"""Qwen4-Exp (Qwen3.8-Flash-Next), the language model.

It has the gated delta net and the gated attention of Qwen3-Next. An indexer chooses windows of
tokens for the attention. Gates connect the layers with several residual streams, to which some
layers add embeddings of the last few tokens.

Source: `modeling_qwen4_exp` and `configuration_qwen4_exp` of transformers.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from jax_nvfp4_moe.checkpoint.errors import quoted
from jax_nvfp4_moe.models import qwen3_next
from jax_nvfp4_moe.models.config import Fields
from jax_nvfp4_moe.models.decoder import Architecture, Decoder, build_around
from jax_nvfp4_moe.models.deepseek_v4 import StreamDecoder, Streams
from jax_nvfp4_moe.models.keys import DECODER_KEYS, delta_keys, gqa_keys, moe_keys
from jax_nvfp4_moe.nn.attention.grouped_query import build_heads
from jax_nvfp4_moe.nn.attention.indexer import IndexerSizes
from jax_nvfp4_moe.nn.attention.window_attention import WindowAttention, WindowConfig
from jax_nvfp4_moe.nn.building.builder import Builder
from jax_nvfp4_moe.nn.building.keys import KeyTable, below
from jax_nvfp4_moe.nn.gated_residual import GatedResidual, add_injected
from jax_nvfp4_moe.nn.hyper_connections import StreamSizes
from jax_nvfp4_moe.nn.ngram_embedding import size_table
from jax_nvfp4_moe.nn.recurrent.gated_delta_net import build_delta_net
from jax_nvfp4_moe.nn.recurrent.ngram_injection import InjectionSizes, NGramInjection
from jax_nvfp4_moe.numerics.casts import compute
from jax_nvfp4_moe.ops.state_window import StateWindow, run_tokens

_INDEXED, _FULL = "indexed_attention", "full_attention"
_MOST_HEADS, _LARGEST = 64, 8  # of embeddings of several tokens


@dataclasses.dataclass(frozen=True)
class Qwen4ExpConfig(qwen3_next.Qwen3NextConfig):
    """The sizes of a Qwen4-Exp model.

    Attributes:
      streams: the sizes of the residual streams.
      rank: the low rank of the gates that read the streams.
      injections: layer -> the sizes of its embeddings of several tokens, as pairs.
    """

    streams: StreamSizes
    rank: int
    injections: tuple[tuple[int, InjectionSizes], ...]


def read_config(config: Mapping[str, Any]) -> Qwen4ExpConfig:
    """Read a parsed ``config.json``, its ``text_config`` at the top level.

    Raises:
      CheckpointError: lists all values that are missing, wrong or not supported.
    """
    types = config.get("layer_types")
    if isinstance(types, list):
        own = [_FULL if kind == _INDEXED else kind for kind in types]
        config = {**config, "layer_types": own}
    fields = Fields(config)
    streams = StreamSizes(
        streams=fields.size("hc_count", default=4),
        hidden=fields.size("hidden_size"),
        rounds=1,
        eps=0.0,
        norm_eps=fields.number("rms_norm_eps", 1e-6),
    )
    fields.require(
        streams.streams > 1, f"hc_count: expected at least 2 streams, got {streams.streams}"
    )
    rank = fields.size("hc_lowrank", default=320)
    gates = (*qwen3_next.GATES, "sigmoid")
    gate = fields.only("output_gate_type", gates, qwen3_next.GATES[0])
    injections = _read_injections(fields, config, streams)
    indexer, rate = _read_indexer(fields)
    read = qwen3_next.read_sizes(
        fields,
        config,
        dense_layers=frozenset(),
        renormalize=fields.flag("norm_topk_prob", True),
        gates=gates,
    )
    _check_layers(read, indexer, injections)
    attention = WindowConfig(**vars(read.attention), indexer=indexer, rate=rate)
    delta = dataclasses.replace(read.delta, gate="sigmoid" if gate == "sigmoid" else "silu")
    sizes = vars(read) | {"attention": attention, "delta": delta}
    return Qwen4ExpConfig(**sizes, streams=streams, rank=rank, injections=injections)


def _read_indexer(fields) -> tuple[IndexerSizes, int]:
    """Return the sizes of the indexer, and the number of tokens of a window."""
    fields.only("indexer_kv_heads", (1,), 1)
    rate, count = fields.size("indexer_compress_ratio"), fields.size("indexer_budget")
    fields.multiple("indexer_budget", count, rate, "tokens of a window, indexer_compress_ratio")
    sizes = IndexerSizes(
        heads=fields.size("indexer_n_heads"),
        head_dim=fields.size("indexer_head_dim"),
        count=max(count // rate, 1),
        interleaved=False,
    )
    return sizes, rate


def _read_injections(fields, config, streams):
    """Return the layers with embeddings of several tokens, and their sizes."""
    layers = sorted(set(fields.indices("ple_layer_ids")))  # the first layer is 1
    count = fields.size("num_hidden_layers")
    fields.relate(
        all(0 < layer <= count for layer in layers),
        f"ple_layer_ids: expected layers from 1 to {count}, got {layers}",
    )
    if not layers:
        return ()
    end = config.get("eos_token_id")
    end = end[0] if isinstance(end, list) and end else end
    vocab = fields.size("vocab_size")
    fields.require(
        type(end) is int and 0 <= end < vocab,
        f"eos_token_id: expected a token below {vocab}, because embeddings of several tokens end "
        f"with a text; got {quoted(end)}",
    )
    largest, heads = fields.size("ngram_size", default=3), fields.size("heads_per_ngram", default=8)
    width = fields.size("ple_embed_dim", default=streams.hidden)
    each = (largest - 1) * heads
    fields.relate(
        1 < largest <= _LARGEST and each <= _MOST_HEADS and width % max(each, 1) == 0,
        f"ple_embed_dim: expected a multiple of {each} heads, for up to {_LARGEST} tokens and up "
        f"to {_MOST_HEADS} heads, got {width}",
    )
    sizes = {
        "vocab": vocab,
        "base": fields.size("ngram_vocab_size_base", default=20_000_000),
        "divisor": fields.size("make_ngram_vocab_size_divisible_by", default=128),
        "seed": fields.count("seed", 1234),
        "shards": fields.size("split_ngram_parts", default=512),
    }
    fields.relate(
        sizes["shards"] <= _SHARDS,
        f"split_ngram_parts: expected at most {_SHARDS} tensors, got {sizes['shards']}",
    )
    taps = fields.size("ple_conv_kernel_size", default=4)
    if fields.problems:
        return ()
    sizes |= {"largest": largest, "heads": heads, "width": width, "end": end}
    tables = (size_table(index=index, **sizes) for index in range(len(layers)))
    pairs = zip(layers, tables, strict=True)
    return tuple((layer - 1, InjectionSizes(streams, table, taps)) for layer, table in pairs)


def _check_layers(read, indexer, injections):
    """Check the sizes that follow from several fields."""
    fields = Fields({})
    rotated = 2 * len(read.attention.rope.frequencies)
    fields.require(
        indexer.head_dim >= rotated,
        f"indexer_head_dim: expected at least {rotated} rotated channels, got {indexer.head_dim}",
    )
    wrong = [layer + 1 for layer, _ in injections if layer in read.attention_layers]
    fields.require(not wrong, f"ple_layer_ids: expected layers with linear attention, got {wrong}")
    fields.finish()


class Layer(nnx.Module):
    """A mixer and experts, with gates to the residual streams around both.

    Attributes:
      injection: adds embeddings of the last tokens first; None if the layer has none.
      attention_residual: reads and writes the streams around the mixer.
      attention: the mixer.
      mlp_residual: reads and writes the streams around the experts.
      mlp: the expert block.
    """

    def __init__(self, config: Qwen4ExpConfig, layer: int, make: Builder):
        """Build the layer with the index `layer`."""
        path, sizes, rank = f"layers.{layer}", config.streams, config.rank
        own = dict(config.injections).get(layer)
        self.injection = own and NGramInjection(own, make, f"{path}.injection")
        self.attention_residual = GatedResidual(sizes, rank, make, f"{path}.attention_residual")
        self.attention = build_mixer(config, layer, make)
        self.mlp_residual = GatedResidual(sizes, rank, make, f"{path}.mlp_residual")
        self.mlp = build_moe(config, layer, make)

    def init_cache(self, batch: int, max_length: int) -> Mapping[str, Array]:
        """Return the empty cache entries of `batch` rows."""
        own = {} if self.injection is None else self.injection.init_cache(batch, max_length)
        return {**self.attention.init_cache(batch, max_length), **own}

    def __call__(self, stream: Streams, positions, entries) -> tuple[Streams, Any]:
        """Run the layer with the arguments and results of `DecoderLayer`.

        In a layer with embeddings of several tokens, tokens whose states are kept are read one by
        one.
        """
        if self.injection is not None and isinstance(entries, StateWindow):
            x, entries = run_tokens(self._run, entries, dict, *stream, positions)
        else:
            x, entries = self._run(*stream, positions, entries)
        return Streams(x, stream.ids), entries

    def _run(self, x, ids, positions, entries):
        """Return the streams and the cache entries."""
        kept = {}
        if self.injection is not None:
            states = self.injection.states
            own = None if entries is None else {name: entries[name] for name in states}
            if entries is not None:
                entries = {name: one for name, one in entries.items() if name not in states}
            with jax.named_scope("injection"):
                added, own = self.injection(x, positions, own, ids)
                x, kept = compute(jnp.add, x, added), own or {}
        with jax.named_scope("attention"):
            read, factors = self.attention_residual(x)
            y, entries = self.attention(read, positions, entries)
            x = add_injected(x, y, factors)
        with jax.named_scope("mlp"):
            read, factors = self.mlp_residual(x)
            x = add_injected(x, self.mlp(read), factors)
        return x, {**entries, **kept} if kept else entries


class Qwen4ExpDecoder(StreamDecoder):
    """A decoder of several residual streams, which a gate reads before the head."""

    def close_stream(self, stream: Streams) -> Float[Array, "b t h"]:
        """Return the vectors of what leaves the last layer, as the head reads them."""
        return self.norm(stream.x)[0]


def build_mixer(config: Qwen4ExpConfig, layer: int, make: Builder):
    """Make the attention or the gated delta net of `layer`.

    Its heads are sharded along the mesh axis `tensor`.
    """
    path = f"layers.{layer}.attention"
    if layer in config.attention_layers:
        return build_heads(config.attention, path, make, WindowAttention)
    return build_delta_net(config.delta, path, make)


def build_moe(config: Qwen4ExpConfig, layer: int, make: Builder):
    """Make the expert block of `layer`; raises the errors of `qwen3_next.build_moe`."""
    return qwen3_next.build_moe(config, layer, make)


def build_model(config: Qwen4ExpConfig, make: Builder) -> Decoder:
    """Make the whole model."""

    def build_layer(layer):
        return Layer(config, layer, make)

    last = GatedResidual(config.streams, config.rank, make, "norm", writes=False)
    return build_around(
        config, make, build_layer, tied=config.tied, norm=last, decoder=Qwen4ExpDecoder
    )


_LAYER = "model.layers.*"
_RESIDUAL = {
    "norm.offset": "hc_norm.weight",
    "down": "input_mix_weight_down",
    "up": "input_mix_weight_up",
    "inject": "block_inject_weight",
}
_INDEXER = {
    "queries_and_key": "index_qk_proj",
    "query_norm": "q_layernorm",
    "pool.norm": "k_layernorm",
}
_EMBEDDING = "ple_embedding.ngram_embedding"
_SHARDS = 1024  # the largest number of tensors of one table
_INJECTION = {
    "key": "key_proj",
    "value": "value_proj",
    "key_norm.offset": "norm_key.weight",
    "query_norm.offset": "norm_query.weight",
    "conv_norm.offset": "norm_conv.weight",
    "conv_weight": "conv1d.weight",
    "table": f"{_EMBEDDING}.weight",
    **{f"table.shard_{n}": f"{_EMBEDDING}.shard_{n}.weight" for n in range(_SHARDS)},
    "multipliers": "ple_embedding.layer_multipliers",
    "offsets": "ple_embedding.ngram_heads_offsets",
    "primes": "ple_embedding.ngram_heads_vocab_sizes",
}
KEYS: KeyTable = {
    **{name: DECODER_KEYS[name] for name in ("embedding", "head")},
    **below("norm", "model.hyper_connection_mixer", _RESIDUAL),
    **below("layers.*.attention_residual", f"{_LAYER}.attn_hyper_connection", _RESIDUAL),
    **below("layers.*.mlp_residual", f"{_LAYER}.mlp_hyper_connection", _RESIDUAL),
    **gqa_keys("layers.*.attention", f"{_LAYER}.self_attn"),
    **below("layers.*.attention.indexer", f"{_LAYER}.self_attn.indexer", _INDEXER),
    **delta_keys("layers.*.attention", f"{_LAYER}.linear_attn"),
    **below("layers.*.injection", f"{_LAYER}.ple", _INJECTION),
    **moe_keys(f"{_LAYER}.mlp", shared="shared_expert"),
    "layers.*.mlp.shared_gate": f"{_LAYER}.mlp.shared_expert_gate",
}
ARCHITECTURE = Architecture(read_config, build_model, build_moe, KEYS)
