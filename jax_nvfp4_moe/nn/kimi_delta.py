"""Kimi delta attention: a gated delta net with a decay for each channel of a key.

For one head, with keys and queries of length 1, the decay ``a = exp(g)`` of each key channel and
the rate ``beta``:

``S_t = diag(a_t) S_{t-1} + beta_t k_t (v_t - k_t.T diag(a_t) S_{t-1})`` and
``y_t = q_t.T S_t / sqrt(d)``

`ops.gated_delta_rule` processes a prompt in chunks.

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
from jax_nvfp4_moe.backends.channel_delta import channel_delta_step
from jax_nvfp4_moe.backends.delta_chunks import normalize_queries_and_keys
from jax_nvfp4_moe.backends.padding import count_present
from jax_nvfp4_moe.nn.building import Builder
from jax_nvfp4_moe.nn.division import divide
from jax_nvfp4_moe.nn.packing import pack_like, spread
from jax_nvfp4_moe.ops.convolution import causal_convolution
from jax_nvfp4_moe.ops.delta_rule import gated_delta_rule
from jax_nvfp4_moe.parallel.shard_spec import ShardSpec
from jax_nvfp4_moe.parallel.tensor_parallel import HeadParallel


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
        # A key head of the rule serves one value head.
        operands = q, k, v[..., None, :], g[..., None, :], beta[..., None], old["state"][:, :, None]
        if t == 1:
            y, state = channel_delta_step(*normalize_queries_and_keys(q, k), *operands[2:])
        else:
            rule = functools.partial(gated_delta_rule, dtype=self.dtype, target=self.target)
            y, state = rule(*operands, lengths=count_present(present), normalize=True)
        y, state = pack_like(y[..., 0, :], positions, x), state[:, :, 0]
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
