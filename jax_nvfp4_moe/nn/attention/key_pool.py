"""Compressed keys: each stands for a window of tokens, whose vectors gates mix.

With window w of r tokens, and for each channel by itself::

  key[w] = norm(sum over s of softmax(gate[s] + bias[s]) * value[s])

The sum runs over the tokens of the window. With overlap, values and gates have two halves. The sum
then runs over the second halves of the window and the first halves of the window before it. A key
is rotated to the position of its window's first token. A window gets its key when its last token
has been read.

The cache holds the keys, and values and gates of the last tokens: of the window that is not full
yet, and with overlap of the window before it.

Source: `modeling_deepseek_v4` of transformers.
"""

import dataclasses
from collections.abc import Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int32

from jax_nvfp4_moe.nn.attention.kv_cache import empty_entries
from jax_nvfp4_moe.nn.building.builder import Builder
from jax_nvfp4_moe.nn.packing import unpack
from jax_nvfp4_moe.numerics.casts import cast
from jax_nvfp4_moe.numerics.rope import Rope, rotate_last
from jax_nvfp4_moe.ops.cache import append
from jax_nvfp4_moe.ops.positions import PADDING


@dataclasses.dataclass(frozen=True)
class PoolSizes:
    """Sizes of compressed keys. All fields are static.

    Attributes:
      rate: number of tokens in a window, r.
      overlaps: whether a key also stands for the window before.
      head_dim: width of a key.
      rope: rotation of the last channels; None for no rotation.
      eps: epsilon of the norm of the keys.
    """

    rate: int
    overlaps: bool
    head_dim: int
    rope: Rope | None
    eps: float

    @property
    def windows(self) -> int:
        """The number of windows that a key stands for."""
        return 2 if self.overlaps else 1

    @property
    def width(self) -> int:
        """The number of values of a token, and of its gates."""
        return self.windows * self.head_dim


class Span(NamedTuple):
    """The tokens of each row that a call reads; padding is left out.

    Attributes:
      start: int32 ``[b]``, the position of the first token. 0 in a row without tokens.
      end: int32 ``[b]``, the position behind the last token.
    """

    start: Int32[Array, " b"]
    end: Int32[Array, " b"]

    @classmethod
    def of(cls, positions: Int32[Array, "b t"]) -> "Span":
        """Return the span of tokens whose positions ascend by 1, with padding behind them."""
        count = jnp.sum(positions < PADDING, axis=1, dtype=jnp.int32)
        first = jnp.sum(positions[:, :1], axis=1, dtype=jnp.int32)  # 0 if there are no tokens
        start = jnp.where(count > 0, first, 0)
        return cls(start, start + count)


class Recent(NamedTuple):
    """The last tokens of each row, before and during a call.

    Attributes:
      tokens: ``[b, m + t, d]``, from position `base` on: m old tokens and t new ones.
      places: int32 ``[b, t]``, the index in `tokens` of each new token. It is large for padding.
      base: int32 ``[b]``.
    """

    tokens: Float[Array, "b s d"]
    places: Int32[Array, "b t"]
    base: Int32[Array, " b"]

    @classmethod
    def extend(cls, old: Float[Array, "b m d"], base, new: Float[Array, "b t d"], positions):
        """Return `old`, whose first token is at position `base`, and the new tokens behind it."""
        real = positions < PADDING
        places = jnp.where(real, positions - base[:, None], positions)
        room = jnp.pad(old, [(0, 0), (0, new.shape[1]), (0, 0)])

        def write(room, places, new):
            return room.at[places].set(new, mode="drop", unique_indices=True)

        # XLA shards the rows of a mapped axis among devices, but not those of an index.
        return cls(jax.vmap(write)(room, places, new), places, base)

    def keep(self, base: Int32[Array, " b"], count: int) -> Float[Array, "b m d"]:
        """Return `count` tokens from position `base` on. Those not read yet have no meaning."""
        at = (base - self.base)[:, None] + jnp.arange(count, dtype=jnp.int32)[None, :]
        return jax.vmap(lambda row, at: row.at[at].get(mode="clip"))(self.tokens, at)


class KeyPool(nnx.Module):
    """Makes the compressed keys of a row. It is replicated on every device of a mesh.

    Attributes:
      sizes: static.
      name: name of its keys in the cache, static. Its values and gates are ``NAME_tokens``.
      bias: `nnx.Param` float32 ``[r, width]``, added to the gates of each token of a window.
    """

    def __init__(self, sizes: PoolSizes, hidden: int, name: str, make: Builder, path: str):
        """Build the module.

        Args:
          sizes: its sizes.
          hidden: width of the tokens.
          name: name of its keys in the cache.
          make: builds the parts.
          path: path of the module.
        """
        self.sizes, self.name, self.dtype = sizes, name, make.settings.dtype
        self.build(hidden, make, path)

    def build(self, hidden: int, make: Builder, path: str) -> None:
        """Make the parts of the module; the arguments are those of the class."""
        rows = {"values": self.sizes.width, "gates": self.sizes.width}
        self.projections = make.merged_linear(f"{path}.projections", hidden, rows)
        self.build_bias(make, path)
        self.norm = make.norm(f"{path}.norm", self.sizes.head_dim, self.sizes.eps)

    def build_bias(self, make: Builder, path: str) -> None:
        """Make the bias of the gates."""
        shape = (self.sizes.rate, self.sizes.width)
        self.bias = make.variable(f"{path}.bias", shape, dtype=jnp.float32)

    @property
    def channels(self) -> int:
        """The number of channels of a token in the cache: its values and gates."""
        return 2 * self.sizes.width

    def read(self, x: Float[Array, "... h"]) -> Float[Array, "... w"]:
        """Return the values of tokens, and behind them their gates."""
        return self.projections(x)

    def finish(self, keys: Float[Array, "b c d"], index: Int32[Array, "b c"]):
        """Return the keys ``[b, c, 1, d]`` of mixed values; `index` is that of each window."""
        assert self.sizes.rope is not None
        keys = self.norm(keys)[:, :, None, :]
        return rotate_last(keys, index * self.sizes.rate, self.sizes.rope)

    @property
    def entries(self) -> tuple[str, str]:
        """The names of the cache entries: of the keys, and of values and gates."""
        return self.name, f"{self.name}_tokens"

    def empty_cache(self, batch: int, max_length: int) -> Mapping[str, Array]:
        """Return empty cache entries for rows of up to `max_length` tokens."""
        sizes = self.sizes
        slots = max(max_length // sizes.rate, 1)
        keys = empty_entries(batch, slots, self.dtype, **{self.name: (1, sizes.head_dim)})
        return {**keys, f"{self.name}_tokens": self._no_tokens(batch)}

    def _no_tokens(self, batch: int) -> Array:
        """Return what stands for the values and gates of the tokens before a text."""
        sizes = self.sizes
        return jnp.zeros((batch, sizes.windows * sizes.rate, self.channels), self.dtype)

    def __call__(
        self, x: Float[Array, "... h"], positions: Int32[Array, "b t"], entries
    ) -> tuple[Float[Array, "b c d"], Mapping[str, Array] | None]:
        """Read tokens, and return the keys of all windows that are full.

        Args:
          x: the tokens, ``[b, t, h]`` or packed.
          positions: position of each token.
          entries: cache entries, or None without a cache.

        Returns:
          The keys of windows 0, 1, ..., and the updated cache entries of this module. Keys of
          windows that are not full yet have no meaning.
        """
        sizes, rate, (b, t) = self.sizes, self.sizes.rate, positions.shape
        old = self._no_tokens(b) if entries is None else entries[f"{self.name}_tokens"]
        span = Span.of(positions)
        first = span.start // rate  # the first window that is not full yet
        before = sizes.windows - 1
        new = unpack(self.read(x), positions)
        base = (first - before) * rate
        recent = Recent.extend(old, base, new, positions)
        count = (t + rate - 1) // rate  # so many windows may become full
        windows = recent.tokens[:, : (count + before) * rate]
        windows = windows.reshape(b, count + before, rate, windows.shape[2])
        index = first[:, None] + jnp.arange(count, dtype=jnp.int32)[None, :]
        keys = self.finish(cast(self.mix_windows(windows, index), self.dtype), index)
        full = (index + 1) * rate <= span.end[:, None]
        places = jnp.where(full, index, PADDING + index)
        kept = None if entries is None else {self.name: entries[self.name]}
        seen, kept = append(kept, places, **{self.name: keys})
        if kept is not None:
            base = (span.end // rate - before) * rate
            tokens = recent.keep(base, sizes.windows * rate)
            kept = {**kept, f"{self.name}_tokens": tokens}
        return seen[self.name][:, 0], kept

    def mix_windows(self, windows, index) -> Float[Array, "b c d"]:
        """Return the mixed values of windows, with one before them for overlap.

        Args:
          windows: values and gates of their tokens ``[b, c, r, 2 * width]``.
          index: int32 ``[b, c]``, the index of each window in its row.
        """
        sizes = self.sizes
        values, gates = jnp.split(windows.astype(jnp.float32), 2, axis=-1)
        gates += self.bias.get_value()[None, None]
        d, own = sizes.head_dim, sizes.windows - 1
        mixed, scores = values[:, own:, :, -d:], gates[:, own:, :, -d:]
        if sizes.overlaps:
            before = jnp.where(index[..., None, None] > 0, gates[:, :-1, :, :d], -jnp.inf)
            mixed = jnp.concatenate([values[:, :-1, :, :d], mixed], axis=2)
            scores = jnp.concatenate([before, scores], axis=2)
        return jnp.sum(jax.nn.softmax(scores, axis=2) * mixed, axis=2)
