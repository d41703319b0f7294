"""What all decoder models share: the cache, the loop over layers, the embedding and the head."""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.core import Tracer
from jaxtyping import Array, DTypeLike, Float, Int32

from jax_nvfp4_moe.models.draft_head import round_head
from jax_nvfp4_moe.models.drafter import Drafter
from jax_nvfp4_moe.models.scores import TokenScores, score_targets
from jax_nvfp4_moe.nn.building.builder import Bias, Builder
from jax_nvfp4_moe.nn.building.keys import KeyTable
from jax_nvfp4_moe.nn.building.projection_names import ProjectionNames
from jax_nvfp4_moe.nn.building.sharding import say_replicated
from jax_nvfp4_moe.nn.experts.gated_mlp import build_gated_mlp
from jax_nvfp4_moe.nn.indexed_tuple import register_indexed
from jax_nvfp4_moe.nn.linear.dense_linear import DenseLinear
from jax_nvfp4_moe.nn.linear.fp8_linear import FP8Linear
from jax_nvfp4_moe.nn.linear.lora import add_adapter, weight_with_adapters
from jax_nvfp4_moe.nn.norm import Norm, Residual
from jax_nvfp4_moe.nn.packing import find_places, is_unpacked, pack, pack_like, unpack
from jax_nvfp4_moe.nn.variables import read_bias
from jax_nvfp4_moe.numerics.auto_axes import find_explicit_mesh, on_auto_axes
from jax_nvfp4_moe.ops.dense import dense
from jax_nvfp4_moe.ops.moves import read_rows
from jax_nvfp4_moe.ops.positions import PADDING
from jax_nvfp4_moe.ops.state_window import StateWindow
from jax_nvfp4_moe.parallel.expert_mesh import ExpertMesh, check_context
from jax_nvfp4_moe.parallel.shard_spec import ShardSpec
from jax_nvfp4_moe.parallel.tensor_parallel import HeadParallel, gather_columns, look_up

# A cache may have room for so many tokens more than the model has positions, because callers round
# lengths up. `generate` rounds a prompt up to a multiple of 512, and its new tokens to one of 64.
CACHE_ROUNDING = 1024


@dataclasses.dataclass(frozen=True)
class Architecture:
    """One row of the table of supported architectures.

    Attributes:
      read_config: takes a parsed ``config.json`` and returns the sizes, a frozen dataclass. It
        raises `CheckpointError` if values are wrong.
      build_model: takes the sizes and a `Builder`, and returns a `Decoder`.
      build_moe: takes the sizes, the index of a layer and a `Builder`, and returns an `NVFP4MoE`.
      keys: the path of a part of the model -> its name in the file; see `nn.building.keys`.
      moe: the path of a layer's expert block, with ``*`` in place of the layer's index.
      drafting: how files store drafting layers, a `drafting_layers.DraftForm`. None if those of
        the architecture are not read.
      renamed: text in the name of a linear layer in files -> the text that transformers 5 has in
        its place, in the order in which they are replaced. Adapters have transformers' names.
      swaps_experts: whether PEFT takes the inputs of experts for outputs, because transformers
        stores them first and does not say so. False by default.
    """

    read_config: Callable
    build_model: Callable
    build_moe: Callable
    keys: KeyTable
    moe: str = "layers.*.mlp"
    drafting: Any = None
    renamed: Mapping[str, str] = dataclasses.field(default_factory=dict)
    swaps_experts: bool = False


@register_indexed
@dataclasses.dataclass(frozen=True)
class Cache(tuple):
    """What a model stores about the tokens that it has read.

    A cache is also the tuple of its three attributes, because `nnx.tabulate` shows only tuples,
    lists and dictionaries.

    Attributes:
      layers: one mapping per layer, name -> array. Attention stores keys and values ``[b, m,
        max_length, d]`` with m heads; a recurrent mixer stores its state ``[b, ...]``. After
        `Decoder.open_window`, layers with states have a `StateWindow` in its place.
      lengths: int32 ``[b]``, the number of tokens that each row has read. Keys and values beyond
        that number have no meaning.
      max_length: the number of tokens that the cache has room for. This field is static.
    """

    STATIC: ClassVar[int] = 1  # `max_length`

    layers: tuple[Any, ...]
    lengths: jax.Array
    max_length: int

    def __new__(cls, layers, lengths, max_length):
        """Make the tuple; the dataclass then sets the attributes."""
        return super().__new__(cls, (layers, lengths, max_length))

    def __getnewargs__(self):
        """Return the arguments of `__new__` for `copy` and `pickle`."""
        return tuple(self)


class DecoderLayer(nnx.Module):
    """Attention and feed-forward, each with a norm before it and a residual connection around it.

    ``x = x + attention(attention_norm(x)); y = x + mlp(mlp_norm(x))``

    Attributes:
      attention_norm: the norm before the attention.
      attention: the attention, or another mixer of tokens.
      mlp_norm: the norm before the feed-forward.
      mlp: a dense MLP or an expert block.
    """

    def __init__(self, attention_norm: Norm, attention, mlp_norm: Norm, mlp):
        """Make a layer of its four parts."""
        self.attention_norm, self.attention = attention_norm, attention
        self.mlp_norm, self.mlp = mlp_norm, mlp

    def init_cache(self, batch: int, max_length: int) -> Mapping[str, Array]:
        """Return the empty cache entries of `batch` rows."""
        return self.attention.init_cache(batch, max_length)

    def __call__(self, stream: Any, positions, entries) -> tuple[Any, Any]:
        """Run the layer.

        Args:
          stream: the `Residual` stream ``[b, t, h]``, or packed as `nn.packing` describes.
          positions: int32 ``[b, t]``, the position of each token in its row.
          entries: the layer's cache entries. None runs without a cache.

        Returns:
          The stream with the result of the layer, and the updated cache entries.
        """
        with jax.named_scope("attention"):
            x, normal = self.attention_norm.normalize_sum(stream)
            y, entries = self.attention(normal, positions, entries)
        with jax.named_scope("mlp"):
            x, normal = self.mlp_norm.normalize_sum(Residual(x, y))
            return Residual(x, self.mlp(normal)), entries


class Decoder(nnx.Module):
    """A causal language model: embedding, layers, norm, and logits over the vocabulary.

    Attributes:
      config: the sizes, with vocab_size, hidden, num_layers, max_positions and eps. Static.
      dtype: the dtype of activations, dense weights and cache. Static.
      embedding: ``[v, h]``.
      layers: `DecoderLayer` modules, or modules with the same methods.
      norm: the norm before the head.
      head: the linear that makes logits. None means that the embedding's weights make them.
      expert_mesh: the mesh over which embedding and head are sharded along the vocabulary. None
        means that they are not sharded. Static.
      stop_ids: the ids that end a text, which `generate` takes unless it is given others.
        `load_model` reads them from the checkpoint; otherwise there are none. Static.
      rows_mesh: the mesh whose axis `data` shards the rows of a batch. None, the default, means
        that they are not sharded. Static.
      drafter: the drafting layers, which `draft` runs. None, the default, if they were not loaded.
      projection_names: the names of the linear layers in transformers, which `add_lora` and the
        files of adapters use. None, the default, if the model was not loaded. Static.
    """

    # The parts beside the embedding that `open_stream` runs. Calibration watches their linears.
    opening_parts: ClassVar[tuple[str, ...]] = ()
    rows_mesh: ExpertMesh | None = None
    drafter: Drafter | None = None
    projection_names: ProjectionNames | None = None

    def __init__(
        self,
        config,
        embedding: nnx.Param,
        layers: Sequence[Any],
        norm: Norm,
        head: Callable | None,
        *,
        dtype: DTypeLike,
        expert_mesh: ExpertMesh | None = None,
    ):
        """Make a model of its parts.

        Args:
          config: the sizes. Static.
          embedding: ``[v, h]``.
          layers: the layers.
          norm: the norm before the head.
          head: the linear that makes logits. None uses the weights of the embedding (tied).
          dtype: the dtype of activations, dense weights and cache.
          expert_mesh: the mesh over which the rows of embedding and head are sharded. None means
            that they are not sharded.
        """
        self.config = config
        self.dtype = jnp.dtype(dtype)
        self.embedding = embedding
        self.layers = nnx.List(list(layers))
        self.norm = norm
        self.head, self.expert_mesh = head, expert_mesh
        self.stop_ids: tuple[int, ...] = ()

    def init_cache(self, batch: int, max_length: int) -> Cache:
        """Return an empty cache for `batch` rows of up to `max_length` tokens.

        `batch` may be 0.

        Raises:
          ValueError: `batch` is negative, `max_length` is not positive, or it is so far beyond
            ``config.max_positions`` that the model cannot fill the cache.
        """
        _check_cache_size(self.config, batch, max_length)
        layers = tuple(layer.init_cache(batch, max_length) for layer in self.layers)
        return self._shard_rows(Cache(layers, jnp.zeros(batch, jnp.int32), max_length))

    def open_window(self, cache: Cache, size: int) -> Cache:
        """Return a cache in which `rewind` can go back by up to `size` tokens.

        What is stored by position stays as it is. Recurrent states get room for the states after
        each of the last `size` tokens; calls that read more tokens at once are then an error.

        Args:
          cache: a cache of this model.
          size: the largest number of tokens of one call.
        """
        layers = tuple(
            StateWindow.open(entries, _state_names(layer), size)
            for layer, entries in zip(self.layers, cache.layers, strict=True)
        )
        return self._shard_rows(Cache(layers, cache.lengths, cache.max_length))

    def close_window(self, cache: Cache) -> Cache:
        """Return a cache of `open_window` as a plain one, for calls that read many tokens."""
        layers = tuple(
            entries.current() if isinstance(entries, StateWindow) else entries
            for entries in cache.layers
        )
        return self._shard_rows(Cache(layers, cache.lengths, cache.max_length))

    def rewind(self, cache: Cache, kept: Int32[Array, " b"], read: int) -> Cache:
        """Return the cache as if the last call had read the first `kept` tokens of each row only.

        Args:
          cache: a cache of `open_window`, after a call that has read `read` tokens in each row.
          kept: int32 ``[b]``, from 1 to `read`. 0 is allowed for rows that read nothing more.
          read: the number of tokens of the last call.
        """
        layers = tuple(
            entries.keep(kept) if isinstance(entries, StateWindow) else entries
            for entries in cache.layers
        )
        lengths = cache.lengths - read + kept
        return self._shard_rows(Cache(layers, lengths, cache.max_length))

    def init_draft_cache(self, batch: int, max_length: int) -> Cache:
        """Return an empty cache for `draft`; the arguments and errors are those of `init_cache`.

        Raises:
          ValueError: the model has no drafting layers, or an argument is wrong.
        """
        _check_cache_size(self.config, batch, max_length)
        layers = _require_drafter(self).init_cache(batch, max_length)
        return self._shard_rows(Cache(layers, jnp.zeros(batch, jnp.int32), max_length))

    def _shard_rows(self, tree):
        """Return arrays whose rows are sharded along `data`, on a mesh that does so."""
        return tree if self.rows_mesh is None else self.rows_mesh.shard_rows(tree)

    def __call__(
        self,
        input_ids: Int32[Array, "b t"],
        cache: Cache | None = None,
        *,
        lengths: Int32[Array, " b"] | None = None,
        logits_at: Int32[Array, " b"] | None = None,
        num_tokens: int | None = None,
        with_hidden: bool = False,
        remat: bool = False,
    ):
        """Return float32 logits ``[b, t, vocab]``, and with a cache also the updated cache.

        Args:
          input_ids: ``[b, t]`` of any integer dtype, from 0 to ``config.vocab_size - 1``. b and t
            may be 0. Without tokens, the cache stays as it is.
          cache: what the model has read before. The new tokens follow in each row, and the cache
            must have room for them. None, the default, reads `input_ids` as whole sequences.
          lengths: int32 ``[b]``, the number of true tokens in each row, from 0 to t. The other
            tokens are padding. None, the default, means t in every row.
          logits_at: int32 ``[b]``, one index into t for each row. The logits are then those of that
            position alone, ``[b, 1, vocab]``. None, the default, returns the logits of all
            positions.
          num_tokens: a Python integer, at least the number of true tokens of all rows together.
            Norms, linear layers and experts then compute so many tokens, without the rest of the
            padding. None, the default, computes all tokens. Has no effect without `lengths`, or
            if a mesh shards the rows.
          with_hidden: whether the second result is the normalized vectors ``[b, t, h]``, of which
            the head makes logits. They are those of all positions, whatever `logits_at` is. With
            drafting layers of DeepSeek-V4, they are the residual streams that `draft` reads, ``[b,
            t, n * h]``. False by default.
          remat: whether a backward pass computes each layer again. It then keeps what enters each
            layer, and not what the layers compute inside, which takes most of the memory of a
            training step. Results do not change. False by default.

        Values are checked if they are known: outside of ``jax.jit``, and for arrays that this
        process holds as a whole. A trace cannot raise an error for a value. Inside a trace, values
        that are out of range have these effects:

        * An id beyond the vocabulary is read as some other id or, over a mesh, as a token of zeros.
        * Keys and values beyond the end of a full cache are dropped, and later tokens do not see
          them.
        * A position beyond ``config.max_positions`` is computed like any other, although the model
          was not trained for it.
        * If there are more true tokens than `num_tokens`, the results of the last rows are wrong.

        Raises:
          ValueError: a shape or dtype is wrong, ``jax.set_mesh`` has Explicit axes, or a known
            value is out of range: an id, a length, their sum, a token without room in the cache, or
            a position beyond ``config.max_positions``.
        """
        _check_call(input_ids, cache)
        how = {"num_tokens": num_tokens, "with_hidden": with_hidden, "remat": remat}
        run = functools.partial(Decoder._call, **how)
        return _run_on_any_mesh(run, self, input_ids, cache, lengths, logits_at)

    def _call(self, input_ids, cache, lengths, logits_at, *, num_tokens, with_hidden, remat):
        """Compute `__call__`."""
        stream, positions, cache = self._read(input_ids, cache, lengths, num_tokens, remat)
        if logits_at is None:
            x = self.close_stream(stream)
            results = [unpack(self._logits(x), positions)]
        else:
            x = self.close_stream(stream) if with_hidden else None
            last = self.close_stream(_take_one(stream, positions, logits_at))
            results = [self._logits(last)]
        if with_hidden:
            results.append(unpack(self.drafted_from(stream, x), positions))
        results = self._shard_rows(results)
        results += [] if cache is None else [cache]
        return tuple(results) if results[1:] else results[0]

    def drafted_from(self, stream: Any, x: Any) -> Array:
        """Return the vectors with which drafts are made: `x`, what `close_stream` has returned."""
        del stream
        return x

    def draft(
        self,
        hidden: Float[Array, "b t h"],
        next_ids: Int32[Array, "b t"],
        cache: Cache,
        *,
        lengths: Int32[Array, " b"] | None = None,
        logits_at: Int32[Array, " b"] | None = None,
    ):
        """Predict the token after next with the drafting layers, from `load_model(draft="mtp")`.

        A pair is the vector of token i and the id of token i + 1. It has the position of token i,
        and its logits predict token i + 2. The cache holds what the drafting layers have read; the
        new pairs follow in each row, at positions ``cache.lengths + 0 .. t - 1``.

        Args:
          hidden: the model's vectors, from a call with ``with_hidden=True``; or for a token
            further, the vectors that this method has returned.
          next_ids: the id of the token that follows each vector, of any integer dtype.
          cache: from `init_draft_cache`, or from an earlier call of this method.
          lengths: the number of true pairs in each row, as for a call of the model.
          logits_at: one index into t for each row, as for a call of the model.

        Returns:
          Float32 logits ``[b, t, vocab]``, or ``[b, 1, vocab]`` with `logits_at`; the vectors ``[b,
          t, h]`` to draft a token further with; and the updated cache. The logits are those of the
          rounded head that `load_model` has made, if it has made one.

        Raises:
          ValueError: the model has no drafting layers; otherwise as for a call of the model.
        """
        streams = _require_drafter(self).streams
        _check_call(next_ids, cache, "next_ids")
        expected = (*next_ids.shape, streams * self.config.hidden)
        if hidden.shape != expected or not jnp.issubdtype(hidden.dtype, jnp.floating):
            raise ValueError(
                f"hidden: expected floats {expected}, a vector for each of next_ids; got "
                f"{hidden.dtype.name} {hidden.shape}"
            )
        return _run_on_any_mesh(Decoder._draft, self, next_ids, hidden, cache, lengths, logits_at)

    def _draft(self, next_ids, hidden, cache, lengths, logits_at):
        """Compute `draft`."""
        _check_values(self.config, next_ids, cache, lengths, None, "next_ids")
        drafter = _require_drafter(self)
        next_ids, positions, read = self._place(next_ids, cache, lengths)
        hidden = self._shard_rows(hidden.astype(self.dtype))
        if drafter.embedding is None:
            embedded = self.embed(self.embedding.get_value(), next_ids)
        else:
            embedded = self._look_up(drafter.embedding, drafter.embedding.get_value(), next_ids)
        hidden, x, entries = drafter(embedded, hidden, positions, cache.layers)
        if logits_at is not None:
            x = _take_one(Residual(x), positions, logits_at).x
        head = drafter.head if drafter.rounded_head is None else drafter.rounded_head
        logits = self._logits(x) if head is None else self._multiply(head, x)
        return self._shard_rows((logits, hidden, Cache(entries, read, cache.max_length)))

    def derive_weights(self) -> None:
        """Compute the weights that `save` leaves out; `restore` calls it."""
        if self.drafter is not None and self.drafter.rounded_head is not None:
            round_head(self)

    def forget_drafts(self, read: Cache, drafted: Cache) -> Cache:
        """Return the cache `read` of `draft`, in the memory of a later one.

        Args:
          read: the cache after pairs that stay.
          drafted: the cache after further pairs, which the next calls overwrite.
        """
        layers = []
        for layer, old, new in zip(
            _require_drafter(self).layers, read.layers, drafted.layers, strict=True
        ):
            states = _state_names(layer)
            layers.append({**new, **{name: old[name] for name in old if name in states}})
        return Cache(tuple(layers), read.lengths, read.max_length)

    def score(
        self,
        input_ids: Int32[Array, "b t"],
        targets: Int32[Array, "b t"],
        cache: Cache | None = None,
        *,
        lengths: Int32[Array, " b"] | None = None,
        num_tokens: int | None = None,
        remat: bool = False,
    ):
        """Return how the model predicts `targets`, without all logits in memory.

        ``scores.log_probability[b, t] = log_softmax(model(input_ids)[b, t])[targets[b, t]]``

        A backward pass computes the logits again, a piece at a time. The mean of
        ``-scores.log_probability`` is therefore the loss that takes the least memory.

        Args:
          input_ids: as in a call of the model.
          targets: the token that follows each token, ``[b, t]`` of any integer dtype. For padding,
            any token of the vocabulary; its scores are undefined.
          cache: as in a call of the model, by default None.
          lengths: as in a call of the model, by default None.
          num_tokens: as in a call of the model, by default None.
          remat: as in a call of the model, by default False.

        Returns:
          `TokenScores`, and with a cache also the updated cache.

        Raises:
          ValueError: as in a call of the model; or the shape of `targets` is wrong, or a known
            target is not in the vocabulary.
        """
        _check_call(input_ids, cache)
        _check_targets(self.config, targets, input_ids)
        run = functools.partial(Decoder._score_targets, num_tokens=num_tokens, remat=remat)
        return _run_on_any_mesh(run, self, input_ids, targets, cache, lengths)

    def _score_targets(self, input_ids, targets, cache, lengths, *, num_tokens, remat):
        """Compute `score`."""
        stream, positions, cache = self._read(input_ids, cache, lengths, num_tokens, remat)
        x = self.close_stream(stream)
        targets = pack_like(jnp.asarray(targets, jnp.int32), positions, x)
        scores = score_targets(self._logits, x, targets)
        scores = TokenScores(*(unpack(each, positions) for each in scores))
        return scores if cache is None else (scores, cache)

    def _read(self, input_ids, cache, lengths, num_tokens, remat):
        """Run the layers; return what leaves the last one, the positions and the updated cache."""
        _check_values(self.config, input_ids, cache, lengths, num_tokens)
        input_ids, positions, read = self._place(input_ids, cache, lengths)
        b, t = input_ids.shape
        table = self.embedding.get_value()
        packs = lengths is not None and num_tokens is not None and num_tokens < b * t
        # Packed tokens of all rows have no rows that a mesh could shard.
        packs = packs and (self.rows_mesh is None or self.rows_mesh.rows(b) is None)
        packed = pack(input_ids, positions, max(num_tokens, 1) if packs else None)
        stream = self.open_stream(table, packed)
        entries = []
        for index, layer in enumerate(self.layers):
            with jax.named_scope(f"layer_{index}"):
                entry = None if cache is None else cache.layers[index]
                run = jax.checkpoint(layer.__call__) if remat else layer
                stream, entry = run(stream, positions, entry)
            entries.append(entry)
        if cache is not None:
            cache = self._shard_rows(Cache(tuple(entries), read, cache.max_length))
        return stream, positions, cache

    def _place(self, input_ids, cache, lengths):
        """Return ids as int32, the positions of their tokens, and how many each row then has."""
        input_ids = jnp.asarray(input_ids, jnp.int32)  # int8 cannot index a large vocabulary
        lengths = None if lengths is None else jnp.asarray(lengths, jnp.int32)
        input_ids, lengths = self._shard_rows((input_ids, lengths))
        b, t = input_ids.shape
        start = jnp.zeros(b, jnp.int32) if cache is None else cache.lengths
        steps = jnp.arange(t, dtype=jnp.int32)[None, :]
        positions = start[:, None] + steps
        if lengths is not None:
            positions = jnp.where(steps < lengths[:, None], positions, PADDING + steps)
        return input_ids, positions, start + (t if lengths is None else lengths)

    def embed(self, table, input_ids):
        """Return the vectors of tokens ``[b, t, h]``; `table` is the embedding's value."""
        return self._look_up(self.embedding, table, input_ids)

    def _look_up(self, embedding, table, input_ids):
        """Return rows of an embedding, of which `table` is the value."""
        if self.expert_mesh is None:
            return read_rows(table, input_ids, self.norm.target)
        return look_up(embedding, input_ids, self.expert_mesh)

    def open_stream(self, table: Array, input_ids: Int32[Array, "b t"]) -> Any:
        """Return what enters the first layer: a tuple of arrays ``[b, t, ...]``.

        Its field `x` has the vectors of the tokens.

        Args:
          table: the embedding's value.
          input_ids: the tokens, in their rows or packed.
        """
        return Residual(self.embed(table, input_ids))

    def close_stream(self, stream: Any) -> Array:
        """Return the normalized vectors ``[b, t, h]`` of what leaves the last layer."""
        return self.norm.normalize_sum(stream)[1]

    def _logits(self, x):
        """Return the logits of ``x [b, t, h]``, which the last norm has normalized."""
        return self._multiply(self.embedding if self.head is None else self.head, x)

    def _multiply(self, head, x):
        """Return the products of ``x [b, t, h]`` with a head, or with the rows of an embedding."""
        score = functools.partial(_score, target=self.norm.target)
        with jax.named_scope("head"):
            if self.expert_mesh is None:
                return score(head, x)
            return gather_columns(score, head, x, self.expert_mesh)


def _state_names(layer) -> frozenset[str]:
    """Return the names of those cache entries of a layer that are not stored by position."""
    mixers = (part for _, part in nnx.iter_modules(layer) if isinstance(part, HeadParallel))
    return frozenset(name for mixer in mixers for name in mixer.states)


def _run_on_any_mesh(run, model, input_ids, *operands):
    """Return ``run(model, input_ids, *operands)``, as with Auto axes if the mesh has Explicit axes.

    A model with a mesh of its own has turned the Explicit axes of that mesh into Auto axes.
    """
    table = model.embedding.get_value()
    check_context(table)
    if model.expert_mesh is not None or find_explicit_mesh((input_ids, table)) is None:
        return run(model, input_ids, *operands)
    leaves, tree = jax.tree.flatten(model)

    def call(input_ids, leaves, operands):
        return run(tree.unflatten(leaves), input_ids, *operands)

    return on_auto_axes(call, features=0)(input_ids, leaves, operands)


def _score(head, x, *, target):
    """Return float32 logits.

    `head` is a linear, or the embedding variable, whose rows are then the linear's weights.
    """
    if isinstance(head, DenseLinear):
        weight = weight_with_adapters(head, head.adapter)
        logits = dense(x, weight, bias=read_bias(head), target=target)
        return add_adapter(head, x, logits)
    if isinstance(head, FP8Linear):
        return head.in_float32(x)
    if isinstance(head, nnx.Module):
        return head(x).astype(jnp.float32)
    return dense(x, head.get_value(), target=target)


def _take_one(stream, positions, at):
    """Return what the last layer hands on ``[b, 1, ...]``, at indices `at` of the rows."""
    at = at[:, None]
    if is_unpacked(stream.x, positions):
        return jax.tree.map(
            lambda x: jnp.take_along_axis(x, jnp.expand_dims(at, range(2, x.ndim)), axis=1), stream
        )
    places = jnp.take_along_axis(find_places(positions), at, axis=1)
    return jax.tree.map(lambda x: x[0][places], stream)


def _require_drafter(model) -> Drafter:
    """Return the drafting layers of a model, which must have some."""
    if model.drafter is None:
        raise ValueError(
            "the model has no drafting layers; load it with load_model(path, draft='mtp'), if the "
            "checkpoint has them"
        )
    return model.drafter


def _check_cache_size(config, batch, max_length):
    """Check the arguments of `init_cache`."""
    if batch < 0 or max_length < 1:
        raise ValueError(
            "cache: expected a batch of 0 rows or more and a positive max_length, got batch "
            f"{batch} and max_length {max_length}"
        )
    longest = config.max_positions + CACHE_ROUNDING
    if max_length > longest:
        raise ValueError(
            f"max_length: expected at most {longest}, which is the model's {config.max_positions} "
            f"positions by its config.json and {CACHE_ROUNDING} more for lengths that are rounded "
            f"up; got {max_length}"
        )


def _check_call(input_ids, cache, name="input_ids"):
    """Check the shapes and the dtype of a call."""
    if input_ids.ndim != 2 or not jnp.issubdtype(input_ids.dtype, jnp.integer):
        raise ValueError(
            f"{name}: expected integers [b, t], got {input_ids.dtype.name} {input_ids.shape}"
        )
    if cache is None:
        return
    rows, length = cache.lengths.shape[0], cache.max_length
    if input_ids.shape[0] != rows or input_ids.shape[1] > length:
        raise ValueError(
            f"{name}: expected shape [{rows}, t] with t up to {length}, because the cache has "
            f"{rows} rows of {length} tokens; got {input_ids.shape}"
        )


def _check_targets(config, targets, input_ids):
    """Check the tokens to score: their shape, and their values if they are known."""
    if targets.shape != input_ids.shape or not jnp.issubdtype(targets.dtype, jnp.integer):
        raise ValueError(
            f"targets: expected integers {input_ids.shape}, one for each of input_ids; got "
            f"{targets.dtype.name} {targets.shape}"
        )
    known = _known(targets)
    if known is not None:
        _check_ids(known, config.vocab_size, "targets")


def _known(array) -> np.ndarray | None:
    """Return the values of `array`, or None if they are not known.

    They are unknown while the array is traced, or if other processes hold a part of it.
    """
    if isinstance(array, Tracer) or not getattr(array, "is_fully_addressable", True):
        return None
    return np.asarray(array)


def _check_values(config, input_ids, cache, lengths, num_tokens, name="input_ids"):
    """Check those ids, lengths, ends of rows and positions whose values are known."""
    b, t = input_ids.shape
    counts = np.full(b, t) if lengths is None else _known(lengths)
    if counts is None:
        return
    if counts.shape != (b,) or ((counts < 0) | (counts > t)).any():
        raise ValueError(f"lengths: expected {b} integers from 0 to {t}, got {counts.tolist()}")
    if lengths is not None and num_tokens is not None and counts.sum() > num_tokens:
        raise ValueError(
            f"num_tokens: expected at least {counts.sum()}, the sum of lengths; got {num_tokens}"
        )
    ids = _known(input_ids)
    if ids is not None:
        _check_ids(ids[np.arange(t)[None, :] < counts[:, None]], config.vocab_size, name)
    taken = np.zeros(b, np.int32) if cache is None else _known(cache.lengths)
    if taken is not None:
        _check_room((taken + counts).max(initial=0), cache, config.max_positions, name)


def _check_ids(ids, vocabulary, name):
    """Check that ids are in the vocabulary. The ids of padding have been left out."""
    if ids.size and (ids.min() < 0 or ids.max() >= vocabulary):
        raise ValueError(
            f"{name}: expected ids from 0 to {vocabulary - 1}, the model's vocabulary; got "
            f"{ids.min()} to {ids.max()}"
        )


def _check_room(end, cache, positions, name):
    """Check that rows of `end` tokens fit the cache and the model's positions."""
    if cache is not None and end > cache.max_length:
        raise ValueError(
            f"cache: full; a row would hold {end} tokens, but the cache has room for "
            f"{cache.max_length}. Make a longer one with init_cache(batch, max_length)"
        )
    if end > positions:
        raise ValueError(
            f"{name}: a row would have {end} tokens, but the model has {positions} positions by "
            "its config.json; pass fewer tokens"
        )


def build_decoder(
    config,
    make: Builder,
    build_attention,
    build_moe,
    *,
    centered: bool = False,
    make_layer: Callable[..., Any] | None = None,
) -> Decoder:
    """Make a model whose layers are `DecoderLayer` modules, at the paths of `DECODER_KEYS`.

    Args:
      config: the sizes, which include `dense_layers`, `dense_intermediate` and `tied`.
      make: builds the parts.
      build_attention: takes the sizes, the index of a layer and `make`, and returns its attention.
      build_moe: takes the same arguments, and returns the expert block of the layer.
      centered: whether the norms in the file store ``weight - 1``.
      make_layer: takes the index of a layer and the arguments of `DecoderLayer`, and returns the
        layer. None makes a `DecoderLayer`.
    """

    def build(layer):
        parts = build_parts(config, layer, make, build_attention, build_moe, centered=centered)
        return DecoderLayer(*parts) if make_layer is None else make_layer(layer, *parts)

    return build_around(config, make, build, tied=config.tied, centered=centered)


def build_parts(
    config, layer: int, make: Builder, build_attention, build_moe, *, centered: bool = False
) -> tuple[Any, ...]:
    """Make the parts of a `DecoderLayer`; the arguments are those of `build_decoder`."""
    h, eps, path = config.hidden, config.eps, f"layers.{layer}"
    if layer in config.dense_layers:
        mlp = build_gated_mlp(make, f"{path}.mlp", h, config.dense_intermediate)
    else:
        mlp = build_moe(config, layer, make)
    return (
        make.norm(f"{path}.attention_norm", h, eps, centered=centered),
        build_attention(config, layer, make),
        make.norm(f"{path}.mlp_norm", h, eps, centered=centered),
        mlp,
    )


def build_around(
    config: Any,
    make: Builder,
    build_layer: Callable[[int], Any],
    *,
    tied: bool,
    centered: bool = False,
    decoder: Callable[..., Decoder] = Decoder,
    norm: Any = None,
    head_bias: Bias = False,
) -> Decoder:
    """Make a model of layers that a function builds: add the embedding, the last norm and the head.

    The rows of embedding and head are sharded along the mesh axis `tensor` if it divides their
    number.

    Args:
      config: has vocab_size, hidden, num_layers and eps.
      make: builds the parts.
      build_layer: takes the index of a layer and returns the layer.
      tied: whether the configuration says that the head shares the weights of the embedding. The
        stored head decides; see `build_head`.
      centered: whether the last norm in the file stores ``weight - 1``.
      decoder: makes the model from its parts: `Decoder` or a class derived from it.
      norm: the last norm. None, the default, makes an RMS norm.
      head_bias: whether the head has a bias; see `builder.Bias`.
    """
    settings, h = make.settings, config.hidden
    vocabulary, rows, expert_mesh = divide_vocabulary(config, make)
    embedding = vocabulary.variable("embedding", (rows, h))
    layers = [build_layer(layer) for layer in range(config.num_layers)]
    if norm is None:
        norm = make.norm("norm", h, config.eps, centered=centered)
    head = build_head(vocabulary, rows, h, tied, head_bias)
    model = decoder(
        config, embedding, layers, norm, head, dtype=settings.dtype, expert_mesh=expert_mesh
    )
    if settings.expert_mesh is not None and settings.expert_mesh.data > 1:
        model.rows_mesh = settings.expert_mesh
    return model


def divide_vocabulary(config: Any, make: Builder) -> tuple[Builder, int, ExpertMesh | None]:
    """Return how the embedding and the head are made, sharded along `tensor` if it divides them.

    Args:
      config: has vocab_size.
      make: builds the parts.

    Returns:
      A builder for both, the number of token ids of one shard, and the mesh. The mesh is None if
      they are not sharded.
    """
    settings, rows = make.settings, config.vocab_size
    if settings.shards == 1:
        return make, rows, None
    if rows % settings.shards:
        reason = f"{rows} rows cannot be divided into {settings.shards} equal parts"
        say_replicated("the vocabulary", settings.shards, reason)
        return make, rows, None
    spec = ShardSpec("rows", settings.shards)
    divided = make.sharded({"embedding": spec, "head": spec})
    return divided, rows // settings.shards, settings.expert_mesh


def build_head(make: Builder, rows: int, hidden: int, tied: bool, bias: Bias = False) -> Any:
    """Make the output head, or return None if the embedding's weights make the logits.

    What the file holds decides. A stored head is used, unless the configuration ties it and the
    file stores the embedding a second time. Without a stored head, the embedding is used. If the
    configuration says otherwise, a warning names both. A second copy that the configuration does
    not tie stays a head of its own, because training may change it apart from the embedding.

    Args:
      make: builds the parts.
      rows: the number of token ids of one shard.
      hidden: the size of the residual stream.
      tied: whether the configuration says that the head shares the weights of the embedding.
      bias: whether the head has a bias; see `builder.Bias`.

    Source: transformers 5 (`tie_weights`), and pull request 51665 of vLLM.
    """
    if not make.holds("head"):
        if not tied:
            make.warn(
                "the file has no output head lm_head, and tie_word_embeddings is not "
                "true in the configuration; the weights of the embedding make the logits"
            )
        return None
    if tied and make.same("head", make.key("embedding")):
        make.ignore("head", "the head equals the embedding, with which it shares its weights")
        return None
    if tied:
        make.warn(
            "tie_word_embeddings is true in the configuration, but the file stores "
            f"{make.stored('head')}, which differs from the embedding; the stored head is used"
        )
    return make.linear("head", rows, hidden, bias)
