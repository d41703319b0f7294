"""Hyper-connections: several residual streams, which each part of a layer reads and writes.

Each token has n streams ``x[i]``. A part of a layer, attention or experts, sees one vector and adds
to all streams::

  y = part(sum over i of read[i] * x[i])
  x[j] = write[j] * y + sum over i of mix[i, j] * x[i]

The weights `read`, `write` and `mix` are computed for each token from all of its streams. The rows
and columns of `mix` sum to 1, so that the streams do not grow from layer to layer.

Source: `modeling_deepseek_v4` of transformers; Sinkhorn and Knopp, "Concerning nonnegative matrices
and doubly stochastic matrices", 1967.
"""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jaxtyping import Array, Float

from jax_nvfp4_moe.nn.building.builder import Builder
from jax_nvfp4_moe.nn.indexed_tuple import register_indexed
from jax_nvfp4_moe.numerics.casts import cast
from jax_nvfp4_moe.numerics.norms import normalize_plainly
from jax_nvfp4_moe.ops.dense import dense


@dataclasses.dataclass(frozen=True)
class StreamSizes:
    """Sizes of hyper-connections. All fields are static.

    Attributes:
      streams: number of residual streams, n.
      hidden: width of a stream.
      rounds: how often columns and rows of the mixing weights are divided by their sums.
      eps: added to weights and to the sums by which they are divided.
      norm_eps: epsilon of the norm of all streams of a token.
    """

    streams: int
    hidden: int
    rounds: int
    eps: float
    norm_eps: float


@register_indexed
class Connection(NamedTuple):
    """How the result of a part of a layer returns to the streams.

    Attributes:
      write: float32 ``[b, t, n]``.
      mix: float32 ``[b, t, n, n]``.
    """

    write: Float[Array, "b t n"]
    mix: Float[Array, "b t n n"]

    def apply(self, x: Float[Array, "b t n h"], y: Float[Array, "b t h"]):
        """Return the streams ``[b, t, n, h]`` after a part of a layer, in the dtype of `x`.

        Args:
          x: the streams before the part.
          y: the result of the part.
        """
        kept = _weigh(self.mix, x.astype(jnp.float32)[:, :, :, None, :])
        added = self.write[..., None] * y.astype(jnp.float32)[:, :, None, :]
        return cast(kept + added, x.dtype)


class HyperConnection(nnx.Module):
    """The weights by which a part of a layer reads and writes the residual streams.

    They are computed in float32, also in a bfloat16 model.

    Attributes:
      sizes: static.
      projection: `nnx.Param` float32 ``[(2 + n) * n, n * h]``, rows of `read`, `write` and `mix`.
      bias: `nnx.Param` float32 ``[(2 + n) * n]``.
      scale: `nnx.Param` float32 ``[3]``, factors of the three kinds of weights.
    """

    def __init__(self, sizes: StreamSizes, make: Builder, path: str):
        """Build the connection at `path`."""
        self.sizes, n = sizes, sizes.streams
        rows = (2 + n) * n
        self.projection = make.variable(
            f"{path}.projection", (rows, n * sizes.hidden), dtype=jnp.float32
        )
        self.bias = make.variable(f"{path}.bias", (rows,), dtype=jnp.float32)
        self.scale = make.variable(f"{path}.scale", (3,), dtype=jnp.float32)

    def __call__(self, x: Float[Array, "b t n h"]) -> tuple[Float[Array, "b t h"], Connection]:
        """Return the vector that the part of the layer sees, and how its result returns."""
        sizes, n = self.sizes, self.sizes.streams
        kinds, scale = [n, 2 * n], self.scale.get_value()
        logits = jnp.split(_project(sizes, x, self.projection), kinds, axis=-1)
        biases = jnp.split(self.bias.get_value()[None, None], kinds, axis=-1)
        read, write, mix = (
            logits[kind] * scale[kind] + biases[kind] for kind in range(len(logits))
        )
        read = jax.nn.sigmoid(read) + sizes.eps
        mix = balance(mix.reshape(*mix.shape[:2], n, n), sizes.rounds, sizes.eps)
        return _collapse(read, x), Connection(2 * jax.nn.sigmoid(write), mix)


class StreamCollapse(nnx.Module):
    """The weights that make one vector of all streams, before the last norm of a model.

    Attributes:
      sizes: static.
      projection: `nnx.Param` float32 ``[n, n * h]``.
      bias: `nnx.Param` float32 ``[n]``.
      scale: `nnx.Param` float32 ``[1]``.
    """

    def __init__(self, sizes: StreamSizes, make: Builder, path: str):
        """Build the module at `path`."""
        self.sizes, n = sizes, sizes.streams
        shape = (n, n * sizes.hidden)
        self.projection = make.variable(f"{path}.projection", shape, dtype=jnp.float32)
        self.bias = make.variable(f"{path}.bias", (n,), dtype=jnp.float32)
        self.scale = make.variable(f"{path}.scale", (1,), dtype=jnp.float32)

    def __call__(self, x: Float[Array, "b t n h"]) -> Float[Array, "b t h"]:
        """Return the weighted sum of the streams."""
        logits = _project(self.sizes, x, self.projection) * self.scale.get_value()[None, None]
        read = jax.nn.sigmoid(logits + self.bias.get_value()[None, None]) + self.sizes.eps
        return _collapse(read, x)


def balance(logits: Float[Array, "b t n n"], rounds: int, eps: float) -> Float[Array, "b t n n"]:
    """Return positive matrices whose rows and columns sum to about 1.

    The softmax of each row is taken first. Then columns and rows are divided by their sums in turn,
    so that `rounds` divisions of columns enclose ``rounds - 1`` of rows.

    Args:
      logits: float32.
      rounds: at least 1.
      eps: added to the softmax, and to each sum.
    """

    def divide(matrix, axis):
        return matrix / (jnp.sum(matrix, axis=axis, keepdims=True) + eps)

    first = divide(jax.nn.softmax(logits, axis=-1) + eps, -2)
    return lax.fori_loop(0, rounds - 1, lambda _, m: divide(divide(m, -1), -2), first)


def _project(sizes, x, projection):
    """Return float32 products of ``projection [m, n * h]`` with the normalized streams."""
    flat = lax.collapse(x, 2).astype(jnp.float32)
    return dense(normalize_plainly(flat, sizes.norm_eps), projection.get_value())


def _collapse(read, x):
    """Return ``sum over i of read[i] * x[i]``, ``[b, t, h]`` in the dtype of `x`."""
    return cast(_weigh(read, x.astype(jnp.float32)), x.dtype)


def _weigh(weights, x):
    """Return ``sum over i of weights[b, t, i, ...] * x[b, t, i, ..., h]``."""
    return jnp.sum(weights[..., None] * x, axis=2)
