"""Mamba-2: a recurrent mixer whose state is one matrix per head.

Each head computes for every token::

  state = exp(dt * a) * state + dt * outer(x, b)
  y = state @ c + d * x

Here ``x [p]``, ``b [n]``, ``c [n]`` and the step ``dt > 0`` belong to the token and the head. The
numbers ``a < 0`` and ``d`` are weights of the head.

A single token takes one such step. More tokens are divided into chunks. Inside a chunk, matrix
products compute all tokens at once. One more product computes the states before all chunks of a
batch, and a scan carries the state from batch to batch.

Source: arXiv:2405.21060, section 6; `modeling_nemotron_h` of transformers for the layers around
the recurrence.
"""

import dataclasses
import functools
from collections.abc import Mapping
from typing import ClassVar

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int32

from jax_nvfp4_moe.backends.delta_chunks import choose_precision, for_device
from jax_nvfp4_moe.backends.mamba2 import mix_mamba2, ssd_step
from jax_nvfp4_moe.nn.building import Builder
from jax_nvfp4_moe.nn.division import divide
from jax_nvfp4_moe.nn.packing import pack_like, spread
from jax_nvfp4_moe.numerics.activations import find_activation
from jax_nvfp4_moe.numerics.chunk_decay import sum_between, sum_from_start, sum_to_end
from jax_nvfp4_moe.ops.convolution import causal_convolution
from jax_nvfp4_moe.ops.recurrent import mamba2_step
from jax_nvfp4_moe.parallel.shard_spec import ShardSpec
from jax_nvfp4_moe.parallel.tensor_parallel import HeadParallel

# Number of tokens in a chunk on a GPU, and on other devices; see `for_device`.
_GPU_CHUNK, _CPU_CHUNK = 128, 64
# Number of tokens, over all rows, whose chunks are computed at once. It bounds the memory of the
# products.
_BATCH_TOKENS = 2048


@dataclasses.dataclass(frozen=True)
class Mamba2Config:
    """Sizes of a Mamba-2 mixer. All fields are static.

    Attributes:
      hidden: width of the tokens.
      heads: number of heads.
      head_dim: p, the width of a head.
      state_size: n. The state is ``[heads, head_dim, state_size]``.
      groups: number of groups of heads. The heads of a group share b and c, and the norm treats
        them as one vector.
      conv_size: number of tokens that the convolution sees, the current one included.
      activation: function after the convolution, a name in `numerics.activations.ACTIVATIONS`.
      bias: whether the input and output projections have a bias.
      conv_bias: whether the convolution has a bias.
      eps: epsilon of the norm.
      step_limits: smallest and largest dt.
    """

    hidden: int
    heads: int
    head_dim: int
    state_size: int
    groups: int
    conv_size: int
    activation: str
    bias: bool
    conv_bias: bool
    eps: float
    step_limits: tuple[float, float]

    @property
    def inner(self) -> int:
        """Number of channels of all heads together."""
        return self.heads * self.head_dim

    @property
    def channels(self) -> int:
        """Number of channels of the convolution: x, b and c."""
        return self.inner + 2 * self.groups * self.state_size


class Mamba2(HeadParallel):
    """Mamba-2 with a short convolution before the recurrence and a gated norm after it.

    ::

      z, xbc, dt = split(in_proj(tokens))
      x, b, c = split(act(conv(xbc)))
      dt = clip(softplus(dt + dt_bias), *step_limits)
      y = out_proj(norm((ssd(x, dt, a, b, c) + d * x) * silu(z)))

    `ssd` is the recurrence without the term ``d * x``, and ``a = -exp(A_log)``. The norm applies to
    each group of heads by itself.

    Everything between the two projections is computed in float32. In prompts, a GPU rounds the
    operands of some products to TensorFloat-32 if the model is in bfloat16; see `ssd`.
    """

    cache_axes: ClassVar[Mapping[str, int | None]] = {"conv": 2, "state": 1}

    def __init__(self, config: Mamba2Config, make: Builder, path: str):
        """Build the mixer at `path`; the sizes in `config` are those of one shard."""

        def variable(name, *shape):
            return make.variable(f"{path}.{name}", shape, dtype=jnp.float32)

        h, inner, channels = config.hidden, config.inner, config.channels
        self.config, self.dtype = config, make.settings.dtype
        self.activation = find_activation(config.activation)
        self.target = make.settings.target
        n = inner + channels + config.heads
        self.in_proj = make.linear(f"{path}.in_proj", n, h, config.bias)
        self.out_proj = make.linear(f"{path}.out_proj", h, inner, config.bias)
        self.conv_weight = variable("conv_weight", channels, 1, config.conv_size)
        self.conv_bias = variable("conv_bias", channels) if config.conv_bias else None
        self.A_log = variable("A_log", config.heads)
        self.dt_bias = variable("dt_bias", config.heads)
        self.D = variable("D", config.heads)
        self.norm = variable("norm", inner)

    def empty_cache(self, batch: int, max_length: int):
        """Return zeros for the last inputs of the convolution and for the states of one shard."""
        del max_length
        config = self.config
        state = (batch, config.heads, config.head_dim, config.state_size)
        return {
            "conv": jnp.zeros((batch, config.conv_size - 1, config.channels), self.dtype),
            "state": jnp.zeros(state, jnp.float32),
        }

    def mix(self, x: Float[Array, "... h"], positions: Int32[Array, "b t"], entries):
        """Return the output for tokens `x`, in the shape of `x`, and the cache entries.

        Tokens at positions of `PADDING` or more do not change the entries. They must follow all
        other tokens of their row.
        """
        config, (b, t) = self.config, positions.shape
        old = self.empty_cache(b, 0) if entries is None else entries
        bias = None if self.conv_bias is None else self.conv_bias.get_value()
        step = functools.partial(mamba2_step, target=self.target)
        convolution = None
        if self.activation == find_activation("silu_no_mul"):
            convolution = functools.partial(causal_convolution, target=self.target)
        prompt = functools.partial(mix_mamba2, rule=self._rule, convolution=convolution)
        y, conv, state = (step if t == 1 else prompt)(
            spread(self.in_proj(x), positions),
            positions,
            old["conv"],
            old["state"],
            conv_weight=self.conv_weight.get_value()[:, 0],
            conv_bias=bias,
            A_log=self.A_log.get_value(),
            dt_bias=self.dt_bias.get_value(),
            D=self.D.get_value(),
            norm=self.norm.get_value(),
            activation=self.activation,
            step_limits=config.step_limits,
            eps=config.eps,
        )
        y = self.out_proj(pack_like(y, positions, x))
        return y, None if entries is None else {"conv": conv, "state": state}

    def _rule(self, *operands):
        """Compute `ssd` with the chunks and the precision for the device and the dtype."""
        rule = functools.partial(ssd, precision=choose_precision(self.dtype))
        return for_device(rule, _GPU_CHUNK, _CPU_CHUNK)(*operands)


def build_mamba2(config: Mamba2Config, path: str, make: Builder):
    """Build a Mamba-2 mixer, divided by groups along the mesh axis `tensor`.

    Args:
      config: sizes of the whole mixer.
      path: path of the mixer.
      make: the `Builder` of the model.
    """
    shards, reason = make.settings.shards, None
    if config.groups % shards:
        reason = f"{config.groups} groups cannot be divided into {shards} equal parts"
    own = dataclasses.replace(config, heads=config.heads // shards, groups=config.groups // shards)
    rows = ShardSpec("rows", shards)
    convolved = (config.inner, *(config.groups * config.state_size,) * 2)  # x, B and C
    channels = ShardSpec("rows", shards, convolved)
    return divide(
        make,
        lambda make, sizes: Mamba2(sizes, make, path),
        config,
        own,
        specs={
            "in_proj": ShardSpec("rows", shards, (config.inner, *convolved, config.heads)),
            **dict.fromkeys(("conv_weight", "conv_bias"), channels),
            **dict.fromkeys(("A_log", "dt_bias", "D", "norm"), rows),
            "out_proj": ShardSpec("columns", shards),
        },
        last=f"{path}.out_proj",
        width=config.inner,
        reason=reason,
    )


def ssd(
    x: Float[Array, "b t h p"],
    dt: Float[Array, "b t h"],
    a: Float[Array, " h"],
    B: Float[Array, "b t g n"],
    C: Float[Array, "b t g n"],
    state: Float[Array, "b h p n"],
    chunk: int = _CPU_CHUNK,
    precision: lax.Precision = lax.Precision.HIGHEST,
) -> tuple[Float[Array, "b t h p"], Float[Array, "b h p n"]]:
    """Run the recurrence for t tokens, without the term ``d * x``.

    Each head computes for every token::

      state = exp(dt * a) * state + dt * outer(x, b)
      y = state @ c

    All arrays are float32.

    Args:
      x: inputs of the heads, ``[b, t, h, p]``.
      dt: steps, ``[b, t, h]``. A step of 0 leaves the state unchanged.
      a: negative numbers, ``[h]``.
      B: b of each group, ``[b, t, g, n]``. Group 0 holds the first h / g heads, and so on.
      C: c of each group, ``[b, t, g, n]``.
      state: state before the first token, ``[b, h, p, n]``.
      chunk: number of tokens in a chunk, a power of 2.
      precision: precision of the products with x, b, c and states. Full float32 by default.
        Exponents and the sums of states are computed in full float32 in any case: a lower precision
        rounds what is read from a state and what is added to it, but never the state.

    Returns:
      y ``[b, t, h, p]``, and the state after the last token, ``[b, h, p, n]``.
    """
    (b, t, h, p), (g, n) = x.shape, B.shape[2:]
    if t == 1:
        return ssd_step(x, dt, a, B, C, state)
    x = (x * dt[..., None]).reshape(b, t, g, h // g, p)
    decay = (dt * a[None, None, :]).reshape(b, t, g, h // g)
    grouped = state.reshape(b, g, h // g, p, n)
    chunk = min(chunk, 1 << (t - 1).bit_length())
    chunks = -(-t // chunk)
    batches = -(-chunks * chunk * b // _BATCH_TOKENS)
    per_batch = -(-chunks // batches)
    batches = -(-chunks // per_batch)

    def split(x):
        padded = batches * per_batch * chunk
        x = jnp.pad(x, [(0, 0), (0, padded - t)] + [(0, 0)] * (x.ndim - 2))
        return jnp.moveaxis(x.reshape(b, batches, per_batch, chunk, *x.shape[2:]), 1, 0)

    def run(grouped, batch):
        y, grouped = _chunks(batch, grouped, precision)
        return grouped, y

    operands = tuple(map(split, (x, decay, B, C)))
    grouped, y = lax.scan(run, grouped, operands)
    y = jnp.moveaxis(y, 0, 1).reshape(b, -1, h, p)[:, :t]
    return y, grouped.reshape(state.shape)


def _chunks(operands, state, precision):
    """Compute c chunks of q tokens: ``x [b, c, q, g, r, p]``; the other operands begin likewise."""
    product = functools.partial(jnp.einsum, precision=precision)
    x, logs, B, C = operands
    logs = jnp.moveaxis(logs, 2, -1)
    between = jnp.tril(jnp.exp(sum_between(logs)))
    from_start, to_end = (
        jnp.moveaxis(jnp.exp(total(logs[..., None])), -2, 2)
        for total in (sum_from_start, sum_to_end)
    )
    scores = product("bcign,bcjgn->bcgij", C, B)
    y = product("bcgrij,bcjgrp->bcigrp", scores[:, :, :, None] * between, x)
    added = product("bcjgrp,bcjgn->bcgrpn", x * to_end, B)
    before, state = _carry(jnp.sum(logs, axis=-1), added, state)
    carried = product("bcign,bcgrpn->bcigrp", C, before)
    return y + carried * from_start, state


def _carry(logs, added, state):
    """Return the state before each chunk, ``[b, c, g, r, p, n]``, and the state after the last one.

    ``state[c] = exp(logs[c]) * state[c - 1] + added[c]``. Each state is a sum over the state before
    the batch and over what the chunks add, so that one product computes all states.
    """
    count = logs.shape[1] + 1
    size = 1 << (count - 1).bit_length()
    # Index 0 belongs to the state before the batch.
    logs = jnp.pad(jnp.moveaxis(logs, 1, -1), [(0, 0)] * 3 + [(1, size - count)])
    between = jnp.tril(jnp.exp(sum_between(logs)))[..., :count, :count]
    given = jnp.concatenate([state[:, None], added], axis=1)
    states = jnp.einsum("bgrij,bjgrpn->bigrpn", between, given, precision=lax.Precision.HIGHEST)
    return states[:, :-1], states[:, -1]
