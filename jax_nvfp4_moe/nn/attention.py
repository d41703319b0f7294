"""How an attention keeps keys and values."""

from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
from flax import nnx
from jax.experimental.layout import Layout, with_layout_constraint
from jaxtyping import Array, Float, Int32

from jax_nvfp4_moe.checkpoint.values import CacheScales
from jax_nvfp4_moe.numerics.fp8 import round_fp8

# The axis of heads in entries of `KeysAndValues`.
KEY_AXES: Mapping[str, int | None] = {"k": 1, "v": 1}


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


def build_keys_and_values(
    make: Any, path: str, *, kept_rounded: bool = True, **shapes: tuple[int, int]
) -> KeysAndValues:
    """Make the `KeysAndValues` at `path`; arguments as for the class, heads those of one shard."""

    def construct(scales):
        dtype = make.settings.dtype
        return KeysAndValues(scales, dtype, kept_rounded=kept_rounded, **shapes)

    heads = {name: heads for name, (heads, _) in shapes.items()}
    return make.cache_scales(path, construct, **heads)
