"""What the decoder models share: cache, the loop of layers, embedding and head."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.core import Tracer
from jaxtyping import Array, Int32

from jax_nvfp4_moe.nn.attention import PADDING
from jax_nvfp4_moe.nn.building import Builder
from jax_nvfp4_moe.nn.dense import DenseLinear
from jax_nvfp4_moe.nn.division import say_replicated
from jax_nvfp4_moe.nn.gated_mlp import build_gated_mlp
from jax_nvfp4_moe.nn.keys import KeyTable
from jax_nvfp4_moe.nn.norm import RMSNorm
from jax_nvfp4_moe.ops.dense import dense
from jax_nvfp4_moe.parallel.expert_mesh import ExpertMesh, check_context
from jax_nvfp4_moe.parallel.shard_spec import ShardSpec
from jax_nvfp4_moe.parallel.tensor_parallel import gather_columns, look_up


@dataclasses.dataclass(frozen=True)
class Architecture:
    """One row of the table of architectures.

    Attributes:
      read_config: parsed ``config.json`` -> a frozen dataclass; CheckpointError says what is wrong.
      build_model: config, `Builder` -> `Decoder`.
      build_moe: config, layer, `Builder` -> `NVFP4MoE`.
      keys: path of a part of the model -> its name in the file; see `nn.keys`.
      moe: path of the expert block of a layer, ``*`` for its index.
    """

    read_config: Callable
    build_model: Callable
    build_moe: Callable
    keys: KeyTable
    moe: str = "layers.*.mlp"


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Cache:
    """What a model keeps of past tokens.

    Attributes:
      layers: for each layer, name -> array: keys and values ``[b, m, max_length, d]`` of m heads,
        or a recurrent state ``[b, ...]``.
      lengths: int32 ``[b]``, tokens taken in of each row. Keys and values past it may hold
        anything.
      max_length: static; tokens that there is room for.
    """

    layers: tuple[Mapping[str, jax.Array], ...]
    lengths: jax.Array
    max_length: int = dataclasses.field(metadata={"static": True})


class DecoderLayer(nnx.Module):
    """Attention and feed-forward, each on normalized input and added to the residual stream."""

    def __init__(self, attention_norm: RMSNorm, attention, mlp_norm: RMSNorm, mlp):
        """Make a layer of its four parts."""
        self.attention_norm, self.attention = attention_norm, attention
        self.mlp_norm, self.mlp = mlp_norm, mlp

    def init_cache(self, batch: int, max_length: int) -> Mapping[str, Array]:
        """Return empty cache entries of `batch` rows."""
        return self.attention.init_cache(batch, max_length)

    def __call__(self, x, positions, entries):
        """Run the layer on ``x [b, t, h]``; returns the result and the updated cache entries."""
        with jax.named_scope("attention"):
            y, entries = self.attention(self.attention_norm(x), positions, entries)
        x = x + y
        with jax.named_scope("mlp"):
            return x + self.mlp(self.mlp_norm(x)), entries


class Decoder(nnx.Module):
    """A causal language model: embedding, layers, norm, and logits over the vocabulary.

    Attributes:
      config: static; has vocab_size, hidden, num_layers, max_positions and eps.
      dtype: static; of activations, dense weights and cache.
      layers: of `DecoderLayer`, or others called in the same way.
      expert_mesh: static; where embedding and head are divided along the vocabulary, else None.
    """

    def __init__(
        self,
        config,
        embedding: nnx.Param,
        layers: Sequence[Any],
        norm: RMSNorm,
        head: Callable | None,
        *,
        dtype: Any,
        expert_mesh: ExpertMesh | None = None,
    ):
        """Make a model.

        Args:
          config: static; sizes.
          embedding: ``[v, h]``.
          layers, norm: parts.
          head: linear of the logits; None shares the embedding (tied).
          dtype: of activations, dense weights and cache.
          expert_mesh: devices along which embedding and head are divided by rows; None: they
            are not.
        """
        self.config = config
        self.dtype = jnp.dtype(dtype)
        self.embedding = embedding
        self.layers = nnx.List(list(layers))
        self.norm = norm
        self.head, self.expert_mesh = head, expert_mesh

    def init_cache(self, batch: int, max_length: int) -> Cache:
        """Return an empty cache for `batch` rows of up to `max_length` tokens.

        Raises:
          ValueError: a size is not positive.
        """
        if batch < 1 or max_length < 1:
            raise ValueError(f"cache: expected positive sizes, got {batch} rows of {max_length}")
        layers = tuple(layer.init_cache(batch, max_length) for layer in self.layers)
        return Cache(layers, jnp.zeros(batch, jnp.int32), max_length)

    def __call__(
        self,
        input_ids: Int32[Array, "b t"],
        cache: Cache | None = None,
        *,
        lengths: Int32[Array, " b"] | None = None,
        logits_at: Int32[Array, " b"] | None = None,
    ):
        """Return float32 logits ``[b, t, vocab]``, and the extended cache where one is given.

        Args:
          input_ids: from 0 to ``config.vocab_size - 1``.
          cache: each row's tokens follow those that it has taken in, and must fit.
          lengths: true tokens of each row, 0 to t, the rest being padding; t where None.
          logits_at: an index into t for each row: logits of that position alone, ``[b, 1, vocab]``.

        Values are checked where they are known: outside of ``jax.jit``, and of arrays that this
        process holds whole. Inside a trace nothing can be raised. There an id past the vocabulary
        is some id inside it or, over a mesh, a token of zeros; keys and values past the end of a
        full cache are dropped, so that later tokens do not see them; and positions past
        ``config.max_positions`` are computed as any other, beyond what the model was trained on.

        Raises:
          ValueError: a shape or dtype is wrong, ``jax.set_mesh`` has Explicit axes, or a value that
            is known is out of range: an id, a length, a token without room in the cache, or a
            position past ``config.max_positions``.
        """
        _check_call(input_ids, cache)
        _check_values(self.config, input_ids, cache, lengths)
        input_ids = jnp.asarray(input_ids, jnp.int32)  # int8 cannot index a large vocabulary
        lengths = None if lengths is None else jnp.asarray(lengths, jnp.int32)
        b, t = input_ids.shape
        start = jnp.zeros(b, jnp.int32) if cache is None else cache.lengths
        steps = jnp.arange(t, dtype=jnp.int32)[None, :]
        positions = start[:, None] + steps
        if lengths is not None:
            positions = jnp.where(steps < lengths[:, None], positions, PADDING + steps)
        table = self.embedding.get_value()
        check_context(table)
        if self.expert_mesh is None:
            x = table[input_ids]
        else:
            x = look_up(self.embedding, input_ids, self.expert_mesh)
        entries = []
        for index, layer in enumerate(self.layers):
            with jax.named_scope(f"layer_{index}"):
                x, entry = layer(x, positions, None if cache is None else cache.layers[index])
            entries.append(entry)
        if logits_at is not None:
            x = jnp.take_along_axis(x, logits_at[:, None, None], axis=1)
        logits = self._logits(self.norm(x))
        if cache is None:
            return logits
        grown = start + (t if lengths is None else lengths)
        return logits, Cache(tuple(entries), grown, cache.max_length)

    def _logits(self, x):
        head = self.embedding if self.head is None else self.head
        with jax.named_scope("head"):
            if self.expert_mesh is None:
                return _score(head, x)
            return gather_columns(_score, head, x, self.expert_mesh)


def _score(head, x):
    """Return float32 logits; `head` is a linear, or a variable whose rows are its weights."""
    if isinstance(head, DenseLinear) and head.bias is None:
        return dense(x, head.weight.get_value())
    if isinstance(head, nnx.Module):
        return head(x).astype(jnp.float32)
    return dense(x, head.get_value())


def _check_call(input_ids, cache):
    if input_ids.ndim != 2 or not jnp.issubdtype(input_ids.dtype, jnp.integer):
        raise ValueError(
            f"input_ids: expected integers [b, t], got {input_ids.dtype.name} {input_ids.shape}"
        )
    if cache is None:
        return
    rows, length = cache.lengths.shape[0], cache.max_length
    if input_ids.shape[0] != rows or input_ids.shape[1] > length:
        raise ValueError(
            f"input_ids: expected [{rows}, t] with t of at most {length}, as the cache has; "
            f"got {input_ids.shape}"
        )


def _known(array) -> np.ndarray | None:
    """Return the values of `array`; None while it is traced, or lies on other processes too."""
    if isinstance(array, Tracer) or not getattr(array, "is_fully_addressable", True):
        return None
    return np.asarray(array)


def _check_values(config, input_ids, cache, lengths):
    """Check ids, lengths, room in the cache and positions, as far as they are known."""
    b, t = input_ids.shape
    counts = np.full(b, t) if lengths is None else _known(lengths)
    if counts is None:
        return
    if counts.shape != (b,) or ((counts < 0) | (counts > t)).any():
        raise ValueError(f"lengths: expected {b} numbers from 0 to {t}, got {counts.tolist()}")
    ids = _known(input_ids)
    if ids is not None:
        _check_ids(ids[np.arange(t)[None, :] < counts[:, None]], config.vocab_size)
    taken = np.zeros(b, np.int32) if cache is None else _known(cache.lengths)
    if taken is not None:
        _check_room((taken + counts).max(initial=0), cache, config.max_positions)


def _check_ids(ids, vocabulary):
    if ids.size and (ids.min() < 0 or ids.max() >= vocabulary):
        raise ValueError(
            f"input_ids: expected ids from 0 to {vocabulary - 1}, the model's vocabulary; got "
            f"{ids.min()} to {ids.max()}"
        )


def _check_room(end, cache, positions):
    if cache is not None and end > cache.max_length:
        raise ValueError(
            f"cache: full; a row would hold {end} tokens and there is room for "
            f"{cache.max_length}. Make the cache longer with init_cache(batch, max_length)"
        )
    if end > positions:
        raise ValueError(
            f"input_ids: a row would reach {end} tokens, and the model has {positions} positions "
            "(max_position_embeddings)"
        )


def build_decoder(
    config, make: Builder, build_attention, build_moe, *, centered: bool = False
) -> Decoder:
    """Make a model of the usual shape, layer by layer, at the paths of `DECODER_KEYS`.

    Args:
      config: also has `dense_layers`, `dense_intermediate` and `tied`.
      make: builds the parts.
      build_attention: ``(config, layer, make)`` makes the attention of a layer.
      build_moe: makes the expert block of a layer in the same way.
      centered: whether the file's norms hold ``weight - 1``.
    """
    h, eps = config.hidden, config.eps

    def build_layer(layer):
        path = f"layers.{layer}"
        if layer in config.dense_layers:
            mlp = build_gated_mlp(make, f"{path}.mlp", h, config.dense_intermediate)
        else:
            mlp = build_moe(config, layer, make)
        return DecoderLayer(
            make.norm(f"{path}.attention_norm", h, eps, centered=centered),
            build_attention(config, layer, make),
            make.norm(f"{path}.mlp_norm", h, eps, centered=centered),
            mlp,
        )

    return build_around(config, make, build_layer, tied=config.tied, centered=centered)


def build_around(
    config: Any,
    make: Builder,
    build_layer: Callable[[int], Any],
    *,
    tied: bool,
    centered: bool = False,
) -> Decoder:
    """Make a model of layers: its embedding, the layers, the last norm, and the head.

    Embedding and head are divided by rows along `tensor` where that can be.

    Args:
      config: has vocab_size, hidden, num_layers and eps.
      make: builds the parts.
      build_layer: index -> layer.
      tied: whether the head shares the embedding.
      centered: whether the last norm holds ``weight - 1`` in the file.
    """
    settings, rows, h = make.settings, config.vocab_size, config.hidden
    expert_mesh, vocabulary = None, make
    if settings.shards > 1 and rows % settings.shards:
        say_replicated("the vocabulary", settings.shards, f"{rows} rows do not divide")
    elif settings.shards > 1:
        spec = ShardSpec("rows", settings.shards)
        vocabulary, rows = make.divided({"embedding": spec, "head": spec}), rows // settings.shards
        expert_mesh = settings.expert_mesh
    embedding = vocabulary.variable("embedding", (rows, h))
    layers = [build_layer(layer) for layer in range(config.num_layers)]
    norm = make.norm("norm", h, config.eps, centered=centered)
    head = None
    if tied:
        make.ignore("head", "the head shares the embedding")
    else:
        head = vocabulary.linear("head", rows, h)
    return Decoder(
        config, embedding, layers, norm, head, dtype=settings.dtype, expert_mesh=expert_mesh
    )
