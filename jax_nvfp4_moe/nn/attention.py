"""Attention's parts: cached keys and values, and the attention itself."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.experimental.layout import Layout, with_layout_constraint
from jaxtyping import Array, Bool, Float, Int32

from jax_nvfp4_moe.checkpoint.values import CacheScales
from jax_nvfp4_moe.numerics.fp8 import round_fp8
from jax_nvfp4_moe.ops.dense import precision_for

# A token at this position or after it is padding: nothing is cached for it, and no recurrent state
# takes it in. What a model computes for it is not defined.
PADDING = 2**30
# The axis of heads in entries of `KeysAndValues`.
KEY_AXES: Mapping[str, int | None] = {"k": 1, "v": 1}
_QUERIES = 512  # attended at once, which bounds the memory of the scores


class CacheScale(nnx.Variable):
    """What multiplies the FP8 keys or values of a cache; frozen."""


def empty_entries(
    batch: int, max_length: int, dtype: Any, **shapes: tuple[int, int]
) -> Mapping[str, Array]:
    """Return cache entries of zeros ``[batch, heads, max_length, width]``.

    Args:
      batch, max_length: of the cache.
      dtype: of the arrays.
      shapes: heads and width of what is kept of one token, by name.
    """
    return {
        name: jnp.zeros((batch, heads, max_length, width), dtype)
        for name, (heads, width) in shapes.items()
    }


class KeysAndValues(nnx.Module):
    """How one attention layer keeps keys and values: in the model's dtype, or rounded to FP8.

    Where the file declares FP8 and the load rounds to it (`scheme.rounds_to_fp8`), the cache holds
    ``e4m3(x / scale)``, half the bytes of bfloat16, and attention sees ``e4m3(x / scale) * scale``,
    without a cache too: so a prefill of the whole sequence equals decoding. By default only
    devices where W4A4 runs as declared round: the model's dtype is at least as accurate, and no
    product reads FP8 faster here.

    Attributes:
      scales: `CacheScale` float32 ``[heads]`` by name, or None where nothing is rounded.
      shapes: static; heads and width of what is kept of one token, by name.
    """

    def __init__(
        self,
        scales: CacheScales | None,
        dtype: Any,
        *,
        kept_rounded: bool = True,
        **shapes: tuple[int, int],
    ):
        """Keep what `shapes` says.

        Args:
          scales: of the FP8 values, float32 ``[heads]`` by name; None keeps them in `dtype`.
          dtype: of the model.
          kept_rounded: whether what is rounded is also what the cache keeps; latent attention
            keeps latents, and rounds the keys and values that it makes of them with `rounded`.
          shapes: heads and width of "k" and "v".
        """
        self.dtype, self.shapes = jnp.dtype(dtype), shapes
        self.kept_rounded = kept_rounded
        self.multiply_by_reciprocal = scales is not None and scales.multiply_by_reciprocal
        kept = {} if scales is None else scales.scales
        each = {name: CacheScale(jnp.asarray(scale)) for name, scale in kept.items()}
        self.scales = nnx.data(nnx.Dict(each) if each else None)

    def init_cache(self, batch: int, max_length: int) -> Mapping[str, Array]:
        """Return empty entries for all that is kept."""
        rounded = self.scales is not None and self.kept_rounded
        dtype = jnp.float8_e4m3fn if rounded else self.dtype
        return empty_entries(batch, max_length, dtype, **self.shapes)

    def append(self, entries, positions: Int32[Array, "b t"], **new: Float[Array, "b t m d"]):
        """Write `new` as `attention.append` does, rounded where the file says so.

        Returns:
          What attention sees of all entries, in the dtype of `new`, and the entries.
        """
        if self.scales is None:
            return append(entries, positions, **new)
        kept = {name: self._round(name, value, axis=2) for name, value in new.items()}
        kept, entries = append(entries, positions, **kept)
        seen = {name: self._widen(name, value, new[name].dtype) for name, value in kept.items()}
        return seen, entries

    def rounded(self, **values: Float[Array, "b m s d"]) -> Mapping[str, Array]:
        """Return keys and values that no cache keeps as attention sees them: rounded, or as is."""
        if self.scales is None:
            return values
        return {
            name: self._widen(name, self._round(name, value, axis=1), value.dtype)
            for name, value in values.items()
        }

    def _scale(self, name, axis):
        assert self.scales is not None
        return jnp.expand_dims(self.scales[name].get_value(), [a for a in range(4) if a != axis])

    def _round(self, name, value, axis):
        return round_fp8(
            value, self._scale(name, axis), multiply_by_reciprocal=self.multiply_by_reciprocal
        )

    def _widen(self, name, value, dtype):
        """Return ``[b, m, s, d]`` of E4M3 times the scale of each head."""
        return (value.astype(jnp.float32) * self._scale(name, 1)).astype(dtype)


def append(entries, positions: Int32[Array, "b t"], **new: Float[Array, "b t m d"]):
    """Write `new` into the cache `entries` at `positions`; those past the end are dropped.

    Returns:
      The arrays ``[b, m, s, d]`` to attend to, all entries or without a cache just `new`, and the
      entries.
    """
    if entries is None:
        return {name: jnp.moveaxis(value, 1, 2) for name, value in new.items()}, None
    row = jnp.arange(positions.shape[0])[:, None, None]
    written = {}
    for name, value in new.items():
        # An index for each head: XLA turns a scatter of one index into copies of all entries.
        place = entries[name].at[row, jnp.arange(value.shape[2]), positions[:, :, None]]
        put = place.set(value, mode="drop", unique_indices=True)
        # For one row XLA would keep keys transposed in its loops, and copy them at each call.
        written[name] = with_layout_constraint(put, Layout((0, 1, 2, 3)))
    return written, written


def attend(
    q: Float[Array, "b t n d"],
    k: Float[Array, "b m s d"],
    v: Float[Array, "b m s dv"],
    positions: Int32[Array, "b t"],
    scale: float,
    *,
    window: int | None = None,
    chunk: int | None = None,
    sinks: Float[Array, " n"] | None = None,
) -> Float[Array, "b t n dv"]:
    """Attend causally: the query at position p sees keys 0 to p; softmax in float32.

    ``y = softmax(scale * q @ k.T) @ v`` for each head, n / m query heads to a key head.

    Args:
      q, k, v: queries in order of time, keys and values in order of position.
      positions: of the queries.
      scale: of the scores.
      window: keys that a query sees, its own the last; None for all.
      chunk: a query sees only keys of its own chunk of so many positions; None for all.
      sinks: a further score of each head, whose value is zero; None for none.
    """
    b, t = positions.shape

    def attend_block(q, positions):
        return _attend(q, k, v, positions, scale, window, chunk, sinks)

    if t <= _QUERIES:
        return attend_block(q, positions)
    padded = -(-t // _QUERIES) * _QUERIES

    def split(x):
        x = jnp.pad(x, [(0, 0), (0, padded - t)] + [(0, 0)] * (x.ndim - 2))
        return jnp.moveaxis(x.reshape(b, -1, _QUERIES, *x.shape[2:]), 1, 0)

    y = lax.map(lambda block: attend_block(*block), (split(q), split(positions)))
    return jnp.moveaxis(y, 0, 1).reshape(b, padded, *y.shape[3:])[:, :t]


def _attend(q, k, v, positions, scale, window, chunk, sinks):
    """Attend with all queries at once; every product is a batch over rows and key heads."""
    (b, t, n, d), (m, s) = q.shape, k.shape[1:3]
    grouped = jnp.moveaxis(q.reshape(b, t, m, n // m, d), 1, 3)
    scores = _batched(grouped, k, 3)
    keys = jnp.arange(s, dtype=jnp.int32)[None, None, :]
    visible = _visible(keys, positions[:, :, None], window, chunk)
    # A finite score for keys that are not visible. Padding sees no key of a window or a chunk: with
    # -inf its softmax would be NaN, and 0 * NaN in the next layer would spread to real tokens.
    hidden = jnp.finfo(scores.dtype).min
    scores = jnp.where(visible[:, None, None], scores * scale, hidden)
    if sinks is None:
        weights = jax.nn.softmax(scores, axis=-1)
    else:
        sink = jnp.broadcast_to(
            sinks.astype(jnp.float32).reshape(1, m, n // m, 1, 1), (*scores.shape[:-1], 1)
        )
        weights = jax.nn.softmax(jnp.concatenate([scores, sink], axis=-1), axis=-1)[..., :s]
    weights = weights.astype(v.dtype)
    y = _batched(weights, v, 2).astype(q.dtype)
    return jnp.moveaxis(y, 3, 1).reshape(b, t, n, v.shape[-1])


def _visible(keys, queries, window, chunk) -> Bool[Array, "b t s"]:
    """Whether the query at each position sees the key at each."""
    visible = keys <= queries
    if window is not None:
        visible &= keys > queries - window
    if chunk is not None:
        visible &= keys // chunk == queries // chunk
    return visible


def _batched(x, y, contracted):
    """Return the float32 products of ``x [b, m, g, t, k]`` and `y` over its axis `contracted`."""
    return lax.dot_general(
        x,
        y,
        (((4,), (contracted,)), ((0, 1), (0, 1))),
        precision=precision_for(x.dtype),
        preferred_element_type=jnp.float32,
    )


def build_keys_and_values(
    make: Any, path: str, *, kept_rounded: bool = True, **shapes: tuple[int, int]
) -> KeysAndValues:
    """Make the `KeysAndValues` at `path`; arguments as for the class, heads those of one shard."""

    def construct(scales):
        dtype = make.settings.dtype
        return KeysAndValues(scales, dtype, kept_rounded=kept_rounded, **shapes)

    heads = {name: heads for name, (heads, _) in shapes.items()}
    return make.cache_scales(path, construct, **heads)
