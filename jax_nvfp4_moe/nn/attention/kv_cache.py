"""Store the keys and values of an attention layer, in the model's dtype or in FP8."""

from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, DTypeLike, Float, Int32

from jax_nvfp4_moe.checkpoint.values import CacheScales
from jax_nvfp4_moe.nn.building.builder import Builder
from jax_nvfp4_moe.numerics.fp8 import round_fp8
from jax_nvfp4_moe.ops.cache import append
from jax_nvfp4_moe.ops.causal_attention.meaning import widen
from jax_nvfp4_moe.parallel.sharded_variable import ShardedVariable

# Name of a cache entry of `KeysAndValues` -> its axis of heads.
KEY_AXES: Mapping[str, int | None] = {"k": 1, "v": 1}


class CacheScale(ShardedVariable, nnx.Variable):
    """Scale by which FP8 keys or values are multiplied.

    It is not an `nnx.Param`, so optimizers skip it.
    """


def empty_entries(
    batch: int, max_length: int, dtype: DTypeLike, **shapes: tuple[int, int]
) -> Mapping[str, Array]:
    """Return cache entries of zeros, ``[batch, heads, max_length, width]`` each.

    Args:
      batch: number of rows.
      max_length: number of tokens for which each row has room.
      dtype: dtype of the entries.
      **shapes: name of an entry -> number of heads and width of a head.

    Returns:
      Name -> array.
    """
    return {
        name: jnp.zeros((batch, heads, max_length, width), dtype)
        for name, (heads, width) in shapes.items()
    }


def group_channels(x: Float[Array, "... w"], width: int) -> Float[Array, "... n d"]:
    """Return the channels of each token as heads of `width` channels.

    The number of heads is computed from the channels, and not from the size of the array, which is
    0 if there are no tokens.
    """
    return x.reshape(*x.shape[:-1], x.shape[-1] // width, width)


class KeysAndValues(nnx.Module):
    """Keys and values of one attention layer, in the model's dtype or rounded to FP8.

    They are rounded if the checkpoint declares FP8 and `scheme.rounds_to_fp8` is True. Then::

      cache entry = e4m3(x / scale)
      attention sees e4m3(x / scale) * scale

    An FP8 cache takes half the bytes of a bfloat16 cache. On GPUs, `ops.attention` has a kernel
    that reads these bytes when a model decodes. For a longer text, XLA widens the cache to the
    model's dtype at each call. Attention sees the rounded numbers without a cache too, so that one
    call on a whole sequence gives the results of decoding.

    Without a requested scheme, only devices with FP4 tensor cores round. Other devices keep the
    model's dtype, which is at least as accurate.

    Attributes:
      scales: "k" or "v" -> `CacheScale`, float32 ``[heads]``; None if nothing is rounded.
      shapes: "k" or "v" -> number of heads and width of a head, static.
      dtype: dtype of the model, static.
      kept_rounded: whether the cache holds the rounded numbers, static.
      multiply_by_reciprocal: how numbers are rounded; see `numerics.fp8.round_fp8`. Static.
    """

    def __init__(
        self,
        scales: CacheScales | None,
        dtype: DTypeLike,
        *,
        kept_rounded: bool = True,
        **shapes: tuple[int, int],
    ):
        """Store the sizes and the scales.

        Args:
          scales: scales of the FP8 numbers, float32 ``[heads]`` by name. None keeps keys and values
            in `dtype`.
          dtype: dtype of the model.
          kept_rounded: whether the cache holds the rounded numbers. True by default. Latent
            attention passes False: its cache holds latents, and it rounds the expanded keys and
            values with `rounded`.
          **shapes: "k" or "v" -> number of heads and width of a head.
        """
        self.dtype, self.shapes = jnp.dtype(dtype), shapes
        self.kept_rounded = kept_rounded
        self.multiply_by_reciprocal = scales is not None and scales.multiply_by_reciprocal
        kept = {} if scales is None else scales.scales
        each = {name: CacheScale(jnp.asarray(scale)) for name, scale in kept.items()}
        self.scales = nnx.data(nnx.Dict(each) if each else None)

    def init_cache(self, batch: int, max_length: int) -> Mapping[str, Array]:
        """Return empty cache entries, ``[batch, heads, max_length, width]`` each."""
        rounded = self.scales is not None and self.kept_rounded
        dtype = jnp.float8_e4m3fn if rounded else self.dtype
        return empty_entries(batch, max_length, dtype, **self.shapes)

    # Modules pass arrays to methods by position: `jax.vjp`, by which `nnx.tabulate` counts the
    # operations of a method's derivative, takes no arguments by name.
    def append(
        self, entries, positions: Int32[Array, "b t"], new: Mapping[str, Float[Array, "b t m d"]]
    ):
        """Write `new` into the cache as the function `append` does, rounded if there are scales.

        `ops.prepare_heads` with `head_options` writes the same numbers into a cache.

        Args:
          entries: cache entries by name, or None without a cache.
          positions: position of each token, int32 ``[b, t]``.
          new: keys and values of the new tokens by name, ``[b, t, m, d]``.

        Returns:
          The keys and values that attention sees, ``[b, m, s, d]``, and the updated entries. Both
          are float8_e4m3fn if there are scales. `ops.attention` takes them with `scale_options`,
          and `widen` returns what they stand for.
        """
        if self.scales is not None:
            new = {name: self._round(name, value, axis=2) for name, value in new.items()}
        return append(entries, positions, **new)

    @property
    def scale_options(self) -> Mapping[str, Any]:
        """Return the arguments ``k_scale`` and ``v_scale`` of `ops.attention`, if there are any."""
        if self.scales is None:
            return {}
        return {f"{name}_scale": self.scales[name].get_value() for name in ("k", "v")}

    @property
    def head_options(self) -> Mapping[str, Any]:
        """Return the arguments of `ops.prepare_heads` for an FP8 cache, if it is one."""
        if self.scales is None:
            return {}
        return {**self.scale_options, "multiply_by_reciprocal": self.multiply_by_reciprocal}

    def widen(self, kept: Mapping[str, Float[Array, "b m s d"]]) -> Mapping[str, Array]:
        """Return what `append` returned, times the scale of each head in the module's dtype."""
        if self.scales is None:
            return kept
        return {
            name: widen(value, self.scales[name].get_value(), self.dtype)
            for name, value in kept.items()
        }

    def rounded(self, values: Mapping[str, Float[Array, "b m s d"]]) -> Mapping[str, Array]:
        """Return keys and values ``[b, m, s, d]``, rounded to FP8 and back if there are scales."""
        if self.scales is None:
            return values
        return {
            name: widen(self._round(name, x, axis=1), self.scales[name].get_value(), x.dtype)
            for name, x in values.items()
        }

    def _round(self, name, value, axis):
        """Return `value` in FP8; `axis` is that of its heads."""
        assert self.scales is not None
        scale = self.scales[name].get_value()
        scale = jnp.expand_dims(scale, [a for a in range(4) if a != axis])
        return round_fp8(value, scale, multiply_by_reciprocal=self.multiply_by_reciprocal)


def build_keys_and_values(
    make: Builder, path: str, *, kept_rounded: bool = True, **shapes: tuple[int, int]
) -> KeysAndValues:
    """Make the `KeysAndValues` of one attention layer.

    Args:
      make: the `Builder` of the model.
      path: path of the module.
      kept_rounded: as for `KeysAndValues`.
      **shapes: as for `KeysAndValues`, with the number of heads in one shard.
    """

    def construct(scales):
        dtype = make.settings.dtype
        return KeysAndValues(scales, dtype, kept_rounded=kept_rounded, **shapes)

    heads = {name: heads for name, (heads, _) in shapes.items()}
    return make.cache_scales(path, construct, **heads)
