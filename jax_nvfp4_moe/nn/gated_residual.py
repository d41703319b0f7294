"""Several residual streams that gates of low rank read, and that each part of a layer adds to.

Each token has n streams ``x[i]``. A part of a layer sees one vector and adds to all streams::

  normal[i] = norm_i(x[i])
  mix = sigmoid(up @ silu(down @ normal / n))
  y = part(mean over i of mix[i] * normal[i])
  x[i] += 2 * sigmoid(inject[i] @ normal / n) * y

The products read the normalized streams of a token as one vector.

Source: `modeling_qwen4_exp` of transformers.
"""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jaxtyping import Array, Float

from jax_nvfp4_moe.nn.building.builder import Builder
from jax_nvfp4_moe.nn.hyper_connections import StreamSizes
from jax_nvfp4_moe.numerics.casts import cast
from jax_nvfp4_moe.numerics.norms import normalize_plainly


class StreamNorm(nnx.Module):
    """Normalize each stream by its root mean square.

    Attributes:
      offset: `nnx.Param` float32 ``[n * h]``, the weights minus 1.
      eps: static float, added to the mean of the squares.
      shape: static, n and h.
    """

    def __init__(self, sizes: StreamSizes, make: Builder, path: str):
        """Build the norm at `path`, whose file stores ``weight - 1``."""
        self.eps, self.shape = sizes.norm_eps, (sizes.streams, sizes.hidden)
        width = sizes.streams * sizes.hidden
        self.offset = make.variable(f"{path}.offset", (width,), dtype=jnp.float32)

    def __call__(self, x: Float[Array, "b t n h"]) -> Float[Array, "b t n h"]:
        """Return the normalized streams, in the dtype of `x`."""
        weight = 1 + self.offset.get_value().reshape(self.shape)
        normal = normalize_plainly(x.astype(jnp.float32), self.eps)
        return cast(normal * weight[None, None], x.dtype)


class GatedResidual(nnx.Module):
    """The gates by which a part of a layer reads and writes the residual streams.

    Attributes:
      sizes: static.
      norm: `StreamNorm`.
      down: linear from all streams to the low rank.
      up: linear back to all streams.
      inject: linear from all streams to one number for each; None if nothing is written.
    """

    def __init__(
        self, sizes: StreamSizes, rank: int, make: Builder, path: str, *, writes: bool = True
    ):
        """Build the module at `path`; `rank` is the low rank."""
        self.sizes, width = sizes, sizes.streams * sizes.hidden
        self.target = make.settings.target
        self.norm = StreamNorm(sizes, make, f"{path}.norm")
        self.down = make.linear(f"{path}.down", rank, width)
        self.up = make.linear(f"{path}.up", width, rank)
        self.inject = make.linear(f"{path}.inject", sizes.streams, width) if writes else None

    def __call__(self, x: Float[Array, "b t n h"]) -> tuple[Float[Array, "b t h"], Any]:
        """Return the vector that the part sees, and the factors ``[b, t, n]`` for its result."""
        n, normal = self.sizes.streams, self.norm(x)
        flat = lax.collapse(normal, 2)
        inner = jax.nn.silu(self.down(flat).astype(jnp.float32) / n).astype(x.dtype)
        mix = jax.nn.sigmoid(self.up(inner).astype(jnp.float32)).reshape(x.shape)
        read = jnp.mean(mix * normal.astype(jnp.float32), axis=2).astype(x.dtype)
        if self.inject is None:
            return read, None
        return read, 2 * jax.nn.sigmoid(self.inject(flat).astype(jnp.float32) / n)


def add_injected(
    x: Float[Array, "b t n h"], y: Float[Array, "b t h"], factors: Float[Array, "b t n"]
) -> Float[Array, "b t n h"]:
    """Return the streams after a part of a layer with the result `y`, in the dtype of `x`."""
    added = factors[..., None] * y.astype(jnp.float32)[:, :, None]
    return cast(x.astype(jnp.float32) + added, x.dtype)
