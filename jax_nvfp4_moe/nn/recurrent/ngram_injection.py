"""Add what embeddings of the last few tokens say to all residual streams, behind gates.

::

  e = table[rows of the last tokens]
  gate[i] = norm_key(key(e))[i] @ norm_query(x)[i] / sqrt(h)
  v[i] = sigmoid(sign(gate[i]) * sqrt(|gate[i]|)) * value(e)
  y[i] = v[i] + silu(convolve(norm_conv(v))[i])

The convolution sees every n-th token, where n is the largest number of tokens of an embedding.

Source: `Qwen4ExpTextPLELayer` of transformers.
"""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int32

from jax_nvfp4_moe.nn.building.builder import Builder
from jax_nvfp4_moe.nn.gated_residual import StreamNorm
from jax_nvfp4_moe.nn.hyper_connections import StreamSizes
from jax_nvfp4_moe.nn.ngram_embedding import NGramSizes, find_rows
from jax_nvfp4_moe.nn.packing import pack_like, unpack
from jax_nvfp4_moe.numerics.casts import cast
from jax_nvfp4_moe.numerics.convolution import convolve
from jax_nvfp4_moe.ops.moves import read_rows
from jax_nvfp4_moe.ops.positions import PADDING
from jax_nvfp4_moe.parallel.tensor_parallel import HeadParallel


@dataclasses.dataclass(frozen=True)
class InjectionSizes:
    """The sizes of one module. All fields are static.

    Attributes:
      streams: the sizes of the residual streams.
      table: the sizes of the table of embeddings.
      taps: the number of tokens that the convolution sees.
    """

    streams: StreamSizes
    table: NGramSizes
    taps: int

    @property
    def reach(self) -> int:
        """The number of tokens before the current one that the convolution keeps."""
        return (self.taps - 1) * self.table.largest


class NGramInjection(HeadParallel):
    """Embeddings of the last tokens, which gates and a convolution add to the residual streams.

    It is replicated on every device of a mesh.
    """

    cache_axes: ClassVar[Mapping[str, int | None]] = {"ngram_ids": None, "ngram_inputs": None}

    def __init__(self, sizes: InjectionSizes, make: Builder, path: str):
        """Build the module at `path`."""
        streams, table = sizes.streams, sizes.table
        self.sizes, self.dtype = sizes, make.settings.dtype
        self.target = make.settings.target
        n, h = streams.streams, streams.hidden
        width = len(table.primes) * table.width
        self.key = make.linear(f"{path}.key", n * h, width)
        self.value = make.linear(f"{path}.value", h, width)
        self.key_norm = StreamNorm(streams, make, f"{path}.key_norm")
        self.query_norm = StreamNorm(streams, make, f"{path}.query_norm")
        self.conv_norm = StreamNorm(streams, make, f"{path}.conv_norm")
        shape = (n * h, 1, sizes.taps)
        self.conv_weight = make.variable(f"{path}.conv_weight", shape, dtype=jnp.float32)
        self.table = _build_table(table, make, f"{path}.table")
        for name in ("multipliers", "offsets", "primes"):
            make.ignore_array(
                f"{path}.{name}",
                "the constants of a hash of tokens, which follow from the configuration",
            )

    @property
    def states(self) -> tuple[str, ...]:
        """The names of all cache entries, which change with every token."""
        return ("ngram_ids", "ngram_inputs")

    def empty_cache(self, batch: int, max_length: int) -> dict[str, Array]:
        """Return empty cache entries: the last tokens, and the last inputs of the convolution."""
        del max_length
        sizes, table = self.sizes, self.sizes.table
        width = sizes.streams.streams * sizes.streams.hidden
        return {
            "ngram_ids": jnp.full((batch, table.largest - 1), table.end, jnp.int32),
            "ngram_inputs": jnp.zeros((batch, sizes.reach, width), self.dtype),
        }

    def mix(self, x: Float[Array, "... n h"], positions: Int32[Array, "b t"], entries, *further):
        """Return what is added to the streams `x`, in the shape of `x`, and the cache entries.

        Args:
          x: the residual streams, ``[b, t, n, h]`` or packed.
          positions: position of each token.
          entries: the cache entries of this module. None if there is no cache.
          *further: the tokens, int32 ``[b, t]`` or packed as `x` is.
        """
        ids = unpack(further[0][..., None], positions)[..., 0]
        held = self.empty_cache(len(positions), 1) if entries is None else entries
        embedded = pack_like(self._embed(ids, held["ngram_ids"]), positions, x)
        gated = self._gate(x, embedded)
        *tokens, n, h = gated.shape
        normal = unpack(self.conv_norm(gated).reshape(*tokens, n * h), positions)
        real = positions < PADDING
        mixed, inputs = convolve(normal, held["ngram_inputs"], self._taps(), real)
        mixed = pack_like(mixed, positions, x).reshape(gated.shape)
        y = cast(gated.astype(jnp.float32) + jax.nn.silu(mixed), self.dtype)
        if entries is None:
            return y, None
        return y, {"ngram_ids": _keep_last(held["ngram_ids"], ids, real), "ngram_inputs": inputs}

    def _embed(self, ids, before) -> Float[Array, "b t e"]:
        """Return the embeddings of the last tokens, those of all heads side by side."""
        rows = find_rows(self.sizes.table, ids, before)
        b, t, heads = rows.shape
        found = read_rows(self.table.get_value(), rows.reshape(b, t * heads), self.target)
        return found.reshape(b, t, heads * found.shape[-1]).astype(self.dtype)

    def _gate(self, x, embedded) -> Float[Array, "b t n h"]:
        """Return the values of all streams behind their gates."""
        keys = self.key_norm(self.key(embedded).reshape(x.shape)).astype(jnp.float32)
        queries = self.query_norm(x).astype(jnp.float32)
        gate = jnp.sum(keys * queries, axis=-1) / math.sqrt(x.shape[-1])
        gate = jnp.sqrt(jnp.maximum(jnp.abs(gate), 1e-6)) * jnp.sign(gate)
        values = self.value(embedded).astype(jnp.float32)[:, :, None]
        return cast(jax.nn.sigmoid(gate)[..., None] * values, self.dtype)

    def _taps(self) -> Float[Array, "c k"]:
        """Return the weights of the convolution, with zeros for the tokens that it leaves out."""
        weight, step = self.conv_weight.get_value()[:, 0], self.sizes.table.largest
        taps = jnp.zeros((len(weight), self.sizes.reach + 1), weight.dtype)
        return taps.at[:, ::step].set(weight)


def _build_table(sizes: NGramSizes, make: Builder, path: str) -> Any:
    """Make the table of embeddings, which a file may hold in several tensors."""
    if not make.has(f"{path}.shard_0"):
        return make.variable(path, (sizes.rows, sizes.width))
    each = -(-sizes.rows // sizes.shards)
    counts = {f"shard_{n}": min(each, sizes.rows - n * each) for n in range(sizes.shards)}
    return make.merged_variable(path, counts, (sizes.width,))


def _keep_last(before: Int32[Array, "b m"], ids: Int32[Array, "b t"], real) -> Array:
    """Return the last tokens of each row that are no padding."""
    count = jnp.sum(real, axis=1, dtype=jnp.int32)
    history = jnp.concatenate([before, ids], axis=1)
    at = count[:, None] + jnp.arange(before.shape[1], dtype=jnp.int32)[None, :]
    return jax.vmap(lambda row, at: row[at])(history, at)
