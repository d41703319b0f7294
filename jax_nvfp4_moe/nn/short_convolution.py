"""Gated short convolution: a mixer that sees the last few tokens alone, as LFM2 has it.

``y = out_proj(c * conv(b * x))`` with ``b, c, x`` the thirds of ``in_proj``'s result.

Source: `modeling_lfm2_moe` of transformers.
"""

import dataclasses
from collections.abc import Mapping
from typing import ClassVar

import jax.numpy as jnp
from jaxtyping import Array, Float, Int32

from jax_nvfp4_moe.nn.attention import PADDING
from jax_nvfp4_moe.nn.building import Builder
from jax_nvfp4_moe.nn.convolution import convolve
from jax_nvfp4_moe.nn.division import divide
from jax_nvfp4_moe.parallel.shard_spec import ShardSpec
from jax_nvfp4_moe.parallel.tensor_parallel import HeadParallel


@dataclasses.dataclass(frozen=True)
class ShortConvolutionSizes:
    """Sizes of a gated short convolution.

    Attributes:
      hidden: width of what it reads and writes.
      channels: of the convolution; `hidden` on one device.
      conv_size: tokens that the convolution sees, its own the last.
      bias: whether the linears and the convolution add a bias.
    """

    hidden: int
    channels: int
    conv_size: int
    bias: bool


class ShortConvolution(HeadParallel):
    """A convolution of few tokens between two products with gates."""

    cache_axes: ClassVar[Mapping[str, int | None]] = {"inputs": 2}

    def __init__(self, sizes: ShortConvolutionSizes, make: Builder, path: str):
        """Make one with the channels of one shard."""
        h, n, bias = sizes.hidden, sizes.channels, sizes.bias
        self.sizes, self.dtype = sizes, make.settings.dtype
        self.in_proj = make.linear(f"{path}.in_proj", 3 * n, h, bias)
        self.out_proj = make.linear(f"{path}.out_proj", h, n, bias)
        shape = (n, 1, sizes.conv_size)
        self.conv_weight = make.variable(f"{path}.conv_weight", shape, dtype=jnp.float32)
        self.conv_bias = None
        if bias:
            self.conv_bias = make.variable(f"{path}.conv_bias", (n,), dtype=jnp.float32)

    def empty_cache(self, batch: int, max_length: int):
        """Return empty cache entries: the last inputs of the convolution."""
        del max_length
        shape = (batch, self.sizes.conv_size - 1, self.sizes.channels)
        return {"inputs": jnp.zeros(shape, self.dtype)}

    def mix(self, x: Float[Array, "b t h"], positions: Int32[Array, "b t"], entries):
        """Mix ``x [b, t, h]``; returns ``[b, t, h]`` and the cache entries.

        Tokens at `positions` of `PADDING` and later, behind all others of their row, leave the
        entries as they are.
        """
        old = self.empty_cache(x.shape[0], 0) if entries is None else entries
        b, c, inputs = jnp.split(self.in_proj(x), 3, axis=-1)
        weight = self.conv_weight.get_value()[:, 0]
        mixed, inputs = convolve(b * inputs, old["inputs"], weight, positions < PADDING)
        if self.conv_bias is not None:
            mixed = mixed + self.conv_bias.get_value()[None, None]
        y = self.out_proj((c.astype(jnp.float32) * mixed).astype(self.dtype))
        return y, None if entries is None else {"inputs": inputs}


def build_short_convolution(sizes: ShortConvolutionSizes, path: str, make: Builder):
    """Make a gated short convolution, over a mesh divided by channels along `tensor`.

    Args:
      sizes: of the whole.
      path: of the mixer.
      make: builds its parts.
    """
    shards, n = make.settings.shards, sizes.channels
    rows = ShardSpec("rows", shards)
    return divide(
        make,
        lambda make, sizes: ShortConvolution(sizes, make, path),
        sizes,
        dataclasses.replace(sizes, channels=n // shards),
        specs={
            "in_proj": ShardSpec("rows", shards, (n, n, n)),
            "conv_weight": rows,
            "conv_bias": rows,
            "out_proj": ShardSpec("columns", shards),
        },
        last=f"{path}.out_proj",
        width=n,
    )
