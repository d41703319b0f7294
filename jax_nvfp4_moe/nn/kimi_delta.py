"""Kimi delta attention: a gated delta net with a decay for each channel of a key.

For one head, with keys and queries of length 1, the decay ``a = exp(g)`` of each key channel and
the rate ``beta``:

``S_t = diag(a_t) S_{t-1} + beta_t k_t (v_t - k_t.T diag(a_t) S_{t-1})`` and
``y_t = q_t.T S_t / sqrt(d)``

A prompt is processed in chunks, as `delta_chunks` describes.

Source: arXiv:2510.26692; `modeling_kimi_linear` and `modeling_bailing_hybrid` of transformers for
the details.
"""

import dataclasses
import functools
from collections.abc import Mapping
from typing import ClassVar

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int32

from jax_nvfp4_moe.backends.attention import PADDING
from jax_nvfp4_moe.backends.delta_chunks import (
    Chunks,
    apply_chunks,
    choose_precision,
    for_device,
    join_chunks,
    split_chunks,
)
from jax_nvfp4_moe.nn.building import Builder
from jax_nvfp4_moe.nn.division import divide
from jax_nvfp4_moe.nn.packing import pack_like, spread
from jax_nvfp4_moe.numerics.chunk_decay import (
    keep_neighbors,
    part_sizes,
    sum_from_start,
    sum_to_edge,
    sum_to_end,
)
from jax_nvfp4_moe.ops.convolution import causal_convolution
from jax_nvfp4_moe.parallel.shard_spec import ShardSpec
from jax_nvfp4_moe.parallel.tensor_parallel import HeadParallel

# Number of tokens in a chunk on a GPU, and on other devices; see `for_device`. The pairs of a chunk
# take one product for each size of its parts, which makes larger chunks slower.
_GPU_CHUNK, _CPU_CHUNK = 64, 32
_TINY = 1e-6  # added to the squared length of keys and queries


@dataclasses.dataclass(frozen=True)
class KimiDeltaSizes:
    """The sizes of one Kimi delta attention.

    Attributes:
      hidden: the size of the input and of the output.
      heads: the number of heads of queries, keys and values.
      head_dim: the number of channels of a head.
      conv_size: the number of tokens that the convolution sees: the current one and those before.
      eps: the epsilon of the norm.
      low_rank: whether the projections of the decays and of the output's gate are two matrices
        with `head_dim` channels between them (Kimi-Linear), or one matrix each (Ling).
      lower_bound: the smallest logarithm of a decay, which is ``bound * sigmoid(rate * x)``. None
        means that there is no bound: the logarithm is ``-rate * softplus(x)``.
      rate_shape: the shape that the logarithms of the rates have in the file; None for ``[heads]``.
    """

    hidden: int
    heads: int
    head_dim: int
    conv_size: int
    eps: float
    low_rank: bool
    lower_bound: float | None = None
    rate_shape: tuple[int, ...] | None = None

    @property
    def channels(self) -> int:
        """The number of channels of all heads together."""
        return self.heads * self.head_dim


class KimiDelta(HeadParallel):
    """Linears, a causal convolution, the delta rule, and a norm gated by ``sigmoid``.

    Attributes:
      one_convolution: static; whether one variable holds the weights of the convolution for
        queries, keys and values. The file decides: it has one tensor for all three, or three.
    """

    cache_axes: ClassVar[Mapping[str, int | None]] = {"inputs": 2, "state": 1}

    def __init__(self, sizes: KimiDeltaSizes, make: Builder, path: str):
        """Make the module with the heads of one shard."""
        h, n, d = sizes.hidden, sizes.channels, sizes.head_dim
        self.sizes, self.dtype = sizes, jnp.dtype(make.settings.dtype)
        self.target = make.settings.target
        self.qkv = make.merged_linear(f"{path}.qkv", h, {"q": n, "k": n, "v": n})
        self.rate = make.linear(f"{path}.rate", sizes.heads, h)
        inner = d if sizes.low_rank else h
        self.decay_down = make.linear(f"{path}.decay_down", d, h) if sizes.low_rank else None
        self.decay_up = make.linear(f"{path}.decay_up", n, inner)
        self.gate_down = make.linear(f"{path}.gate_down", d, h) if sizes.low_rank else None
        self.gate_up = make.linear(f"{path}.gate_up", n, inner)
        self.out_proj = make.linear(f"{path}.out_proj", h, n)

        def variable(name, *shape, stored=None):
            return make.variable(f"{path}.{name}", shape, dtype=jnp.float32, stored=stored)

        self.one_convolution = make.has(f"{path}.conv")
        if self.one_convolution:
            self.conv = variable("conv", 3 * n, 1, sizes.conv_size)
        else:
            self.conv_q, self.conv_k, self.conv_v = (
                variable(f"conv_{name}", n, 1, sizes.conv_size) for name in "qkv"
            )
        self.A_log = variable("A_log", sizes.heads, stored=sizes.rate_shape)
        self.dt_bias = variable("dt_bias", n)
        self.norm = variable("norm", d)

    def empty_cache(self, batch: int, max_length: int):
        """Return empty cache entries: the last inputs of the convolution, and the states."""
        del max_length
        sizes = self.sizes
        shape = (batch, sizes.heads, sizes.head_dim, sizes.head_dim)
        return {
            "inputs": jnp.zeros((batch, sizes.conv_size - 1, 3 * sizes.channels), self.dtype),
            "state": jnp.zeros(shape, jnp.float32),
        }

    def mix(self, x: Float[Array, "... h"], positions: Int32[Array, "b t"], entries):
        """Mix the tokens `x`, ``[b, t, h]`` or packed; returns the same and the cache entries.

        Tokens whose position is `PADDING` or larger are padding. Padding stands behind all other
        tokens of its row and does not change the entries.
        """
        sizes, (b, t) = self.sizes, positions.shape
        old = self.empty_cache(b, 0) if entries is None else entries
        present = positions < PADDING
        qkv, decays, rate = (
            spread(part, positions) for part in (self.qkv(x), self._log_decays(x), self.rate(x))
        )
        parts, inputs = causal_convolution(
            qkv.astype(old["inputs"].dtype),
            positions,
            old["inputs"],
            weight=self._conv_weight(),
            widths=(sizes.channels,) * 3,
            target=self.target,
        )
        heads = (b, t, sizes.heads, sizes.head_dim)
        q, k, v = (part.reshape(heads) for part in parts)
        # Padding gets a decay of 1 and a rate of 0, which do not change the state.
        g = jnp.where(present[..., None, None], decays.reshape(heads), 0)
        beta = jnp.where(present[..., None], jax.nn.sigmoid(rate.astype(jnp.float32)), 0)
        rule = delta_step if t == 1 else self._rule
        y, state = rule(_unit(q) * sizes.head_dim**-0.5, _unit(k), v, g, beta, old["state"])
        y = pack_like(y, positions, x)
        y = self._gated_norm(y, _project(self.gate_down, self.gate_up, x))
        y = self.out_proj(y.reshape(*x.shape[:2], -1))
        return y, None if entries is None else {"inputs": inputs, "state": state}

    def _conv_weight(self):
        """Return the weights of the convolution ``[3 n, conv_size]``: queries, keys, values."""
        if self.one_convolution:
            return self.conv.get_value()[:, 0]
        parts = (self.conv_q, self.conv_k, self.conv_v)
        return jnp.concatenate([part.get_value()[:, 0] for part in parts])

    def _log_decays(self, x):
        """Return the logarithm of the decay of each channel, ``[b, t, n]``."""
        sizes = self.sizes
        given = _project(self.decay_down, self.decay_up, x).astype(jnp.float32)
        given = given + self.dt_bias.get_value()[None, None]
        rate = jnp.repeat(jnp.exp(self.A_log.get_value()), sizes.head_dim)[None, None]
        if sizes.lower_bound is not None:
            return sizes.lower_bound * jax.nn.sigmoid(rate * given)
        return -rate * jax.nn.softplus(given)

    def _rule(self, *operands):
        """Compute `delta_chunks` with the chunks and the precision for the device and the dtype."""
        rule = functools.partial(delta_chunks, precision=choose_precision(self.dtype))
        return for_device(rule, _GPU_CHUNK, _CPU_CHUNK)(*operands)

    def _gated_norm(self, y, gate):
        """Return ``norm(y) * sigmoid(gate)``, where each head is normalized on its own."""
        mean = jnp.mean(jnp.square(y), axis=-1, keepdims=True)
        normal = self.norm.get_value()[None, None, None] * (y * lax.rsqrt(mean + self.sizes.eps))
        gate = jax.nn.sigmoid(gate.astype(jnp.float32).reshape(y.shape))
        return (normal * gate).astype(self.dtype)


def _project(down, up, x):
    """Return ``up(down(x))``, or ``up(x)`` if `down` is None."""
    return up(x if down is None else down(x))


def build_kimi_delta(sizes: KimiDeltaSizes, path: str, make: Builder):
    """Make a Kimi delta attention. Over a mesh its heads are divided along `tensor`.

    Args:
      sizes: the sizes of the whole mixer.
      path: the path of the mixer in the model.
      make: builds the parts.
    """
    shards, n, reason = make.settings.shards, sizes.channels, None
    if sizes.heads % shards:
        reason = f"{sizes.heads} heads cannot be divided into {shards} equal parts"
    by_heads = ("q", "k", "v", "rate", "decay_up", "gate_up", "A_log", "dt_bias")
    by_heads += ("conv_q", "conv_k", "conv_v")
    return divide(
        make,
        lambda make, sizes: KimiDelta(sizes, make, path),
        sizes,
        dataclasses.replace(sizes, heads=sizes.heads // shards),
        specs={
            **dict.fromkeys(by_heads, ShardSpec("rows", shards)),
            "conv": ShardSpec("rows", shards, (n, n, n)),
            "out_proj": ShardSpec("columns", shards),
        },
        last=f"{path}.out_proj",
        width=n,
        reason=reason,
    )


def delta_step(
    q: Float[Array, "b 1 n d"],
    k: Float[Array, "b 1 n d"],
    v: Float[Array, "b 1 n e"],
    g: Float[Array, "b 1 n d"],
    beta: Float[Array, "b 1 n"],
    state: Float[Array, "b n d e"],
) -> tuple[Float[Array, "b 1 n e"], Float[Array, "b n d e"]]:
    """Process one token. The arguments and results are those of `delta_chunks`."""
    q, k = q[:, 0, ..., None], k[:, 0, ..., None]
    state = state * jnp.exp(g[:, 0])[..., None]
    missing = v[:, 0] - jnp.sum(state * k, axis=-2)
    state = state + k * (missing * beta[:, 0, :, None])[..., None, :]
    return jnp.sum(state * q, axis=-2)[:, None], state


def delta_chunks(
    q: Float[Array, "b t n d"],
    k: Float[Array, "b t n d"],
    v: Float[Array, "b t n e"],
    g: Float[Array, "b t n d"],
    beta: Float[Array, "b t n"],
    state: Float[Array, "b n d e"],
    chunk: int = _CPU_CHUNK,
    precision: lax.Precision = lax.Precision.HIGHEST,
) -> tuple[Float[Array, "b t n e"], Float[Array, "b n d e"]]:
    """Process tokens in chunks. The result is that of `delta_step`, applied token by token.

    Let S be the state at the beginning of a chunk. The corrections u that its tokens write solve
    ``u_i + beta_i sum_{j<i} (k_i . D_ij k_j) u_j = beta_i (v_i - (exp(G_i) k_i).T S)``, where
    ``G_i`` is the sum of g up to i, and ``D_ij = diag(exp(G_i - G_j))``.

    Args:
      q: the queries, of length 1 and then scaled.
      k: the keys, of length 1.
      v: the values.
      g: the logarithm of the decay of each channel, at most 0.
      beta: the rate of the correction.
      state: the state before the first token.
      chunk: the number of tokens of a chunk, a power of 2.
      precision: precision of the products that `apply_chunks` names. Full float32 by default.

    Returns:
      The results in float32, and the state after the last token.
    """
    t = q.shape[1]
    chunk = min(chunk, 1 << (t - 1).bit_length())
    q, k, v, g = (split_chunks(part, chunk) for part in (q, k, v, g))
    from_start = jnp.exp(sum_from_start(g))
    key_pairs, query_pairs = _decayed_pairs(q, k, g, precision)
    chunks = Chunks(
        key_pairs,
        query_pairs,
        read_keys=from_start * k,
        read_queries=from_start * q,
        write_keys=jnp.exp(sum_to_end(g)) * k,
        values=v,
        beta=split_chunks(beta[..., None], chunk),
        kept=from_start[..., -1, :, None],
    )
    y, state = apply_chunks(chunks, state, precision)
    return join_chunks(y, t), state


def _decayed_pairs(q, k, g, precision):
    """Return ``k_i . D_ij k_j`` for i > j and ``q_i . D_ij k_j`` for i >= j, else 0.

    Each channel has its own decay. Between neighboring parts of a chunk the decay is the product of
    the decay to the edge between them and that from the edge, so that one matrix product gives the
    pairs of all parts of a size.
    """
    count = k.shape[-2]
    key_pairs = jnp.zeros((*k.shape[:-1], count), k.dtype)
    query_pairs = jnp.sum(q * k, axis=-1, keepdims=True) * jnp.broadcast_to(
        jnp.eye(count, dtype=k.dtype), key_pairs.shape
    )
    for size in part_sizes(count):
        decay = jnp.exp(sum_to_edge(g, size))
        faded = decay * k
        turned = jnp.swapaxes(faded, -1, -2)
        key_pairs += keep_neighbors(_matmul(faded, turned), size)
        read = jnp.matmul(decay * q, turned, precision=precision)
        query_pairs += keep_neighbors(read, size)
    return key_pairs, query_pairs


def _matmul(x, y):
    return jnp.matmul(x, y, precision=lax.Precision.HIGHEST)


def _unit(x):
    """Return `x` in float32, scaled to length 1 along the last axis."""
    return x * lax.rsqrt(jnp.sum(jnp.square(x), axis=-1, keepdims=True) + _TINY)
