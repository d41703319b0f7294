"""Gated short convolution: the mixer of LFM2, which sees the last few tokens only.

``y = out_proj(c * conv(b * x))``, where ``b, c, x`` are the thirds of the result of ``in_proj``.

Source: `modeling_lfm2_moe` of transformers.
"""

import dataclasses
import functools
from collections.abc import Mapping
from typing import ClassVar

import jax.numpy as jnp
from jaxtyping import Array, Float, Int32

from jax_nvfp4_moe.nn.building.builder import Builder
from jax_nvfp4_moe.nn.building.sharding import build_sharded
from jax_nvfp4_moe.nn.packing import pack_like, unpack
from jax_nvfp4_moe.numerics.casts import compute
from jax_nvfp4_moe.numerics.convolution import convolve
from jax_nvfp4_moe.ops.positions import PADDING
from jax_nvfp4_moe.ops.state_window import run_tokens
from jax_nvfp4_moe.parallel.shard_spec import ShardSpec
from jax_nvfp4_moe.parallel.tensor_parallel import HeadParallel


@dataclasses.dataclass(frozen=True)
class ShortConvolutionSizes:
    """The sizes of a gated short convolution.

    Attributes:
      hidden: the size of the input and of the output.
      channels: the number of channels of the convolution; `hidden` on one device.
      conv_size: the number of tokens that the convolution sees: the current one and those before.
      bias: whether the linears and the convolution add a bias.
    """

    hidden: int
    channels: int
    conv_size: int
    bias: bool


class ShortConvolution(HeadParallel):
    """A convolution over a few tokens, with one gate before it and one behind it."""

    cache_axes: ClassVar[Mapping[str, int | None]] = {"inputs": 2}

    def __init__(self, sizes: ShortConvolutionSizes, make: Builder, path: str):
        """Make the module with the channels of one shard."""
        h, n, bias = sizes.hidden, sizes.channels, sizes.bias
        self.sizes, self.dtype = sizes, make.settings.dtype
        self.in_proj = make.linear(f"{path}.in_proj", 3 * n, h, bias)
        self.out_proj = make.linear(f"{path}.out_proj", h, n, bias)
        shape = (n, 1, sizes.conv_size)
        self.conv_weight = make.variable(f"{path}.conv_weight", shape, dtype=jnp.float32)
        self.conv_bias = None
        if bias:
            self.conv_bias = make.variable(f"{path}.conv_bias", (n,), dtype=jnp.float32)

    @property
    def states(self) -> tuple[str, ...]:
        """The names of all cache entries, which change with every token."""
        return ("inputs",)

    def empty_cache(self, batch: int, max_length: int):
        """Return empty cache entries: the last inputs of the convolution."""
        del max_length
        return self._start(batch)

    def _start(self, batch: int):
        """Return what stands before the first token of each row, as the cache holds it."""
        shape = (batch, self.sizes.conv_size - 1, self.sizes.channels)
        return {"inputs": jnp.zeros(shape, self.dtype)}

    def mix(self, x: Float[Array, "... h"], positions: Int32[Array, "b t"], entries):
        """Mix the tokens `x`, ``[b, t, h]`` or packed; returns the same and the cache entries.

        Tokens whose position is `PADDING` or larger are padding. Padding stands behind all other
        tokens of its row and does not change the entries.
        """
        b, c, inputs = jnp.split(unpack(self.in_proj(x), positions), 3, axis=-1)
        weight = self.conv_weight.get_value()[:, 0]

        def run(inputs, positions, old):
            mixed, inputs = convolve(inputs, old["inputs"], weight, positions < PADDING)
            return mixed, {"inputs": inputs}

        start = functools.partial(self._start, len(positions))
        gated = compute(jnp.multiply, b, inputs)
        mixed, entries = run_tokens(run, entries, start, gated, positions)
        if self.conv_bias is not None:
            mixed = mixed + self.conv_bias.get_value()[None, None]
        y = (c.astype(jnp.float32) * mixed).astype(self.dtype)
        return self.out_proj(pack_like(y, positions, x)), entries


def build_short_convolution(sizes: ShortConvolutionSizes, path: str, make: Builder):
    """Make a gated short convolution. Over a mesh its channels are sharded along `tensor`.

    Args:
      sizes: the sizes of the whole mixer.
      path: the path of the mixer in the model.
      make: builds the parts.
    """
    shards, n = make.settings.shards, sizes.channels
    rows = ShardSpec("rows", shards)
    return build_sharded(
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
